"""Slots: a bounded number of jobs at a time, each with a slot of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class JobSlots:
    """Hands out slots 0 to `slots` - 1, each to one user at a time; event loops take turns, too."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = list(range(slots))
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[int]:
        """Waits for a free slot, and gives it back in the end."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:  # it belongs to the loop that first waits on it
            self._semaphore = loop, asyncio.Semaphore(self._slots)
        async with self._semaphore[1]:
            slot = self._free.pop()
            try:
                yield slot
            finally:
                self._free.append(slot)
