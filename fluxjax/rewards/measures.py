"""Measures of scoring, from step to step: how long responses wait for their reward, and where they wait."""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from .call_slots import CallSlots
from .failures import Failures


class Measures:
    """Measures of all rewards since the last step. Built-in rules, which take no time, are not measured."""

    def __init__(
        self,
        slots: Mapping[str, CallSlots],
        failures: Sequence[Failures],
        counting: Sequence[Callable[[], Mapping[str, float]]] = (),
    ) -> None:
        """`counting` are functions that return what rewards have counted themselves since their last call."""
        self._slots, self._failures, self._counting = slots, failures, counting
        self._seconds: list[float] = []  # that the responses scored since the last step waited for their reward
        self._open = 0

    @contextlib.contextmanager
    def response(self) -> Iterator[None]:
        """Measures its body, which scores a response."""
        begin = time.monotonic()
        self._open += 1
        try:
            yield
            self._seconds.append(time.monotonic() - begin)
        finally:
            self._open -= 1

    def since_last(self) -> dict[str, float]:
        """Returns metrics by name, in seconds, counts and shares in [0, 1]; empty where only rules were at work:

        `rewards/scored`, `rewards/open` (responses that are still to be scored), `rewards/waiting` (the most that had
        to wait at once for a slot), `rewards/seconds_median`, `_p95`, `_max` (from the end of a response to its
        reward), for each kind `rewards/busy/KIND` (1: all of its slots all the time), `rewards/failed` with
        `rewards/failed/WAY`, and what rewards count themselves."""
        seconds, self._seconds = sorted(self._seconds), []
        used = {kind: usage for kind, slots in self._slots.items() if (usage := slots.usage()) is not None}
        ways: collections.Counter[str] = collections.Counter()
        for failures in self._failures:
            ways.update(failures.since)
            failures.since.clear()
        counted: collections.defaultdict[str, float] = collections.defaultdict(float)
        for take_counts in self._counting:
            for name, count in take_counts().items():
                counted[name] += count
        if not used and not ways:
            return {}
        metrics = {"rewards/scored": float(len(seconds)), "rewards/open": float(self._open)}
        if used:
            metrics["rewards/waiting"] = float(max(usage.waited for usage in used.values()))
        if seconds:
            metrics["rewards/seconds_median"] = statistics.median(seconds)
            metrics["rewards/seconds_p95"] = seconds[min(int(0.95 * len(seconds)), len(seconds) - 1)]
            metrics["rewards/seconds_max"] = seconds[-1]
        metrics |= {f"rewards/busy/{kind}": usage.busy for kind, usage in used.items()}
        metrics |= {f"rewards/{name}": count for name, count in counted.items()}
        metrics["rewards/failed"] = float(ways.total())
        return metrics | {f"rewards/failed/{way}": float(count) for way, count in sorted(ways.items())}
