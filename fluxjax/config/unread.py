"""Settings that would do nothing: a field was changed, but another setting says that nothing reads it.

On the command line that is a mistake, and refused (`fluxjax.config.cli`). A configuration file may prepare more than
one choice, as `configs/vlm.py` does for several policies; `remarks` then tells which of its settings are not read.
Only choices of behaviour are listed: that `warm_start.lr` does nothing in 0 steps explains itself.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from . import Config, ConfigError, Importance, ModelConfig, Policy, Strategy
from .bounds import flatten, lies_in


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


def _several_rounds(config: Config) -> bool:
    return config.packing.rounds_per_degree > 1


_KIND, _POLICY, _STRATEGY = "algorithm.importance.kind", "policy.name", "sharding.strategy"
_STALE = (Policy.APRIL, Policy.ADAPTIVE_ASYNC)  # policies that train on older versions
_TINY_MODEL = [name for name, _ in flatten(ModelConfig()) if name not in ("path", "compute_dtype")]
_SPREAD = tuple(strategy for strategy in Strategy if strategy.spreads)
NEEDS = (
    _when(_POLICY, (Policy.TAIL_BATCHING,), "tail_batching", *_of("schedules", "tail_prompts", "tail_responses")),
    _when(_POLICY, (Policy.APRIL,), "april"),
    _when(_POLICY, (Policy.ADAPTIVE_ASYNC,), "adaptive_async", "composer", "schedules.target_staleness"),
    _when("policy.dynamic_sampling", (True,), "policy.max_num_gen_batches"),
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
    _when(_POLICY, _STALE, "algorithm.importance.decay"),
    _when("algorithm.importance.decoupled", (False,), "algorithm.clip_low", "algorithm.clip_high"),
    _when(_STRATEGY, (Strategy.ODC,), *_of("sharding", "balance", "hybrid", "deterministic", "live_layers")),
    _when(_STRATEGY, _SPREAD, *_of("sharding", "max_degree", "devices_per_host", "max_shapes")),
    _when(_STRATEGY, (Strategy.FLEX_ULYSSES, Strategy.ODC), *_of("sharding", "calibration", "alpha", "tolerance")),
    _when(_STRATEGY, _SPREAD, *_of("packing", "rounds_per_degree", "short", "group_cap")),
    Need(_of("packing", "short", "group_cap"), "packing.rounds_per_degree", "above 1", _several_rounds),
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
    if importance.decoupled:
        lines.append(
            "warning: algorithm.importance.decoupled clips around the policy at the start of the step, so with one "
            "optimizer step a batch, as here, nothing is clipped; leave it off unless you know why"
        )
    if config.policy.name in _STALE and not _corrected(config):
        lines.append(
            f"warning: {config.policy.name.value} trains on older versions without an importance correction; set "
            "algorithm.importance.kind=truncate or mask"
        )
    return lines
