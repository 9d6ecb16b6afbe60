"""Slots that bound how many calls run at the same time on an event loop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator


class Slots:
    """Slots 0 to `count` - 1, each held by one call at a time, on the run's event loop; further calls wait."""

    def __init__(self, count: int) -> None:
        self._count, self._free = count, list(range(count))
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._waiting = self._most = 0  # `_most`: the most waiting calls since `usage`
        self._busy = 0.0  # seconds that slots were held since `usage`, up to `_tallied`
        self._since = self._tallied = time.monotonic()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[int]:
        """Waits for a slot and holds it."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:  # a semaphore belongs to one loop
            self._semaphore = loop, asyncio.Semaphore(self._count)
        semaphore = self._semaphore[1]
        self._waiting += 1
        if semaphore.locked():
            self._most = max(self._most, self._waiting)
        try:
            await semaphore.acquire()
        finally:
            self._waiting -= 1
        self._tally()
        slot = self._free.pop()
        try:
            yield slot
        finally:
            self._tally()
            self._free.append(slot)
            semaphore.release()

    def usage(self) -> tuple[int, float]:
        """Returns the most calls that waited at once, and the share of the slots' time that calls took, since the last
        `usage`. The share is 0 only if no slot was held."""
        self._tally()
        waited, busy = self._most, self._busy / max((self._tallied - self._since) * self._count, 1e-9)
        self._since, self._busy, self._most = self._tallied, 0.0, self._waiting
        return waited, busy

    def _tally(self) -> None:
        now = time.monotonic()
        self._busy += (self._count - len(self._free)) * (now - self._tallied)
        self._tallied = now
