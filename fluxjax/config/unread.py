"""Settings that would do nothing: a field that was changed, while another one says that nothing reads it.

On the command line that is a mistake, and refused (`fluxjax.config.cli`). A configuration file may prepare more than
one choice, as `configs/vlm.py` does for several policies: what is not read of it is told when a run begins (`remarks`).
Only choices of behaviour are here; a number of nothing, such as `warm_start.lr` of 0 steps, explains itself.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .scheduling import Importance, Policy
from .sections import Config, ModelConfig, Strategy, get


class Need(NamedTuple):
    """`fields` (or whole sections) are read if `met`, which is to say: if `setting` is `wanted`."""

    fields: tuple[str, ...]
    setting: str
    wanted: str
    met: Callable[[Config], bool]


class Unread(NamedTuple):
    """A field that was changed from its default although `need` is not met."""

    field: str
    need: Need
    current: str  # value of the setting that is needed otherwise
    default: str

    @property
    def complaint(self) -> str:
        return (
            f"{self.field} needs {self.need.setting} {self.need.wanted}, not {self.current}; set the one or leave the "
            f"other at {self.default}"
        )


def _under(policy: Policy, *fields: str) -> Need:
    return Need(fields, "policy.name", policy.value, lambda config: config.policy.name is policy)


def _enabled(setting: str, *fields: str) -> Need:
    return Need(fields, setting, "True", lambda config: get(config, setting))


def _unscheduled(schedule: str, field: str) -> Need:
    """A schedule stands in the place of the constant."""
    return Need((field,), schedule, "empty", lambda config: not get(config, schedule))


def _with(strategies: tuple[Strategy, ...], *fields: str) -> Need:
    names = " or ".join(strategy.value for strategy in strategies)
    return Need(fields, "sharding.strategy", names, lambda config: config.sharding.strategy in strategies)


def _corrected(config: Config) -> bool:
    """Whether the ratios between the policies count for more than the clipped objective."""
    importance = config.algorithm.importance
    return importance.decoupled or importance.kind is not Importance.NONE


def _stale(config: Config) -> bool:
    return config.policy.name in (Policy.APRIL, Policy.ADAPTIVE_ASYNC)


_IMPORTANCE = "algorithm.importance"
_TINY_MODEL = tuple(
    f"model.{field.name}"
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("path", "compute_dtype")  # the architecture is the checkpoint's
)
_SPREAD = (Strategy.ULYSSES, Strategy.FLEX_ULYSSES, Strategy.ODC)
NEEDS = (
    _under(Policy.TAIL_BATCHING, "tail_batching", "schedules.tail_prompts", "schedules.tail_responses"),
    _under(Policy.APRIL, "april"),
    _under(Policy.ADAPTIVE_ASYNC, "adaptive_async", "composer", "schedules.target_staleness"),
    _enabled("policy.dynamic_sampling", "policy.max_num_gen_batches"),
    _enabled("stream_trainer.enabled", *(f"stream_trainer.{name}" for name in ("first", "last", "every", "chunk"))),
    _enabled("speculative_sync.enabled", "speculative_sync.confidence"),
    _enabled("parallelism.enabled", "parallelism.rise", "parallelism.calm"),
    _unscheduled("schedules.temperature", "rollout.temperature"),
    _unscheduled("schedules.target_staleness", "adaptive_async.target_staleness"),
    _unscheduled("schedules.tail_prompts", "tail_batching.prompts"),
    _unscheduled("schedules.tail_responses", "tail_batching.responses"),
    Need(
        (f"{_IMPORTANCE}.high",),
        f"{_IMPORTANCE}.kind",
        "truncate or mask",
        lambda config: config.algorithm.importance.kind is not Importance.NONE,
    ),
    Need(
        (f"{_IMPORTANCE}.low",),
        f"{_IMPORTANCE}.kind",
        "mask",
        lambda config: config.algorithm.importance.kind is Importance.MASK,
    ),
    Need((f"{_IMPORTANCE}.level",), f"{_IMPORTANCE}.kind", "truncate or mask", _corrected),
    Need(
        (f"{_IMPORTANCE}.normalize",),
        f"{_IMPORTANCE}.kind",
        "truncate or mask",
        lambda config: _corrected(config) or config.algorithm.importance.decay < 1,
    ),
    Need((f"{_IMPORTANCE}.decay",), "policy.name", "april or adaptive_async", _stale),
    Need(
        ("algorithm.clip_low", "algorithm.clip_high"),
        f"{_IMPORTANCE}.decoupled",
        "False",
        lambda config: not config.algorithm.importance.decoupled,
    ),
    _with((Strategy.ODC,), *(f"sharding.{name}" for name in ("balance", "hybrid", "deterministic", "live_layers"))),
    _with(_SPREAD, "sharding.max_degree", "sharding.devices_per_host", "sharding.max_shapes"),
    _with((Strategy.FLEX_ULYSSES, Strategy.ODC), "sharding.calibration", "sharding.alpha", "sharding.tolerance"),
    _with(_SPREAD, "packing.rounds_per_degree", "packing.short", "packing.group_cap"),
    Need(
        ("packing.short", "packing.group_cap"),
        "packing.rounds_per_degree",
        "above 1",
        lambda config: config.packing.rounds_per_degree > 1,
    ),
    Need(
        _TINY_MODEL,
        "model.path",
        "empty",
        lambda config: not config.model.path,
    ),
)


def unread(config: Config) -> list[Unread]:
    """All such fields, in the order of `NEEDS`."""
    default = type(config)()
    found: dict[str, Unread] = {}
    for need in NEEDS:
        if need.met(config):
            continue
        for field in (name for given in need.fields for name in _fields(config, given)):
            if get(config, field) != get(default, field):
                found.setdefault(field, Unread(field, need, _text(config, need.setting), _text(default, field)))
    return list(found.values())


def remarks(config: Config) -> list[str]:
    """What somebody who starts a run with these settings should know, a line each."""
    idle: dict[tuple[str, str], list[str]] = {}
    for one in unread(config):
        idle.setdefault((one.need.setting, one.current), []).append(one.field)
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
    if _stale(config) and not _corrected(config):
        lines.append(
            f"warning: {config.policy.name.value} trains on older versions without an importance correction; set "
            "algorithm.importance.kind=truncate or mask"
        )
    return lines


def _fields(config: Config, name: str) -> Iterator[str]:
    value = get(config, name)
    if not dataclasses.is_dataclass(value):
        yield name
        return
    for field in dataclasses.fields(value):
        yield f"{name}.{field.name}"


def _text(config: Config, field: str) -> str:
    value: Any = get(config, field)
    return str(getattr(value, "value", value)) or "empty"
