"""Reads a command line into a `Config`: `--config=FILE[:variant]` and `--config.section.field=value`.

A command line may not change a field that is not read because of another setting. A configuration file may, because it
can prepare several choices; `remarks` names the fields that are not read. `NEEDS` leaves out obvious conditions:
`warm_start.lr`, for example, needs `warm_start.steps`.

This module imports nothing heavy, so that `--help` and errors are printed at once.
"""

import ast
import contextlib
import dataclasses
import difflib
import enum
import pathlib
import re
import runpy
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from . import POLICIES, STRATEGIES, Config, ConfigError, Importance, Ulysses
from .bounds import Section, children, expand_home, flatten, lies_in, variant
from .help import help_text


class Need(NamedTuple):
    """A condition: `fields` are read only if `setting` is `wanted`. `fields` are names of fields or sections, with
    blanks between the names. If there is a `rule`, the rule decides, and `wanted` is only shown to users."""

    fields: str
    setting: str
    wanted: str
    rule: Callable[[Config], bool] | None = None

    def current(self, config: Config) -> str:
        return _text(_value(config, self.setting))

    def met(self, config: Config) -> bool:
        if self.rule is not None:
            return self.rule(config)
        if self.setting == _ALGORITHM and not config.algorithm.built_in:
            return True  # a user's own algorithm may read any field
        if self.wanted == "above 0":
            return _value(config, self.setting) > 0
        return self.current(config) in re.split(", | or ", self.wanted)


def _value(config: Config, setting: str) -> Any:
    value: Any = config
    for name in setting.split("."):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def _text(value: object) -> str:
    return str(getattr(value, "value", value)) or "empty"


def _corrected(config: Config) -> bool:
    """Returns True if a token's loss has an importance weight in addition to the clipped ratio."""
    importance = config.algorithm.importance
    return importance.decoupled or importance.kind is not Importance.NONE


def _weighted(config: Config) -> bool:
    """Returns True if tokens have importance weights, or weights that decay with age."""
    return _corrected(config) or config.algorithm.importance.decay < 1


def _clipped(config: Config) -> bool:
    """Returns True if the trained policy can differ from the policy around which ratios are clipped."""
    return not config.algorithm.importance.decoupled or config.algorithm.updates > 1


def _stale(config: Config) -> bool:
    """Returns True if tokens of older versions than the newest may be trained on."""
    return config.policy.staleness_limit is not None or config.replay.share > 0


def _of_tokens(config: Config) -> bool:
    """Returns True if the loss is a sum over tokens, each with an importance weight."""
    return config.algorithm.label != "dpo"


_ALGORITHM, _KIND, _ENTROPY = "algorithm.name", "algorithm.importance.kind", "algorithm.entropy_coefficient"
_CLIPS = "algorithm.clip_low algorithm.clip_high algorithm.dual_clip"
_REFERENCE = "algorithm.kl_estimator algorithm.reference algorithm.reference_every"
NEEDS = (
    Need(f"{_CLIPS} algorithm.loss_aggregation algorithm.importance", _ALGORITHM, "another", _of_tokens),
    Need(_ENTROPY, _ALGORITHM, "another", lambda config: config.algorithm.label not in ("dpo", "distillation")),
    Need("data.near_gib", "data.preprocessors", "above 0"),
    Need("servers weights.route weights.agents", "rollout.engine", "serve or sglang"),  # jax reads weights.folder, too
    Need("rollout.steps_per_sync", "rollout.engine", "jax"),
    Need("weights.folder weights.agents", "weights.route", "auto or orbax"),
    Need("algorithm.importance.bounds", _KIND, "truncate or mask"),
    Need("algorithm.importance.level", _KIND, "truncate or mask", _corrected),
    Need("algorithm.importance.normalize", _KIND, "truncate or mask", _weighted),
    Need("algorithm.importance.decay", "policy.name", "april or adaptive_async (or replay.share above 0)", _stale),
    Need("replay.max_age", "replay.share", "above 0"),
    Need("model.tiny", "model.path", "empty"),  # a checkpoint has its own architecture
    Need("model.tiny.window_size model.tiny.vision_full_attention_layers", "model.tiny.architecture", "qwen2_5_vl"),
    Need("algorithm.normalize_std", _ALGORITHM, "grpo, dr_grpo, dapo, gspo, gigpo or cispo"),
    Need("algorithm.discount", _ALGORITHM, "gigpo or ppo"),
    Need("algorithm.dual_clip", _ALGORITHM, "another", lambda config: config.algorithm.label not in ("gspo", "cispo")),
    Need("critic", _ALGORITHM, "ppo"),
    Need(_REFERENCE, "algorithm.kl_coefficient", "above 0"),
    Need("lora.alpha lora.targets lora.adapter", "lora.rank", "above 0"),
    Need("parallelism.profile", "parallelism.min_degree", "above 0"),
    Need(_CLIPS, "algorithm.importance.decoupled", "False (or several algorithm.minibatches or epochs)", _clipped),
)


def unread(config: Config) -> dict[str, Need]:
    """Returns the fields that were changed and are not read, each with the first of `NEEDS` that is not met."""
    values, defaults = dict(flatten(config)), dict(flatten(type(config)()))
    found: dict[str, Need] = {}
    for need in NEEDS:
        for field, default in defaults.items():
            if lies_in(field, need.fields.split()) and values[field] != default and not need.met(config):
                found.setdefault(field, need)
    return found


def refuse_unread(config: Config, given: Collection[str]) -> None:
    """Raises `ConfigError` for the first of the fields `given` on the command line that is not read."""
    for field, need in unread(config).items():
        if field in given:
            default = _text(dict(flatten(type(config)()))[field])
            raise ConfigError(
                f"--config.{field} needs {need.setting} {need.wanted}, not {need.current(config)}; set {need.setting}, "
                f"or leave {field} at {default}"
            )


def remarks(config: Config, devices: int = 1) -> list[str]:
    """Returns lines to be shown when a run with these settings starts on `devices` devices."""
    idle: dict[tuple[str, str], list[str]] = {}
    for field, need in unread(config).items():
        idle.setdefault((need.setting, need.current(config)), []).append(field)
    lines = [
        f"settings without effect here, because {setting} is {value}: {', '.join(names)}"
        for (setting, value), names in idle.items()
    ]
    together = devices & -devices  # as `sharding.mesh.replica_size`
    if isinstance(config.sharding.strategy, Ulysses) and together < devices:
        lines.append(
            f"{config.sharding.strategy.name} on {devices} devices spreads a sequence, and evens out images, over at "
            f"most {together} of them, the largest power of two that divides {devices}"
        )
    importance = config.algorithm.importance
    if importance.decoupled and config.algorithm.updates == 1:
        lines.append(
            "warning: algorithm.importance.decoupled clips around the policy at the start of the step, so with one "
            "optimizer step in each training step, nothing is clipped; leave it off, or raise algorithm.minibatches "
            "or algorithm.epochs"
        )
    if _stale(config) and not _corrected(config) and _of_tokens(config):
        who = config.policy.name if config.policy.staleness_limit is not None else "replay.share above 0"
        lines.append(
            f"warning: {who} trains on older versions without an importance correction; set "
            "algorithm.importance.kind=truncate or mask"
        )
    return lines


DEFAULT_CONFIG = "configs/vlm.py"
_CHOICES = (_ALGORITHM, "policy", "sharding.strategy")
_NAMES = """learning_rate=optim.lr lr=optim.lr max_steps=steps output_dir=run_dir model_name_or_path=model.path
    train_batch_size=rollout.prompts_per_step num_generations=rollout.group_size save_steps=checkpoint.every
    max_response_length=rollout.max_new_tokens max_completion_length=rollout.max_new_tokens eval_steps=evaluation.every
    beta=algorithm.kl_coefficient kl_coef=algorithm.kl_coefficient clip_ratio=algorithm.clip_low
    policy.name=policy policy.dynamic_sampling_by=rollout.dynamic_sampling composer.order=policy.prefer
    composer.stratify=policy.prefer composer.curriculum=policy.prefer composer.diversity=policy.prefer
    composer.lengths=policy.prefer schedules.tail_prompts=policy.prompts schedules.tail_responses=policy.responses
    optim.beta1=optim.betas optim.beta2=optim.betas algorithm.importance.low=algorithm.importance.bounds
    algorithm.importance.high=algorithm.importance.bounds parallelism.enabled=parallelism.min_degree
    model.tiny.vision=model.tiny.architecture
    report.prometheus_port=report.prometheus report.prometheus_host=report.prometheus"""
_OTHER_NAMES = dict(re.findall(r"(\S+)=(\S+)", _NAMES))  # names of settings in verl, TRL and earlier releases
_GONE = {
    "checkpoint.snapshot_every": "checkpoints are asynchronous now, so lower checkpoint.every instead",
    "data.spill_gib": "media that do not fit into data.cache_gib are decoded again",
}
C = TypeVar("C", bound=Config)


def parse(argv: Sequence[str], doc: str, kind: type[C] = Config, default: str = DEFAULT_CONFIG) -> C:
    """Returns the validated configuration of a command line (without the program's name). A command that needs more
    than `Config` has its own `kind`, and its own file as the `default`. Exits with status 0 after `--help`, with status
    2 and one line on standard error if anything is wrong."""
    try:
        asked = [number for number, arg in enumerate(argv) if arg in ("--help", "-h", "-help")]
        if asked:
            word = next((arg for arg in argv[asked[0] + 1 :] if not arg.startswith("-")), "")
            selected = [arg.partition("=")[2] for arg in argv if arg.startswith("--config=")]
            print(help_text(doc, read_file([default, *selected][-1], kind), word))
            raise SystemExit(0)
        return load(argv, kind, default)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def load(argv: Sequence[str], kind: type[C] = Config, default: str = DEFAULT_CONFIG) -> C:
    """Returns what `parse` returns. Raises `ConfigError` instead of exiting."""
    selected, overrides = default, []
    for arg in argv:
        name, equals, value = arg.removeprefix("-").removeprefix("-").partition("=")
        if not arg.startswith("-") or not equals or name.partition(".")[0] != "config":
            raise ConfigError(
                f"unknown argument {arg!r}; this command takes --config=FILE[:variant], "
                "--config.section.field=value and --help [WORD]"
            )
        if name == "config":
            selected = value
        else:
            overrides.append((name.removeprefix("config."), value))
    config = read_file(selected, kind)
    # Choices are set first. Their fields then exist, and other flags overrule what the algorithm sets.
    for field, value in sorted(overrides, key=lambda override: override[0] not in _CHOICES):
        override(config, field, value)
    expand_home(config)
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
        wanted, given = (f"{named.__module__}.{named.__name__}" for named in (kind, type(config)))
        raise ConfigError(f"{path}: get_config() must return a {wanted}, not {given}")
    return config


def _explain(error: AttributeError, kind: type[Config]) -> str:
    match = re.match(r"'(\w+)' object has no attribute '(\w+)'", str(error))  # Python 3.13 adds words
    known = vars(sys.modules[Config.__module__]) | vars(sys.modules[kind.__module__])
    section = known.get(match[1]) if match else None
    if not match or not dataclasses.is_dataclass(section):
        return str(error)
    names = [field.name for field in dataclasses.fields(section)]
    near = [*difflib.get_close_matches(match[2], names, 1), _OTHER_NAMES.get(match[2], "")][0]
    hint = f"did you mean {near}?" if near else f"it has {', '.join(names)}"
    return f"{match[1]} has no field {match[2]!r}; {hint}"


def override(config: Config, field: str, text: str) -> None:
    """Sets a dotted field from text, as the type that the field has. Raises `ConfigError` for an unknown field, with
    the nearest name, and for a text that is no value of the field."""
    holder: Section | Mapping[str, Any] = config
    metadata: Mapping[str, Any] = {}  # metadata of the field whose value is `holder`
    *sections, name = field.split(".")
    for number, part in enumerate(sections):
        inner = _child(config, holder, metadata, ".".join(sections[:number]), part, field)
        if not isinstance(inner, Section | Mapping):
            raise ConfigError(
                f"--config.{field}: config.{'.'.join(sections[: number + 1])} is a value and has no field "
                f"{[*sections, name][number + 1]!r}"
            )
        holder, metadata = inner, _metadata(holder, part)
    current = _child(config, holder, metadata, ".".join(sections), name, field)
    metadata = _metadata(holder, name)
    try:
        value = read_value(text, current, metadata)
    except (KeyError, ValueError, SyntaxError):
        raise ConfigError(f"--config.{field}: {text!r} is not {_kind(current, metadata)}") from None
    if isinstance(current, Section | Mapping) and value is None:
        fields = ", ".join(f"{field}.{entry}" for entry in children(current))
        raise ConfigError(f"--config.{field} is a section; set its fields: {fields}")
    if field == _ALGORITHM:
        config.algorithm.choose(text)
    elif isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _metadata(holder: Section | Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return holder.__dataclass_fields__[name].metadata if isinstance(holder, Section) else {}


def _child(
    config: Config, owner: Section | Mapping[str, Any], metadata: Mapping[str, Any], section: str, part: str, field: str
) -> object:
    """Returns a field's value; raises `ConfigError` with the nearest valid name if there is no such field."""
    names = children(owner)
    if part in names:
        return names[part]
    section = f"config.{section}".rstrip(".")
    choices = metadata.get("choices", {})
    if having := [name for name, kind in choices.items() if part in kind.__dataclass_fields__]:
        raise ConfigError(
            f"--config.{field}: {variant(type(owner))} has no {part}, but {' and '.join(having)} "
            f"{'has' if len(having) == 1 else 'have'} it: --{section}={having[0]}"
        )
    if gone := _GONE.get(field):
        raise ConfigError(f"--config.{field} is gone: {gone}")
    every = every_field(config)
    meant = _OTHER_NAMES.get(field, _OTHER_NAMES.get(part, ""))
    near = [f"{section}.{name}" for name in names if meant.endswith(f".{name}")]
    near += [f"config.{meant}"] * bool(meant)
    near += [f"config.{name}" for name in every if name.rpartition(".")[2] == part]
    alike = {f"config.{name}" for name in every if name.rpartition(".")[2] == field.rpartition(".")[2]}
    near += [*alike] * (len(alike) == 1)
    near += [f"{section}.{name}" for name in difflib.get_close_matches(part, names, 1)]
    near += [f"config.{name}" for name in difflib.get_close_matches(field, every, 1, cutoff=0.4)]
    hint = f"did you mean --{near[0]}?" if near else f"{section} has {', '.join(names)}"
    raise ConfigError(f"--config.{field}: no such field; {hint}")


def every_field(config: Config) -> list[str]:
    """Returns the dotted names of all fields, including fields of choices that were not made."""
    names = [name for name, _ in flatten(config)]
    for choice, kinds in (("policy", POLICIES), ("sharding.strategy", STRATEGIES)):
        names += [f"{choice}.{name}" for kind in kinds.values() for name in kind.__dataclass_fields__]
    return names


def read_value(text: str, current: Any, metadata: Mapping[str, Any]) -> Any:
    """Returns the value in `text`, of the type of `current`; None if `current` is a section. Raises KeyError,
    ValueError or SyntaxError for a text that is no value of this type."""
    if kinds := metadata.get("choices"):
        return current if type(current) is kinds[text] else kinds[text]()
    if "schedule" in metadata:
        with contextlib.suppress(ValueError):
            return float(text)
        return text
    if isinstance(current, bool):
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if isinstance(current, enum.Enum):
        return type(current)(text.lower())
    if isinstance(current, int | float):
        return type(current)(text)
    if isinstance(current, tuple):
        value = ast.literal_eval(text)
        kind = type(current[0]) if current else str
        kinds = int | float if kind is float else kind
        if not isinstance(value, tuple | list) or not all(isinstance(entry, kinds) for entry in value):
            raise ValueError(text)
        return tuple(map(kind, value))
    return text if isinstance(current, str) else None


_KINDS = {bool: "true or false", int: "an integer", float: "a number", tuple: "a tuple like (1, 2)"}


def _kind(current: object, metadata: Mapping[str, Any]) -> str:
    """Returns a description of the values that a field may have."""
    names = list(metadata.get("choices", {}))
    if isinstance(current, enum.Enum):
        names = [member.value for member in type(current)]
    return f"one of {', '.join(names)}" if names else _KINDS.get(type(current), f"a {type(current).__name__}")
