"""Slots in which rewards of one kind are called: as many calls at a time as its `concurrency`; further calls wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import NamedTuple


class Usage(NamedTuple):
    """The use of slots: `waited` is the most calls that waited at once, `busy` the share of slots' time in calls."""

    waited: int
    busy: float


class CallSlots:
    """The slots of one kind of rewards, and how much they are used. All of it happens on the run's event loop."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._waiting = 0
        self._most = 0  # that waited at once since `usage`
        self._began: dict[object, float] = {}  # calls under way, by time.monotonic
        self._busy = 0.0  # seconds since `usage` of calls that ended
        self._since = time.monotonic()
        self._used = False

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for a slot and holds it."""
        semaphore = self._of_this_loop()
        self._waiting += 1
        if semaphore.locked():
            self._most = max(self._most, self._waiting)
        try:
            await semaphore.acquire()
        finally:
            self._waiting -= 1
        call = object()
        self._began[call], self._used = time.monotonic(), True
        try:
            yield
        finally:
            self._busy += time.monotonic() - max(self._began.pop(call), self._since)
            semaphore.release()

    def usage(self) -> Usage | None:
        """Returns how much the slots were used since the last call of this method; None where no reward was called."""
        now = time.monotonic()
        busy = self._busy + sum(now - max(begin, self._since) for begin in self._began.values())
        usage = Usage(self._most, busy / max((now - self._since) * self.concurrency, 1e-9))
        used = self._used or bool(self._began)
        self._since, self._busy, self._most, self._used = now, 0.0, self._waiting, False
        return usage if used else None

    def _of_this_loop(self) -> asyncio.Semaphore:
        """Returns the semaphore of the running event loop: one belongs to the loop that first waits on it."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = loop, asyncio.Semaphore(self.concurrency)
        return self._semaphore[1]
