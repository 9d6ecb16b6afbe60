"""Finds rewards: by name in `REWARDS`, or a user's by import path; a function, a class or an object.

A reward is one of these:

- a function `f(prompt, text) -> Reward | float`, also `async`;
- an object with `score(completion) -> Reward | float`, also `async`;
- an object with `compute(prompts, responses)`, which returns a `Reward` or a number for each response of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharding.door import ByName

from ..base.errors import ConfigError
from ..base.import_path import imported
from ..base.scored import Completion

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
    },
)
SHAPES = "a function, or an object with score(completion) or compute(prompts, responses)"


@dataclasses.dataclass(frozen=True)
class FoundReward:
    """The reward that a name stands for, or its class, of which `build` makes an object when it is needed."""

    name: str
    field: str  # of the configuration, in messages
    value: Any
    arguments: Mapping[str, Any]

    def build(self) -> Any:
        """Returns the reward. Raises `ConfigError` where its class refuses the arguments."""
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
    """Returns what `name` stands for: a key of `REWARDS` or `module:attribute`. Raises `ConfigError` naming `field`
    where there is no such thing, it is no reward, or it has no such `arguments`."""
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
            raise ConfigError(f"{field} is {name!r}, which can't be given {arguments}: {error}") from None
    return FoundReward(name, field, value, arguments)


def find_reward(name: str, field: str = "reward", arguments: Mapping[str, Any] | None = None) -> Any:
    """Returns the reward of this name; of a class, an object. Raises `ConfigError` as `find` does."""
    return find(name, field, arguments).build()


def is_reward(value: Any) -> bool:
    """Says whether a value is a reward, or the class of one."""
    if any(callable(getattr(value, method, None)) for method in ("score", "compute")):
        return True
    if inspect.isclass(value):
        return any("__call__" in vars(base) for base in value.__mro__)
    return callable(value)


@dataclasses.dataclass(frozen=True)
class Callee:
    """The way to call a reward: `function(*arguments(completions))`, for one completion, or `batched` for several; and
    its kind, by which calls are bounded."""

    function: Callable[..., Any]
    arguments: Callable[[Sequence[Completion]], tuple[Any, ...]]
    kind: str
    batched: bool = False

    @classmethod
    def of(cls, reward: Any) -> Callee:
        if callable(compute := getattr(reward, "compute", None)):
            callee = cls(compute, lambda batch: ([c.prompt for c in batch], [c.text for c in batch]), "batch", True)
        elif callable(score := getattr(reward, "score", None)):
            callee = cls(score, lambda batch: (batch[0],), "function")
        else:
            callee = cls(reward, lambda batch: (batch[0].prompt, batch[0].text), "function")
        kind = getattr(reward, "kind", None)
        return dataclasses.replace(callee, kind=kind) if isinstance(kind, str) else callee

    @property
    def asynchronous(self) -> bool:
        called = getattr(self.function, "__call__", None)  # noqa: B004 - the method, which may be `async def`
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(called)
