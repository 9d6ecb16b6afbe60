"""Reads a command line into a `Config`: `--config=FILE[:variant]` and `--config.section.field=value`.

It imports nothing heavy, so that `--help` and a typo answer at once.
"""

import dataclasses
import difflib
import enum
import functools
import inspect
import pathlib
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from absl import flags
from ml_collections import config_flags

from ..base.errors import ConfigError
from . import Config, SourceConfig, renamed
from .bounds import Section, children, flatten, lies_in
from .unread import refuse_unread

DEFAULT_CONFIG = "configs/vlm.py"
_OBVIOUS = ("", "be greater than 0", "not be negative")  # bounds that the help leaves out
_KINDS = {bool: "true or false", int: "an integer", float: "a number", tuple: "a tuple like (1, 2)"}
C = TypeVar("C", bound=Config)


def parse(argv: Sequence[str], doc: str, kind: type[C] = Config, default: str = DEFAULT_CONFIG) -> C:
    """Returns the validated configuration of a command line (without the program's name).

    A command that needs more than `Config` has its own `kind`, and its own file as the `default`. Exits with status 0
    after `--help`, with status 2 and one line on standard error if anything is wrong.
    """
    if any(arg in ("--help", "-h", "-help") for arg in argv):
        print(help_text(doc, kind))
        raise SystemExit(0)
    try:
        return load(argv, kind, default)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def load(argv: Sequence[str], kind: type[C] = Config, default: str = DEFAULT_CONFIG) -> C:
    """Does what `parse` does, but raises `ConfigError` instead of exiting."""
    selected, overrides = default, []
    for arg in argv:
        name, equals, value = arg.removeprefix("-").removeprefix("-").partition("=")
        if not arg.startswith("-") or not equals or name.partition(".")[0] != "config":
            raise ConfigError(
                f"unknown argument {arg!r}; this command takes --config=FILE[:variant], "
                "--config.section.field=value and --help"
            )
        if name == "config":
            selected = value
        else:
            overrides.append((name.removeprefix("config."), value))
    config = read_file(selected, kind)
    for field, value in overrides:
        config = _override(config, field, value)
    config.validate()
    refuse_unread(config, [field for field, _ in overrides])
    return config


def read_file(selected: str, kind: type[C] = Config) -> C:
    """Runs `get_config(variant)` of the configuration file, and returns its result; `selected` is `FILE[:variant]`."""
    path, _, variant = selected.partition(":")
    file = pathlib.Path(path)
    if not file.exists() and not file.is_absolute():  # the command runs outside the checkout
        file = pathlib.Path(__file__).resolve().parents[2] / path
    if not file.is_file():
        raise ConfigError(f"--config={selected}: there is no file {path!r}")
    try:
        module = runpy.run_path(str(file))
    except Exception as error:
        raise ConfigError(f"--config={selected}: {path} cannot be run: {type(error).__name__}: {error}") from error
    if "get_config" not in module:
        raise ConfigError(f"--config={selected}: {path} defines no get_config(variant)")
    try:
        config = module["get_config"](variant)
    except AttributeError as error:  # sections have slots: an unknown field ends here
        raise ConfigError(f"{path}: {_explain(error, kind)}") from error
    if not isinstance(config, kind):
        wanted = f"{kind.__module__}.{kind.__name__}"
        raise ConfigError(
            f"{path}: get_config() must return a {wanted}, not {type(config).__module__}.{type(config).__name__}"
        )
    return config


def _explain(error: AttributeError, kind: type[Config]) -> str:
    match = re.fullmatch(r"'(\w+)' object has no attribute '(\w+)'", str(error))
    known = vars(sys.modules[Config.__module__]) | vars(sys.modules[kind.__module__])
    section = known.get(match[1]) if match else None
    if not match or not dataclasses.is_dataclass(section):
        return str(error) + renamed(str(error))
    names = [field.name for field in dataclasses.fields(section)]
    near = difflib.get_close_matches(match[2], names, 1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
    return f"{match[1]} has no field {match[2]!r}; {hint}"


def _override(config: C, field: str, value: str) -> C:
    """Returns the configuration with one field set from text, as the type that the field has."""
    current = _current(config, field)
    values = flags.FlagValues()
    flag = f"--config.{field}={value}"
    try:
        config_flags.DEFINE_config_dataclass("config", config, flag_values=values, sys_argv=["fluxjax", flag])
        values(["fluxjax", flag])
        changed = values["config"].value
        assert isinstance(changed, type(config))
        return changed
    except (flags.Error, ValueError, TypeError):
        wanted = _KINDS.get(type(current), f"a {type(current).__name__}")
        if isinstance(current, enum.Enum):
            wanted = "one of " + ", ".join(member.value for member in type(current))
        raise ConfigError(f"--config.{field}: {value!r} is not {wanted}{renamed(value)}") from None


def _current(config: Config, field: str) -> object:
    """Returns the value of a dotted field; raises `ConfigError` with the nearest valid name if there is none."""
    value: object = config
    section = "config"
    for part in field.split("."):
        if not isinstance(value, Section | Mapping):
            raise ConfigError(f"--config.{field}: {section} is a value and has no field {part!r}")
        names = children(value)
        if part not in names:
            every = [name for name, _ in flatten(config)]
            near = [f"{section}.{name}" for name in difflib.get_close_matches(part, names, 1)]
            near += [f"config.{name}" for name in every if name.rpartition(".")[2] == part]
            near += [f"config.{name}" for name in difflib.get_close_matches(field, every, 1, cutoff=0.4)]
            hint = f"did you mean --{near[0]}?" if near else f"{section} has {', '.join(names)}"
            raise ConfigError(f"--config.{field}: no such field; {hint}")
        section, value = f"{section}.{part}", names[part]
    if isinstance(value, Section | Mapping):
        fields = ", ".join(f"{field}.{name}" for name in children(value))
        raise ConfigError(f"--config.{field} is a section; set its fields: {fields}")
    return value


def help_text(doc: str, kind: type[Config] = Config) -> str:
    """Returns what `--help` prints: `doc`, then every field with its default, its comment and its bound."""
    lines = [doc.strip(), "", "Settings, with the defaults that a configuration file starts from:"]
    lines += [_line(f"  --config.{n}", n, kind()) for n, _ in flatten(kind()) if not lies_in(n, kind.unread)]
    if "data" not in kind.unread:
        lines += ["  --config.data.sources.NAME.FIELD=...", "      for a source that the file declares; its fields:"]
        lines += [_line(f"      {n}", n, SourceConfig()) for n, _ in flatten(SourceConfig())]
    return "\n".join(lines)


def _line(shown: str, name: str, section: Section) -> str:
    """Returns a field's line: its default, and the comment behind its declaration, the one place that explains it."""
    *sections, name = name.split(".")
    section = functools.reduce(getattr, sections, section)
    value = getattr(section, name)
    declared = "".join(inspect.getsource(owner) for owner in type(section).__mro__ if dataclasses.is_dataclass(owner))
    match = re.search(rf"^    {name}: [^#\n]*#\s*(.*)$", declared, re.MULTILINE)
    allowed = section.__dataclass_fields__[name].metadata.get("allowed", "")
    notes = [match[1]] if match else []
    notes += [f"must {allowed.partition(': ')[0]}"] if allowed not in _OBVIOUS else []
    text = f"{shown}={value.value if isinstance(value, enum.Enum) else value}"
    return f"{text.ljust(56)}  {'; '.join(notes)}".rstrip()
