"""Finds built-in rewards by name in `REWARDS` and users' rewards by import path, and checks the answers of rewards.

A reward is one of these:

- a function `f(prompt, text) -> Reward | float`, also `async`;
- an object with `score(completion) -> Reward | float`, also `async`;
- an object with `compute(prompts, responses)`, which returns a `Reward` or a number for each response of a batch.

An answer must be a `Reward` or a finite number.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sharding.door import ByName

from ..base.errors import ConfigError
from ..base.finite import finite
from ..base.import_path import imported
from ..base.scored import Reward
from ..config.bounds import check_fields

REWARDS: Mapping[str, Any] = ByName(
    __name__,
    {
        "exact": "rules:exact",
        "positions": "rules:positions",
        "digits": "rules:digits",
        "number": "rules:number",
        "math": "math:MathAnswer",
        "code": "code:CodeReward",
        "judge": "judge:Judge",
        "choice": "vision:Choice",
        "numeric": "vision:NumericAnswer",
        "edit_distance": "vision:EditDistance",
        "boxes": "vision:BoxOverlap",
        "ordered_list": "vision:OrderedList",
        "format": "shaping:Format",
        "overlong": "shaping:Overlong",
        "environment": "shaping:EnvironmentReward",
    },
)
SHAPES = "a function, or an object with score(completion) or compute(prompts, responses)"


@dataclasses.dataclass(frozen=True)
class FoundReward:
    """The reward that a name stands for, or the reward's class, of which `build` makes an object."""

    name: str
    field: str  # field of the configuration, for messages
    value: Any
    arguments: Mapping[str, Any]

    def build(self) -> Any:
        """Returns the reward. Raises `ConfigError` if the reward's class raises."""
        if not inspect.isclass(self.value):
            return functools.partial(self.value, **self.arguments) if self.arguments else self.value
        try:
            return self.value(**self.arguments)
        except Exception as error:
            raise ConfigError(
                f"{self.field} is {self.name!r}, but making it with {dict(self.arguments)} raised "
                f"{type(error).__name__}: {error}"
            ) from error


def find(name: str, field: str = "reward", arguments: Mapping[str, Any] | None = None) -> FoundReward:
    """Returns the reward that `name` stands for: a key of `REWARDS` or `module:attribute`. Raises `ConfigError`, naming
    `field`, if the name stands for nothing or for no reward, or if the reward does not take the `arguments`."""
    value = REWARDS.get(name)
    if ":" in name:
        kinds, module = (types.FunctionType, type), name.partition(":")[0]
        value = imported(name, field, lambda offered: isinstance(offered, kinds) and offered.__module__ == module)
    if value is None:
        raise ConfigError(f"{field} is {name!r}; it must be one of {', '.join(REWARDS)}, or module:attribute")
    if not is_reward(value):
        raise ConfigError(f"{field} is {name!r}, which is not {SHAPES}, but of type {type(value).__name__}")
    arguments = dict(arguments or {})
    if arguments:
        try:
            inspect.signature(value).bind_partial(**arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{field} is {name!r}, which does not take the arguments {arguments}: {error}") from None
    return FoundReward(name, field, value, arguments)


def find_reward(name: str, field: str = "reward", arguments: Mapping[str, Any] | None = None) -> Any:
    """Returns the reward of this name; an object if the reward is a class. Raises what `find` and `build` raise."""
    return find(name, field, arguments).build()


class BuiltIn:
    """The base of built-in rewards. `name` is that in `REWARDS`; `kind` selects the bounds of calls."""

    name: ClassVar[str]
    kind: ClassVar[str] = "rule"
    counted: ClassVar[tuple[str, ...]] = ()  # names in `_counts`
    _counts: collections.defaultdict[str, float]

    def __post_init__(self) -> None:
        """Raises `ConfigError`, naming the parameter, for a value of another type or beyond the declared bound."""
        vars(self)["_counts"] = collections.defaultdict(float)
        check_fields(self, f"{self.name}.")

    def take_counts(self) -> dict[str, float]:
        """Returns the counts since the last call, by the metrics' names without `rewards/`."""
        counts = {f"{self.name}/{name}": float(self._counts[name]) for name in self.counted}
        self._counts.clear()
        return counts


def is_reward(value: Any) -> bool:
    """Says whether a value is a reward or a reward's class."""
    if any(callable(getattr(value, method, None)) for method in ("score", "compute")):
        return True
    if inspect.isclass(value):
        return any("__call__" in vars(base) for base in value.__mro__)
    return callable(value)


# --- answers ----------------------------------------------------------------------------------------


class Failing(enum.Enum):
    """The ways in which a reward can fail, as metrics count them."""

    TIMED_OUT = "timed_out"
    RAISED = "raised"
    DIED = "died"  # the reward's process ended, or needed too much memory
    INVALID = "invalid"  # the answer is no reward


class RewardFailure(Exception):
    """A reward failed on a response. The response is then scored 0 with the `reason`."""

    def __init__(self, failing: Failing, reason: str) -> None:
        super().__init__(reason)
        self.failing, self.reason = failing, reason


def as_reward(result: Any) -> Reward:
    """Returns a reward's answer as a `Reward`, whose values have the declared types, as checkpoints need. A number is
    correct if it is at least 1, apart from rounding. Raises RewardFailure."""
    if not isinstance(result, Reward):
        value = _number(result)
        return Reward(value, value > 1.0 - 1e-6)  # sums of shares, and float32, are rounded
    try:
        parts = {str(name): _number(value) for name, value in result.parts.items()}
        return Reward(_number(result.value), bool(result.correct), str(result.reason), parts, _number(result.seconds))
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardFailure(Failing.INVALID, f"returned a Reward with wrong values: {error}") from None


def _number(value: Any) -> float:
    """Returns a finite number as a float. Raises RewardFailure."""
    try:
        return finite(value, "Reward or a number")
    except ValueError as error:
        raise RewardFailure(Failing.INVALID, f"returned {error}") from None


def as_batch(results: Any, count: int) -> list[Any]:
    """Returns a batched reward's answers. Raises RewardFailure unless `results` is a sequence of `count` answers."""
    if callable(tolist := getattr(results, "tolist", None)):  # an array
        results = tolist()
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        raise RewardFailure(Failing.INVALID, f"returned {type(results).__name__}, expected {count} rewards")
    if len(results) != count:
        raise RewardFailure(Failing.INVALID, f"returned {len(results)} rewards for {count} responses")
    return list(results)
