"""Runs users' functions where what hangs can be left behind: in daemon threads, and in an event loop of their own.

The end of a process does not wait for a daemon thread, as it would for a task that refuses to be cancelled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable
from typing import Any

_PING_SECONDS = 0.5  # in which a loop answers that is not blocked


def in_daemon_thread(function: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
    """Calls the function in a thread of its own."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # also SystemExit: it must not look like a hang
            outcome = error if isinstance(error, Exception) else RuntimeError(f"raised {type(error).__name__}")
            if future.set_running_or_notify_cancel():
                future.set_exception(outcome)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return future


class UsersLoop:
    """An event loop in a daemon thread, for coroutines of users; another one where they block it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> concurrent.futures.Future[Any]:
        """Awaits `function(*arguments)` in the loop, which is started if need be."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name="rewards-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_awaited(function, *arguments), self._loop)

    async def check(self) -> None:
        """Leaves the loop behind if it does not answer: what was submitted to it is lost, and times out."""
        if (loop := self._loop) is None:
            return
        answered: concurrent.futures.Future[None] = concurrent.futures.Future()
        loop.call_soon_threadsafe(lambda: answered.cancelled() or answered.set_result(None))
        waiting = asyncio.wrap_future(answered)
        done, _ = await asyncio.wait({waiting}, timeout=_PING_SECONDS)
        waiting.cancel()
        if not done and self._loop is loop:
            self._loop = None

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    if asyncio.all_tasks(loop):  # nobody waits for those that refuse: they end with the process
        loop.run_forever()
    loop.close()


async def _awaited(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    try:
        return await function(*arguments)
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # it would end the loop
        raise RuntimeError(f"raised {type(error).__name__}") from None
