"""Items of an endless sequence, made in threads ahead of their use, and there when they are taken.

Who takes finds them in a queue, and no next one is begun until all were handed over: threads that were woken would
compete for the interpreter's lock with who takes. Grain's own iterator begins another with each that is taken.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """The items `first`, `first + 1`, ..., of which `ahead` are made beyond those that were taken.

    `make` is called from `threads` threads. What it raises is raised by the `take` that comes to this item, and by all
    later ones. `ready` hears of each item once, in their order, and must not block. One thread takes at a time.
    """

    def __init__(
        self,
        make: Callable[[int], Item],
        first: int,
        *,
        ahead: int,
        threads: int,
        ready: Callable[[Item], object] = lambda item: None,
    ) -> None:
        self._make, self._ready, self._ahead = make, ready, ahead
        self._changed = threading.Condition()
        self._begun = first  # the first item that nobody makes yet
        self._taken = first  # the first one that was not taken
        self._most = first + ahead  # the first one that is not to be begun
        self._made: dict[int, Item | Exception] = {}  # those behind one that is not made
        self._queue: collections.deque[Item] = collections.deque()
        self._failed: Exception | None = None  # the item behind the queue
        self._closed = False
        for _ in range(threads):
            threading.Thread(target=self._work, name="prepare", daemon=True).start()

    def there(self, count: int) -> bool:
        """Whether `take(count)` returns at once."""
        return len(self._queue) >= count

    def take(self, count: int) -> list[Item]:
        """The next items; waits for them."""
        with self._changed:
            self._make_to(self._taken + count)
            while len(self._queue) < count:
                if self._failed is not None:
                    raise self._failed
                if self._closed:
                    raise RuntimeError("what reads ahead is closed")
                self._changed.wait()
            self._taken += count
            items = [self._queue.popleft() for _ in range(count)]
            self._make_to(self._taken + self._ahead)
        return items

    def close(self) -> list[Item]:
        """Threads end once they come back from what they make, which is not waited for. Returns the items of which
        `ready` has heard and that nobody took."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return list(self._queue)

    def _make_to(self, number: int) -> None:
        """The lock is held."""
        if number > self._most:
            self._most = number
            self._changed.notify_all()

    def _work(self) -> None:
        while (number := self._another()) is not None:
            try:
                made = self._make(number)
            except Exception as error:
                made = error
            with self._changed:
                self._made[number] = made
                self._line_up()

    def _another(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._begun < self._most)
            if self._closed:
                return None
            self._begun += 1
            return self._begun - 1

    def _line_up(self) -> None:
        """Puts into the queue what is next. The lock is held."""
        while not (self._closed or self._failed) and (number := self._taken + len(self._queue)) in self._made:
            item = self._made.pop(number)
            if isinstance(item, Exception):
                self._failed = item
            else:
                self._queue.append(item)
                self._ready(item)
        self._changed.notify_all()
