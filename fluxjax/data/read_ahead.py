"""Items of an endless sequence, made in threads ahead of their use, and ready when they are taken.

The taker finds them in a queue, and no further item is begun until all of a `take` were handed over: woken threads
would compete with the taker for the interpreter's lock. Grain's own iterator begins another item with each one taken.
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
        """Says whether `take(count)` returns at once."""
        return len(self._queue) >= count

    def take(self, count: int) -> list[Item]:
        """Returns the next items, and waits for them."""
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
        """Ends the threads, each after the item that it is making, without waiting for that. Returns the items of which
        `ready` has heard and that nobody took."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return list(self._queue)

    def _make_to(self, number: int) -> None:
        """Lets the threads make all items before `number`. The caller holds the lock."""
        if number > self._most:
            self._most = number
            self._changed.notify_all()

    def _work(self) -> None:
        while (number := self._another()) is not None:
            try:
                item = self._make(number)
            except Exception as error:
                item = error
            with self._changed:
                self._made[number] = item
                self._line_up()

    def _another(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._begun < self._most)
            if self._closed:
                return None
            self._begun += 1
            return self._begun - 1

    def _line_up(self) -> None:
        """Puts the next items that are made into the queue. The caller holds the lock."""
        while not (self._closed or self._failed) and (number := self._taken + len(self._queue)) in self._made:
            item = self._made.pop(number)
            if isinstance(item, Exception):
                self._failed = item
            else:
                self._queue.append(item)
                self._ready(item)
        self._changed.notify_all()
