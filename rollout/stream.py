"""The consumer's end of a request: an async iterator that ends its request when it is closed, cancelled or dropped."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable

from .engine import TokenChunk


class Mailbox:
    """Chunks on their way to one consumer. The engine holds this, never the stream, so that a stream that nobody
    reads any more is noticed."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._chunks: deque[TokenChunk] = deque()
        self._closed = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, chunk: TokenChunk) -> None:
        if not self._closed:
            self._chunks.append(chunk)
            self._news.set()

    def discard(self) -> None:
        """The consumer went away: nothing is kept for it."""
        self._chunks.clear()
        self.close()

    def close(self, error: Exception | None = None) -> None:
        """No more chunks; the consumer gets what is there, then the error or the end."""
        if not self._closed:
            self._closed, self._error = True, error
        if not self.loop.is_closed():
            self._news.set()

    async def get(self) -> TokenChunk | None:
        """The next chunk; None at the end. Raises the error that the mailbox was closed with."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()
        return self._chunks.popleft()


class TokenStream(AsyncIterator[TokenChunk]):
    """The stream that `generate` returns. `abandon` is called once, on the event loop, when the consumer goes away."""

    def __init__(self, mailbox: Mailbox, abandon: Callable[[], None]) -> None:
        self._mailbox, self._abandon = mailbox, abandon
        self._dropped = weakref.finalize(self, _from_any_thread, mailbox.loop, abandon)
        self._dropped.atexit = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenChunk:
        try:
            chunk = await self._mailbox.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Aborts what is still running; the stream ends here, without what was not read yet."""
        self._mailbox.discard()
        if self._dropped.detach() is not None:
            self._abandon()


def _from_any_thread(loop: asyncio.AbstractEventLoop, abandon: Callable[[], None]) -> None:
    """A stream may be collected in any thread, also when its loop has ended and there is nothing left to do."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(abandon)
