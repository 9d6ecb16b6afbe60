"""Failures of rewards: logged a few times, counted, and too many of them are a reason to stop the run."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable

from ..config.data import JUDGED
from .answers import RewardFailure

log = logging.getLogger("fluxjax.rewards")

_LOGGED = 5  # failures of one reward that are logged one by one
_WINDOW = 1000  # responses of which the share of failures is taken
_REASONS = 32  # different reasons that are told apart
_LENGTH = 200  # characters of a reason
OTHERS = "other reasons"


class Failures:
    """The failures of one reward of one source."""

    def __init__(
        self,
        source: str,
        reward: str,
        max_failed: float,
        note: Callable[[str, str], None],
        give_up: Callable[[str], object],
    ) -> None:
        """`note(source, text)` is called for each failure, `give_up(line)` whenever there are too many."""
        self.source, self.reward, self._max_failed = source, reward, max_failed
        self._note, self._give_up = note, give_up
        self._recent: collections.deque[bool] = collections.deque(maxlen=_WINDOW)  # True: failed
        self._reasons: collections.Counter[str] = collections.Counter()
        self.since: collections.Counter[str] = collections.Counter()  # by way of failing; whoever reads it clears it

    def passed(self) -> None:
        self._recent.append(False)

    def failed(self, id: str, failure: RewardFailure) -> None:
        """Counts a failure on a response to the prompt `id`."""
        self._recent.append(True)
        reason = failure.reason if len(failure.reason) <= _LENGTH else f"{failure.reason[:_LENGTH]}..."
        if reason not in self._reasons and len(self._reasons) >= _REASONS:
            reason = OTHERS
        self._reasons[reason] += 1
        self.since[failure.failing.value] += 1
        if (count := self._reasons.total()) <= _LOGGED:
            more = "; more failures of this source are not logged" if count == _LOGGED else ""
            log.warning("reward of %s for prompt %s: %s; scored 0%s", self.source, id, failure.reason, more)
        self._note(self.source, f"{self.reward}: {reason}")
        self._judge()

    def _judge(self) -> None:
        scored, failed = len(self._recent), sum(self._recent)
        if scored < JUDGED or failed <= self._max_failed * scored:
            return
        self._recent.clear()  # a later run begins to count anew
        reason = self._reasons.most_common(1)[0][0]
        self._give_up(
            f"reward {self.reward!r} of data.sources.{self.source} failed on {failed / scored:.0%} of the last "
            f"{scored} responses, more than rewards.max_failed = {self._max_failed:g}; most often: {reason}"
        )
