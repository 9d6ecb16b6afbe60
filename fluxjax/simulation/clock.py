"""Virtual time: a queue of actions, each with its time. Actions of equal times are done in the order of adding."""

import heapq
import math
from collections.abc import Callable

Action = Callable[[], object]
Handle = list  # [time, serial, action or None]; opaque to callers


class Clock:
    """A virtual clock: `now` is in seconds and begins at 0. `run` takes only the real time of computing the actions."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[Handle] = []
        self._serial = 0

    def at(self, time: float, action: Action) -> Handle:
        """Schedules `action` for `time` (seconds), and returns a handle for `cancel`. Raises ValueError for a time that
        has passed or is no finite number."""
        if not self.now <= time < math.inf:
            raise ValueError(f"the clock is at {self.now}: no action can be scheduled for {time}")
        self._serial += 1
        handle = [time, self._serial, action]
        heapq.heappush(self._queue, handle)
        return handle

    def after(self, delay: float, action: Action) -> Handle:
        """Schedules `action` in `delay` seconds, as `at` does."""
        return self.at(self.now + delay, action)

    def cancel(self, handle: Handle | None) -> None:
        """Cancels an action; does nothing if the action has been done or cancelled already."""
        if handle is not None:
            handle[2] = None

    def run(self) -> None:
        """Does all actions, and the actions that these add."""
        while self._queue:
            time, _, action = heapq.heappop(self._queue)
            if action is not None:
                self.now = time
                action()

    def stop(self) -> None:
        """Drops all actions, so that `run` ends."""
        self._queue.clear()
