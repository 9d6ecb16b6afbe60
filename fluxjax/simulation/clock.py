"""Virtual time: a queue of actions, each with its moment; of equal moments, the action put in first is done first."""

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

    def run(self) -> None:
        """Does all actions, also those put in meanwhile."""
        while self._queue:
            time, _, action = heapq.heappop(self._queue)
            if action is not None:
                self.now = time
                action()

    def stop(self) -> None:
        """Drops all actions, so that `run` ends."""
        self._queue.clear()
