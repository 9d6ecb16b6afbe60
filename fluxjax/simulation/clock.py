"""Virtual time: a queue of actions, each with its moment; of equal moments, the action put in first is done first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[[], object]
Handle = list  # [time, serial, action or None]; opaque to callers


class ClockError(RuntimeError):
    """Something is to happen in the past, or never."""


class Clock:
    """`now` is in seconds and begins at 0. Nothing is real time; a run takes as long as its actions take to compute."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[Handle] = []
        self._serial = 0

    def at(self, time: float, action: Action) -> Handle:
        """Calls `action` when the clock reaches `time` (s) and returns a handle for `cancel`. Raises ClockError for a
        time that has passed or is no finite number."""
        if not self.now <= time < math.inf:
            raise ClockError(f"it is {self.now}: nothing can be done at {time}")
        self._serial += 1
        handle = [time, self._serial, action]
        heapq.heappush(self._queue, handle)
        return handle

    def after(self, delay: float, action: Action) -> Handle:
        """Calls `action` in `delay` seconds; otherwise like `at`."""
        return self.at(self.now + delay, action)

    def cancel(self, handle: Handle | None) -> None:
        """Takes an action back; does nothing if the action has been done or cancelled already."""
        if handle is not None:
            handle[2] = None

    def run(self, until: float = math.inf) -> int:
        """Does all actions up to and including `until` (s), also those put in meanwhile, and returns their number. With
        an end, the clock then stands there; without, at the last action."""
        queue, pop, done = self._queue, heapq.heappop, 0
        while queue and queue[0][0] <= until:
            time, _, action = pop(queue)
            if action is not None:
                self.now = time
                action()
                done += 1
        if until < math.inf:
            self.now = max(self.now, until)
        return done

    def stop(self) -> None:
        """Drops all actions, so that `run` ends."""
        self._queue.clear()

    @property
    def pending(self) -> int:
        """The number of actions that are still to be done."""
        return sum(handle[2] is not None for handle in self._queue)
