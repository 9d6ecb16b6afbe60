"""Reads a command line into a `Config`: `--config=FILE[:variant]` and `--config.section.field=value`.

A setting that would do nothing (a field was changed, but another setting says that nothing reads it) is a mistake on
the command line, and refused. A configuration file may prepare more than
one choice, as `configs/vlm.py` does for several policies; `remarks` then tells which of its settings are not read.
Only choices of behaviour are listed: that `warm_start.lr` does nothing in 0 steps explains itself.

This module imports nothing heavy, so that `--help` and a typo answer at once.
"""

import dataclasses
import difflib
import enum
import inspect
import operator
import pathlib
import re
import runpy
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

from absl import flags
from ml_collections import config_flags

from . import (
    Config,
    ConfigError,
    Importance,
    ImportanceConfig,
    ModelConfig,
    Policy,
    RewardTerm,
    RolloutEngine,
    Route,
    SourceConfig,
    Strategy,
)
from .bounds import Section, children, flatten, lies_in


class Need(NamedTuple):
    """`fields` (or all fields of a section) are read only if `met`: for users, only if `setting` is `wanted`."""

    fields: Sequence[str]
    setting: str
    wanted: str
    met: Callable[[Config], bool]

    def current(self, config: Config) -> str:
        return _text(operator.attrgetter(self.setting)(config))


def _when(setting: str, values: tuple[object, ...], *fields: str) -> Need:
    """Says that `fields` are read only if the setting has one of the values."""
    read = operator.attrgetter(setting)
    return Need(fields, setting, " or ".join(map(_text, values)), lambda config: read(config) in values)


def _above(limit: int, setting: str, *fields: str) -> Need:
    """Says that `fields` are read only if the setting is above the limit."""
    read = operator.attrgetter(setting)
    return Need(fields, setting, f"above {limit}", lambda config: read(config) > limit)


def _algorithms(names: Sequence[str], *fields: str) -> Need:
    """Says that `fields` are read by these algorithms only, and perhaps by users' own."""
    wanted = " or ".join(", ".join(names).rsplit(", ", 1))
    return Need(fields, _ALGORITHM, wanted, lambda config: config.algorithm.name in names or _users(config))


def _no_algorithms(names: Sequence[str], *fields: str) -> Need:
    """Says that `fields` are read by all algorithms but these."""
    return Need(fields, _ALGORITHM, "another", lambda config: config.algorithm.name not in names or _users(config))


def _users(config: Config) -> bool:
    return not config.algorithm.built_in


def _of(section: str, *names: str) -> list[str]:
    return [f"{section}.{name}" for name in names]


def _text(value: object) -> str:
    return str(getattr(value, "value", value)) or "empty"


def _corrected(config: Config) -> bool:
    """Says whether the ratios between the policies count for more than the clipped objective."""
    importance = config.algorithm.importance
    return importance.decoupled or importance.kind is not Importance.NONE


def _weighted(config: Config) -> bool:
    """Says whether tokens have weights."""
    return _corrected(config) or config.algorithm.importance.decay < 1


def _clipped(config: Config) -> bool:
    """Says whether the policy can differ from the one that it is clipped around."""
    return not config.algorithm.importance.decoupled or config.algorithm.updates > 1


def _stale(config: Config) -> bool:
    """Says whether older versions than the newest are trained on."""
    return _policy_stale(config) or config.replay.share > 0


def _policy_stale(config: Config) -> bool:
    held = config.policy.name is Policy.TAIL_BATCHING and config.tail_batching.max_staleness > 0
    return config.policy.name in _STALE or held


def _policy_gradient(config: Config) -> bool:
    """Says whether the loss is one of tokens, each with an importance weight."""
    return config.algorithm.name != "dpo" or _users(config)


def _decoding_processes(config: Config) -> bool:
    """Says whether media are decoded in processes that can be killed."""
    return config.data.workers > 0 or config.data.preprocessors > 0


_ALGORITHM, _KIND = "algorithm.name", "algorithm.importance.kind"
_POLICY, _STRATEGY = "policy.name", "sharding.strategy"
_KL = "algorithm.kl_coefficient"
_CLIPS = _of("algorithm", "clip_low", "clip_high", "dual_clip")
_OF_TOKENS = [*_CLIPS, "algorithm.loss_aggregation"]
_OF_TOKENS += [f"algorithm.importance.{name}" for name, _ in flatten(ImportanceConfig())]
_STALE = (Policy.APRIL, Policy.ADAPTIVE_ASYNC)  # policies that train on older versions
_TINY_MODEL = [name for name, _ in flatten(ModelConfig()) if name not in ModelConfig.of_any]
_SPREAD = tuple(strategy for strategy in Strategy if strategy.spreads)
NEEDS = (
    Need(_OF_TOKENS, _ALGORITHM, "another", _policy_gradient),
    _no_algorithms(("dpo", "distillation"), "algorithm.entropy_coefficient"),
    _above(0, "data.preprocessors", *_of("data", "lease_seconds", "near_gib")),
    Need(_of("data", "decode_seconds", "decode_memory_gib"), "data.workers", "above 0", _decoding_processes),
    _when(_POLICY, (Policy.TAIL_BATCHING,), "tail_batching", *_of("schedules", "tail_prompts", "tail_responses")),
    _when(_POLICY, (Policy.APRIL,), "april"),
    _when(_POLICY, (Policy.ADAPTIVE_ASYNC,), "adaptive_async", "composer", "schedules.target_staleness"),
    _when("rollout.engine", (RolloutEngine.SERVE, RolloutEngine.SGLANG), "servers", "weights"),
    _when("servers.colocated", (True,), "servers.memory_fraction"),
    _when("weights.route", (Route.AUTO, Route.ORBAX), *_of("weights", "folder", "local", "agents", "delta")),
    _when("weights.route", (Route.AUTO, Route.BUCKET, Route.IPC), "weights.bucket_mib"),
    _when("rollout.engine", (RolloutEngine.JAX,), "rollout.kv_fraction"),
    _when("policy.dynamic_sampling", (True,), *_of("policy", "dynamic_sampling_by", "max_num_gen_batches")),
    _when("stream_trainer.enabled", (True,), *_of("stream_trainer", "first", "last", "every", "chunk")),
    _when("speculative_sync.enabled", (True,), "speculative_sync.confidence"),
    _when("parallelism.enabled", (True,), "parallelism.rise", "parallelism.calm"),
    _when("schedules.temperature", ("",), "rollout.temperature"),  # the schedule takes the place of the constant
    _when("schedules.target_staleness", ("",), "adaptive_async.target_staleness"),
    _when("schedules.tail_prompts", ("",), "tail_batching.prompts"),
    _when("schedules.tail_responses", ("",), "tail_batching.responses"),
    _when(_KIND, (Importance.TRUNCATE, Importance.MASK), "algorithm.importance.high"),
    _when(_KIND, (Importance.MASK,), "algorithm.importance.low"),
    Need(["algorithm.importance.level"], _KIND, "truncate or mask", _corrected),
    Need(["algorithm.importance.normalize"], _KIND, "truncate or mask", _weighted),
    Need(["algorithm.importance.decay"], _POLICY, "april or adaptive_async (or replay.share above 0)", _stale),
    _above(0, "replay.share", *_of("replay", "groups", "max_age", "times", "order")),
    _algorithms(("grpo", "dr_grpo", "dapo", "gspo", "cispo"), "algorithm.normalize_std"),
    _no_algorithms(("gspo", "cispo"), "algorithm.dual_clip"),
    _algorithms(("ppo",), "critic"),
    _above(0, _KL, *_of("algorithm", "kl_estimator", "reference", "reference_every")),
    _above(0, "lora.rank", *_of("lora", "alpha", "targets", "adapter")),
    Need(_CLIPS, "algorithm.importance.decoupled", "False (or several algorithm.minibatches or epochs)", _clipped),
    _when(_STRATEGY, (Strategy.ODC,), *_of("sharding", "hybrid", "deterministic", "live_layers")),
    _when(_STRATEGY, _SPREAD, *_of("sharding", "max_degree", "devices_per_host")),
    _when(_STRATEGY, (Strategy.FLEX_ULYSSES, Strategy.ODC), *_of("sharding", "calibration", "alpha", "tolerance")),
    _when(_STRATEGY, _SPREAD, *_of("packing", "rounds_per_degree", "short", "group_cap")),
    _above(1, "packing.rounds_per_degree", *_of("packing", "short", "group_cap")),
    _above(0, "checkpoint.snapshot_every", "checkpoint.snapshot_folder"),
    _when("sharding.preflight", (True,), "sharding.device_memory_gib"),
    _when("model.path", ("",), *_of("model", *_TINY_MODEL)),  # else the architecture is the checkpoint's
)


def unread(config: Config) -> dict[str, Need]:
    """Returns the fields that were changed and are not read, each with the first of `NEEDS` that is not met."""
    values, defaults = dict(flatten(config)), dict(flatten(type(config)()))
    found: dict[str, Need] = {}
    for need in NEEDS:
        for field, default in defaults.items():
            if lies_in(field, need.fields) and values[field] != default and not need.met(config):
                found.setdefault(field, need)
    return found


def refuse_unread(config: Config, given: Collection[str]) -> None:
    """Raises `ConfigError` for the first of the fields `given` on the command line that is not read."""
    for field, need in unread(config).items():
        if field in given:
            default = _text(operator.attrgetter(field)(type(config)()))
            raise ConfigError(
                f"--config.{field} needs {need.setting} {need.wanted}, not {need.current(config)}; set the one or "
                f"leave the other at {default}"
            )


def remarks(config: Config) -> list[str]:
    """Says what somebody who starts a run with these settings should know, a line each."""
    idle: dict[tuple[str, str], list[str]] = {}
    for field, need in unread(config).items():
        idle.setdefault((need.setting, need.current(config)), []).append(field)
    lines = [
        f"settings without effect here, because {setting} is {value}: {', '.join(names)}"
        for (setting, value), names in idle.items()
    ]
    importance = config.algorithm.importance
    if importance.decoupled and config.algorithm.updates == 1:
        lines.append(
            "warning: algorithm.importance.decoupled clips around the policy at the start of the step, so with one "
            "optimizer step a training step, as here, nothing is clipped; leave it off, or raise algorithm.minibatches "
            "or algorithm.epochs"
        )
    if _stale(config) and not _corrected(config) and _policy_gradient(config):
        who = config.policy.name.value if _policy_stale(config) else "replay.share above 0"
        lines.append(
            f"warning: {who} trains on older versions without an importance correction; set "
            "algorithm.importance.kind=truncate or mask"
        )
    return lines


DEFAULT_CONFIG = "configs/vlm.py"
_NAMES = """learning_rate=optim.lr lr=optim.lr max_steps=steps output_dir=run_dir model_name_or_path=model.path
    train_batch_size=rollout.prompts_per_step num_generations=rollout.group_size save_steps=checkpoint.every
    max_response_length=rollout.max_new_tokens max_completion_length=rollout.max_new_tokens eval_steps=evaluation.every
    beta=algorithm.kl_coefficient kl_coef=algorithm.kl_coefficient clip_ratio=algorithm.clip_low"""
_OTHER_NAMES = dict(re.findall(r"(\S+)=(\S+)", _NAMES))  # of settings, as verl and TRL call them
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
    for field, value in sorted(overrides, key=lambda override: override[0] != _ALGORITHM):
        config = _override(config, field, value)
        if field == _ALGORITHM:
            config.algorithm.choose(value)  # what else is given counts more
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
        return str(error)
    names = [field.name for field in dataclasses.fields(section)]
    near = difflib.get_close_matches(match[2], names, 1) or [_OTHER_NAMES[match[2]]] * (match[2] in _OTHER_NAMES)
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
        raise ConfigError(f"--config.{field}: {value!r} is not {wanted}") from None


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
            meant = _OTHER_NAMES.get(part, "")
            near = [f"{section}.{name}" for name in names if meant.endswith(f".{name}")]
            near += [f"config.{meant}"] * bool(meant)
            near += [f"config.{name}" for name in every if name.rpartition(".")[2] == part]
            near += [f"{section}.{name}" for name in difflib.get_close_matches(part, names, 1)]
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
        lines += [
            "  --config.data.sources.NAME.rewards.TERM.FIELD=...",
            "      for one of several rewards; its fields:",
        ]
        lines += [_line(f"      {n}", n, RewardTerm()) for n, _ in flatten(RewardTerm())]
    return "\n".join(lines)


def _line(shown: str, name: str, section: Section) -> str:
    """Returns a field's line: its default, and the comment behind its declaration, the one place that explains it."""
    *sections, name = name.split(".")
    for holder in sections:
        section = cast(Section, children(section)[holder])
    value = getattr(section, name)
    declared = "".join(inspect.getsource(owner) for owner in type(section).__mro__ if dataclasses.is_dataclass(owner))
    match = re.search(rf"^    {name}: [^#\n]*#\s*(.*)$", declared, re.MULTILINE)
    allowed = section.__dataclass_fields__[name].metadata.get("allowed", "")
    notes = [match[1]] if match else []
    notes += [f"must {allowed.partition(': ')[0]}"] if allowed not in _OBVIOUS else []
    text = f"{shown}={value.value if isinstance(value, enum.Enum) else value}"
    return f"{text.ljust(56)}  {'; '.join(notes)}".rstrip()
