"""The answers of a reward, and its failures: counted, logged a few times, and if too many, a reason to stop the run.

What is neither a `Reward` nor a finite number is no answer.
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import logging
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from ..base.scored import Reward
from ..config.data import JUDGED

log = logging.getLogger("fluxjax.rewards")

_LOGGED = 5  # failures of one reward that are logged one by one
_WINDOW = 1000  # the share of failures is that of this many last responses
_REASONS = 32  # different reasons that are told apart
_LENGTH = 200  # characters of a reason


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
    """Returns a reward's answer as a `Reward`, with values of the types that it declares, which checkpoints hold; a
    bool or a number of at least 1, but for rounding, is correct. Raises RewardFailure."""
    if not isinstance(result, Reward):
        value = _number(result)
        return Reward(value, value > 1.0 - 1e-6)  # shares of a sum, or of float32
    try:
        parts = {str(name): _number(value) for name, value in result.parts.items()}
        return Reward(_number(result.value), bool(result.correct), str(result.reason), parts, _number(result.seconds))
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardFailure(Failing.INVALID, f"returned a Reward with wrong values: {error}") from None


def _number(value: Any) -> float:
    """Returns a finite number of Python, numpy, JAX or the like, also an array without dimensions. Raises
    RewardFailure."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, numbers.Real | decimal.Decimal):
        raise RewardFailure(Failing.INVALID, f"returned {type(value).__name__}, expected Reward or a number")
    try:
        if not math.isfinite(number):
            raise RewardFailure(Failing.INVALID, f"returned {float(number)}")
        return float(number)
    except (OverflowError, ValueError) as error:  # an integer or a fraction beyond floats, a signalling NaN
        raise RewardFailure(Failing.INVALID, f"returned {type(number).__name__}, which is no float: {error}") from None


def as_batch(results: Any, count: int) -> list[Any]:
    """Returns the answers to a batch of `count` responses, one for each. Raises RewardFailure for another number."""
    if callable(tolist := getattr(results, "tolist", None)):  # an array
        results = tolist()
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        raise RewardFailure(Failing.INVALID, f"returned {type(results).__name__}, expected {count} rewards")
    if len(results) != count:
        raise RewardFailure(Failing.INVALID, f"answered {len(results)} times for {count} responses")
    return list(results)


@dataclasses.dataclass(eq=False)
class Failures:
    """The failures of one reward of one source. `note(source, text)` is called for each failure, `give_up(line)`
    whenever there are too many."""

    source: str
    reward: str
    max_failed: float
    note: Callable[[str, str], None]
    give_up: Callable[[str], object]
    # By way of failing; whoever reads it clears it.
    since: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    _reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    _recent: collections.deque[bool] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_WINDOW))

    def passed(self) -> None:
        self._recent.append(False)

    def failed(self, id: str, failure: RewardFailure) -> None:
        """Counts a failure on a response to the prompt `id`."""
        self._recent.append(True)
        reason = failure.reason if len(failure.reason) <= _LENGTH else f"{failure.reason[:_LENGTH]}..."
        if reason not in self._reasons and len(self._reasons) >= _REASONS:
            reason = "other reasons"
        self._reasons[reason] += 1
        self.since[failure.failing.value] += 1
        if (count := self._reasons.total()) <= _LOGGED:
            more = "; more failures of this source are not logged" if count == _LOGGED else ""
            log.warning("reward of %s for prompt %s: %s; scored 0%s", self.source, id, failure.reason, more)
        self.note(self.source, f"{self.reward}: {reason}")
        scored, failed = len(self._recent), sum(self._recent)
        if scored >= JUDGED and failed > self.max_failed * scored:
            self._recent.clear()  # a later run begins to count anew
            self.give_up(
                f"reward {self.reward!r} of data.sources.{self.source} failed on {failed / scored:.0%} of the last "
                f"{scored} responses, more than rewards.max_failed = {self.max_failed:g}; most often: "
                f"{self._reasons.most_common(1)[0][0]}"
            )
