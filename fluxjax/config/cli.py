"""Command line to `Config`: `--config=FILE[:variant]` and `--config.section.field=value`, through config_flags.

Parsed before any heavy import, so that `--help` and a typo answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
import pathlib
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_flags

from . import sections as config_module
from .sections import Config, ConfigError
from .unread import unread

DEFAULT_CONFIG = "configs/vlm.py"
C = TypeVar("C", bound=Config)


def parse(argv: Sequence[str], doc: str, kind: type[C] = Config, default: str = DEFAULT_CONFIG) -> C:
    """The validated configuration of a command line (without the program name). Commands that need more than `Config`
    have a `kind` of their own, and a file of their own as the `default`.

    Exits with status 0 after `--help`, with status 2 and one line on standard error if anything is wrong.
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
    """Like `parse`, but raises `ConfigError`."""
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
    given = {field for field, _ in overrides}
    if idle := [one.complaint for one in unread(config) if one.field in given]:
        raise ConfigError(f"--config.{idle[0]}")
    return config


def read_file(selected: str, kind: type[C] = Config) -> C:
    """Runs `get_config(variant)` of a configuration file given as `FILE[:variant]`."""
    path, _, variant = selected.partition(":")
    file = pathlib.Path(path)
    if not file.exists() and not file.is_absolute():  # also from outside the checkout
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
    module = sys.modules[kind.__module__]
    section = getattr(module, match[1], getattr(config_module, match[1], None)) if match else None
    if not match or not dataclasses.is_dataclass(section):
        return str(error)
    names = [field.name for field in dataclasses.fields(section)]
    near = difflib.get_close_matches(match[2], names, 1)
    return f"{match[1]} has no field {match[2]!r}; " + (
        f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
    )


def _override(config: C, field: str, value: str) -> C:
    """The configuration with one field set from text, as the type it has."""
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
        raise ConfigError(f"--config.{field}: {value!r} is not {_kind(current)}") from None


def _kind(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return "one of " + ", ".join(member.value for member in type(value))
    kinds = {bool: "true or false", int: "an integer", float: "a number", tuple: "a tuple like (1, 2)"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _is_section(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or isinstance(value, dict)


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else [f.name for f in dataclasses.fields(value)]


def _current(config: Config, field: str) -> Any:
    """The value of a dotted field; `ConfigError` with the nearest valid name if there is none."""
    value: Any = config
    done: list[str] = []
    for part in field.split("."):
        where = ".".join(done)
        if not _is_section(value):
            raise ConfigError(f"--config.{field}: {where} is a value and has no field {part!r}")
        if part not in _names(value):
            raise ConfigError(f"--config.{field}: no such field; {_hint(config, field, where, part, _names(value))}")
        value = value[part] if isinstance(value, dict) else getattr(value, part)
        done.append(part)
    if _is_section(value):
        raise ConfigError(
            f"--config.{field} is a section; set its fields: " + ", ".join(f"{field}.{n}" for n in _names(value))
        )
    return value


def _hint(config: Config, field: str, where: str, part: str, names: list[str]) -> str:
    near = difflib.get_close_matches(part, names, 1)
    if near:
        return f"did you mean --config.{where + '.' if where else ''}{near[0]}?"
    every = [name for name, _ in flatten(config)]
    near = [name for name in every if name.rpartition(".")[2] == part] or difflib.get_close_matches(
        field, every, 1, cutoff=0.4
    )
    return f"did you mean --config.{near[0]}?" if near else f"{where or 'config'} has {', '.join(names)}"


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All fields as (dotted name, value), depth first in order of declaration."""
    for name in _names(config):
        value = config[name] if isinstance(config, dict) else getattr(config, name)
        if _is_section(value):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def help_text(doc: str, kind: type[Config] = Config) -> str:
    """What `--help` prints: the command's own words, then every field with its default and its comment."""
    lines = [doc.strip(), "", "Settings, with the defaults that a configuration file starts from:"]
    config, unread = kind(), tuple(getattr(kind, "unread", ()))
    for name, value in flatten(config):
        if not any(name == one or name.startswith(f"{one}.") for one in unread):
            shown = value.value if isinstance(value, enum.Enum) else value
            lines.append(f"  --config.{name}={shown}".ljust(56) + f"  {_comment(name, config)}")
    if "data" in unread:
        return "\n".join(line.rstrip() for line in lines)
    lines += ["  --config.data.sources.NAME.FIELD=...", "      for a source that the file declares; its fields:"]
    source = config_module.SourceConfig()
    lines += [f"      {n}={v}".ljust(56) + f"  {_comment(n, source)}" for n, v in flatten(source)]
    return "\n".join(line.rstrip() for line in lines)


def _comment(name: str, section: Any) -> str:
    """The comment behind a field where it is declared, the one place where fields are explained."""
    *sections, name = name.split(".")
    for part in sections:
        section = getattr(section, part)
    declared = "".join(inspect.getsource(owner) for owner in type(section).__mro__ if dataclasses.is_dataclass(owner))
    match = re.search(rf"^    {name}: [^#\n]*#\s*(.*)$", declared, re.MULTILINE)
    return match[1] if match else ""
