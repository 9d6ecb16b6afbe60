"""Schedules of settings, written as text: constants, values that follow a run's progress, and controllers.

    1.0                                            always the same
    linear(1.2, 0.8)   cosine(1.2, 0.8)            from the first value to the second over the run
    phases(1.2@0, 1.0@0.2, 0.7@0.7)                a value from each point on (Flux, insight 3: early, mid, late)
    pid(metric=entropy, target=0.6, low=0.5, high=1.2, kp=0.1, ki=0.01, kd=0.05)
                                                   moves so that a metric of the training step stays near a target
    success(1.2, 0.8)                              for each prompt: the first value if no response of its last group was
                                                   right, the second if all were right (Flux: "per-prompt, per-stage")
    math: 1.0; code: linear(1.2, 0.8); *: 0.9      a schedule for each source; * for all other sources

Progress is in [0, 1], 0 at the first step and 1 at the last. No schedule reads a clock or samples random numbers.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..base.errors import ConfigError

if TYPE_CHECKING:  # the types of groups import JAX, which is too slow for `--help`
    from ..base.types import Group, Prompt
    from . import Config

OTHERS = "*"  # all sources that are not named
_GROUPS = 64  # groups over which a source's share of right responses is averaged


class RunSchedule(abc.ABC):
    """A value that may change during a run, between `bounds`, its smallest and its largest value."""

    bounds: tuple[float, float]

    @abc.abstractmethod
    def value(self, progress: float, prompt: Prompt | None = None) -> float:
        """Returns the value at `progress` (clipped to [0, 1]), for `prompt` if it is given."""

    def observe(self, metrics: Mapping[str, float]) -> None:  # noqa: B027 - most schedules have nothing to learn
        """Takes in the metrics of a training step."""

    def observe_group(self, group: Group) -> None:  # noqa: B027
        """Takes in the scores of a prompt's responses."""

    def state_dict(self) -> dict[str, object]:
        """Returns the schedule's state as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restores what `state_dict` returned."""


class Ramp(RunSchedule):
    """Goes from `start` to `end` in a straight line, or along half a cosine. A constant has equal ends."""

    def __init__(self, start: float, end: float, *, cosine: bool = False) -> None:
        self.start, self.end, self.cosine = start, end, cosine
        self.bounds = min(start, end), max(start, end)

    def value(self, progress: float, prompt: Prompt | None = None) -> float:
        done = min(max(progress, 0.0), 1.0)
        if self.cosine:
            done = 0.5 * (1 - math.cos(math.pi * done))
        return (1 - done) * self.start + done * self.end if self.start != self.end else self.start


class Phases(RunSchedule):
    """Has `values[i]` from progress `starts[i]` on; `starts` grow from 0 (Flux, insight 3)."""

    def __init__(self, values: Sequence[float], starts: Sequence[float]) -> None:
        self.values, self.starts = tuple(values), tuple(starts)
        self.bounds = min(values), max(values)

    def value(self, progress: float, prompt: Prompt | None = None) -> float:
        return self.values[max(bisect.bisect_right(self.starts, progress) - 1, 0)]


class Pid(RunSchedule):
    """Moves its value so that a metric approaches `target` (Flux, component 1). Training steps without the metric, or
    with a metric that is not finite, change nothing.

    Each update adds `kp * error + ki * sum of errors + kd * change of the error`, with `error = target - metric`. The
    unit of time is one update. If the value would leave the bounds, the sum of errors is cut back until the value just
    reaches a bound (anti-windup). When the error changes its sign, the value then soon leaves the bound.
    """

    def __init__(
        self,
        start: float,
        low: float,
        high: float,
        *,
        kp: float,
        ki: float,
        kd: float,
        metric: str = "",
        target: float = 0.0,
    ) -> None:
        if not low <= start <= high:
            raise ValueError(f"pid needs low <= start <= high, not {low:g}, {start:g}, {high:g}")
        self.now, self.bounds = start, (low, high)
        self.metric, self.target = metric, target
        self._kp, self._ki, self._kd = kp, ki, kd
        self._sum = 0.0
        self._last: float | None = None  # the previous update's error

    def value(self, progress: float, prompt: Prompt | None = None) -> float:
        return self.now

    def observe(self, metrics: Mapping[str, float]) -> None:
        if self.metric in metrics:
            self.update(self.target - float(metrics[self.metric]))

    def update(self, error: float) -> float:
        """Returns the new value. An error that is no finite number changes nothing."""
        if not math.isfinite(error):
            return self.now
        change = 0.0 if self._last is None else error - self._last
        self._last = error
        self._sum += error
        direct = self._kp * error + self._kd * change
        wanted = self.now + direct + self._ki * self._sum
        bounded = self._bounded(wanted)
        if bounded != wanted and self._ki:
            reaching = (bounded - self.now - direct) / self._ki
            self._sum = min(max(reaching, min(0.0, self._sum)), max(0.0, self._sum))  # never past 0
        self.now = bounded
        return self.now

    def _bounded(self, value: float) -> float:
        low, high = self.bounds
        return min(max(value, low), high)

    def state_dict(self) -> dict[str, object]:
        return {"value": self.now, "sum": self._sum, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state. The bounds may have changed; a value outside of them moves to the nearer bound."""
        if state:
            self.now, self._sum, self._last = self._bounded(state["value"]), state["sum"], state["last"]


class Success(RunSchedule):
    """Goes from `none`, if no response of a prompt's last group was right, to `all`, if all were right. A new prompt
    counts with its source's average share of right responses, or with 0.5 before the source's first group."""

    def __init__(self, none: float, all: float) -> None:
        self.none, self.all = none, all
        self.bounds = min(none, all), max(none, all)
        self._solved: dict[str, dict[str, float]] = {}  # share of right responses in a prompt's last group, by source
        self._sources: dict[str, float] = {}  # moving average of these shares, by source

    def value(self, progress: float, prompt: Prompt | None = None) -> float:
        share = 0.5
        if prompt is not None:
            share = self._solved.get(prompt.source, {}).get(prompt.id, self._sources.get(prompt.source, share))
        return (1 - share) * self.none + share * self.all

    def observe_group(self, group: Group) -> None:
        source = group.prompt.source
        share = sum(sample.reward.correct for sample in group.samples) / len(group.samples)
        self._solved.setdefault(source, {})[group.prompt.id] = share
        before = self._sources.get(source, share)
        self._sources[source] = before + (share - before) / _GROUPS

    def state_dict(self) -> dict[str, object]:
        return copy.deepcopy({"solved": self._solved, "sources": self._sources})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._solved, self._sources = copy.deepcopy((state.get("solved", {}), state.get("sources", {})))


class PerSource(RunSchedule):
    """A schedule for each source. `value` raises `ConfigError` for a prompt of a source that has no schedule."""

    def __init__(self, schedules: Mapping[str, RunSchedule], field: str) -> None:
        self.schedules, self.field = dict(schedules), field
        lows, highs = zip(*(schedule.bounds for schedule in schedules.values()), strict=True)
        self.bounds = min(lows), max(highs)

    def _of(self, source: str) -> RunSchedule | None:
        return self.schedules.get(source) or self.schedules.get(OTHERS)

    def value(self, progress: float, prompt: Prompt | None = None) -> float:
        source = prompt.source if prompt is not None else ""
        if (schedule := self._of(source)) is None:
            named = ", ".join(self.schedules)
            raise ConfigError(
                f"{self.field} has no value for source {source!r}, only for {named}; add '{OTHERS}: VALUE'"
            )
        return schedule.value(progress, prompt)

    def observe(self, metrics: Mapping[str, float]) -> None:
        for schedule in self.schedules.values():
            schedule.observe(metrics)

    def observe_group(self, group: Group) -> None:
        if (schedule := self._of(group.prompt.source)) is not None:
            schedule.observe_group(group)

    def state_dict(self) -> dict[str, object]:
        return {source: schedule.state_dict() for source, schedule in self.schedules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for source, schedule in self.schedules.items():
            schedule.load_state_dict(state.get(source, {}))


# Fields that may be schedules, by the names of their states in checkpoints.
_FIELDS = {
    "temperature": ("rollout", "temperature"),
    "target_staleness": ("policy", "target_staleness"),
    "tail_prompts": ("policy", "prompts"),
    "tail_responses": ("policy", "responses"),
}


def make_schedules(config: Config) -> dict[str, RunSchedule]:
    """Returns the schedules that are written in the fields of `config`, by the names of `_FIELDS`."""
    schedules = {}
    for name, (section, field) in _FIELDS.items():
        holder = getattr(config, section)
        text = getattr(holder, field, None)
        if isinstance(text, str):
            bounds = holder.__dataclass_fields__[field].metadata["schedule"]
            schedules[name] = parse(text, f"{section}.{field}", *bounds, per_prompt=name == "temperature")
    return schedules


def rate_schedule(rate: float | str, field: str) -> RunSchedule:
    """Returns the course of a learning rate, in [0, 1], over a run. Raises `ConfigError`, naming the field, for a text
    that is no schedule, and for one that depends on metrics."""
    schedule = parse(rate, field, 0.0, 1.0, per_prompt=False) if isinstance(rate, str) else Ramp(rate, rate)
    if isinstance(schedule, Pid):
        raise ConfigError(f"{field} is {rate!r}; a learning rate can't depend on metrics: use linear, cosine or phases")
    if not schedule.bounds[1]:
        raise ConfigError(f"{field} is {rate!r}; it must be above 0 somewhere")
    return schedule


def parse(
    text: str, field: str, low: float = -math.inf, high: float = math.inf, *, per_prompt: bool = True
) -> RunSchedule:
    """Returns the schedule that `text`, the value of `field`, describes in the form of the module's docstring. Raises
    `ConfigError`, naming the field and what is allowed, for a text that is no schedule, and for values outside of [low,
    high]. Without `per_prompt`, raises it also for schedules that differ between sources or prompts."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    try:
        if ":" not in text and len(parts) != 1:
            raise ValueError("it needs one schedule, or SOURCE: SCHEDULE for each source")
        schedule = PerSource(_by_source(parts), field) if ":" in text else _read(parts[0])
        if not per_prompt and isinstance(schedule, PerSource | Success):
            differing = "sources" if isinstance(schedule, PerSource) else "prompts"
            raise ValueError(f"this field has one value for all {differing}")
    except ValueError as error:
        raise ConfigError(
            f"{field} is {text!r}: {error}; allowed are 1.0, linear(1.2, 0.8), cosine(1.2, 0.8), success(1.2, 0.8), "
            "phases(1.2@0, 1.0@0.2, 0.7@0.7), pid(metric=NAME, target=0.6, low=0.5, high=1.2), and "
            f"'math: 1.0; {OTHERS}: 0.8' for single sources"
        ) from None
    smallest, largest = schedule.bounds
    if smallest < low or largest > high:
        limits = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ConfigError(f"{field} is {text!r}, with values from {smallest:g} to {largest:g}; they must be {limits}")
    return schedule


def _by_source(parts: Sequence[str]) -> dict[str, RunSchedule]:
    schedules: dict[str, RunSchedule] = {}
    for part in parts:
        source, colon, schedule = (piece.strip() for piece in part.partition(":"))
        if not colon or not source or source in schedules:
            raise ValueError(f"{part!r} must be SOURCE: SCHEDULE, each source once")
        schedules[source] = _read(schedule)
    return schedules


_CALL = re.compile(r"(\w+)\s*\((.*)\)")
GAINS = {"kp": 0.1, "ki": 0.01, "kd": 0.05}  # the gains of Flux
_PID = ("metric", "target", "low", "high", "start", *GAINS)  # `start`: the first value, by default `(low + high) / 2`


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise ValueError(f"{text.strip()!r} is no finite number")


def _read(text: str) -> RunSchedule:
    """Reads one schedule. Raises `ValueError`, which says what is wrong with the text."""
    call = _CALL.fullmatch(text)
    if call is None:
        return Ramp(_number(text), _number(text))
    name, arguments = call[1], call[2].split(",")
    if name in ("linear", "cosine", "success"):
        if len(arguments) != 2:
            raise ValueError(f"{name} takes two values, the first and the last")
        start, end = map(_number, arguments)
        return Success(start, end) if name == "success" else Ramp(start, end, cosine=name == "cosine")
    if name == "phases":
        return _phases(arguments)
    if name == "pid":
        return _pid(arguments)
    raise ValueError(f"there is no schedule {name!r}")


def _phases(arguments: Sequence[str]) -> Phases:
    pairs = [argument.partition("@") for argument in arguments]
    if not all(at for _, at, _ in pairs):
        raise ValueError("each phase must be VALUE@START")
    starts = [_number(start) for _, _, start in pairs]
    if starts[0] != 0 or starts[-1] >= 1 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError("the first phase must start at 0, each other phase after the one before it, all below 1")
    return Phases([_number(value) for value, _, _ in pairs], starts)


def _pid(arguments: Sequence[str]) -> Pid:
    pairs = [tuple(piece.strip() for piece in argument.split("=", 1)) for argument in arguments]
    given = {pair[0]: pair[-1] for pair in pairs}
    if any(len(pair) < 2 or pair[0] not in _PID for pair in pairs) or len(given) != len(pairs):
        raise ValueError("pid takes NAME=VALUE, each name once, of " + ", ".join(_PID))
    if missing := [name for name in ("metric", "target", "low", "high") if not given.get(name)]:
        raise ValueError(f"pid needs {', '.join(missing)}")
    metric = given.pop("metric")
    numbers = GAINS | {name: _number(value) for name, value in given.items()}
    gains = [numbers[name] for name in GAINS]
    if min(gains) < 0 or not any(gains):
        raise ValueError(f"pid needs {', '.join(GAINS)} of at least 0, and not all of them 0")
    return Pid(**{"start": 0.5 * (numbers["low"] + numbers["high"]), **numbers}, metric=metric)
