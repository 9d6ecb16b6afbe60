"""So many servers, one queue: rewards that wait for a worker."""

from __future__ import annotations

import heapq


class Servers:
    """`count` servers that take jobs in the order of submission."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} servers can do nothing")
        self._free = [0.0] * count
        self.busy_seconds = 0.0

    def submit(self, now: float, seconds: float) -> float:
        """A job of so many seconds, handed in at `now`, which never goes back; returns the time at which it is done."""
        end = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, end)
        self.busy_seconds += seconds
        return end
