"""The answers of a reward, and its failures: what is neither a `Reward` nor a finite number is no answer."""

from __future__ import annotations

import decimal
import enum
import math
import numbers
from collections.abc import Sequence
from typing import Any

from ..base.scored import Reward


class Failing(enum.Enum):
    """The ways in which a reward can fail, as metrics count them."""

    TIMED_OUT = "timed_out"
    RAISED = "raised"
    DIED = "died"  # its process ended, or needed too much memory
    INVALID = "invalid"  # it answered, but with no reward


class RewardFailure(Exception):
    """A reward failed on a response, which is then scored 0 with the `reason`."""

    def __init__(self, failing: Failing, reason: str) -> None:
        super().__init__(reason)
        self.failing, self.reason = failing, reason


def as_reward(result: Any) -> Reward:
    """Returns a reward's answer as a `Reward`; a bool or a number of at least 1, but for rounding, is
    correct. Raises RewardFailure."""
    if isinstance(result, Reward):
        reward = _plain(result)
    else:
        value = _number(result)
        reward = Reward(value, value > 1.0 - 1e-6)  # shares of a sum, or of float32
    for value in (reward.value, *reward.parts.values()):
        if not math.isfinite(value):
            raise RewardFailure(Failing.INVALID, f"returned {value}")
    return reward


def _number(value: Any) -> float:
    """Returns a number of Python, numpy, JAX or the like, also an array without dimensions. Raises RewardFailure."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, numbers.Real | decimal.Decimal):
        raise RewardFailure(Failing.INVALID, f"returned {type(value).__name__}, expected Reward or a number")
    try:
        return float(number)
    except (OverflowError, ValueError) as error:  # an integer or a fraction beyond floats, a signalling NaN
        raise RewardFailure(Failing.INVALID, f"returned a {type(number).__name__} that is no float: {error}") from None


def _plain(reward: Reward) -> Reward:
    """Returns the reward with values of the types that it declares, which checkpoints hold."""
    try:
        parts = {str(name): _number(value) for name, value in reward.parts.items()}
        return Reward(_number(reward.value), bool(reward.correct), str(reward.reason), parts, _number(reward.seconds))
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardFailure(Failing.INVALID, f"returned a Reward with wrong values: {error}") from None


def as_batch(results: Any, count: int) -> list[Any]:
    """Returns the answers to a batch of `count` responses, one for each. Raises RewardFailure for another number."""
    if callable(tolist := getattr(results, "tolist", None)):  # an array
        results = tolist()
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        raise RewardFailure(Failing.INVALID, f"returned {type(results).__name__}, expected {count} rewards")
    if len(results) != count:
        raise RewardFailure(Failing.INVALID, f"answered {len(results)} times for {count} responses")
    return list(results)


def to_message(result: Any) -> list[Any]:
    """An answer as plain values, to be sent from a process; `from_message` reads it."""
    try:
        reward = as_reward(result)
    except RewardFailure as failure:
        return [failure.reason]
    return [reward.value, reward.correct, reward.reason, dict(reward.parts), reward.seconds]


def from_message(values: Sequence[Any]) -> Reward | RewardFailure:
    """Reads the answer that `to_message` wrote. Returns a RewardFailure where the message is that of a failure."""
    return RewardFailure(Failing.INVALID, values[0]) if len(values) == 1 else Reward(*values)
