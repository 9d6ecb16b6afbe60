"""Running a coroutine to its end: from a script, from a notebook, and until somebody presses Ctrl-C."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run cleanly at the next step; a second one does what it always does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {}

    def handle(number: int, frame: Any) -> None:
        signal.signal(number, previous[number])
        log.warning("stopping after this step; once more to stop at once")
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_async(work: Coroutine[Any, Any, T], on_interrupt: Callable[[], None] | None = None) -> T:
    """`asyncio.run`, also from within a running loop (a notebook), where it takes a thread of its own.

    There, an interrupt calls `on_interrupt` and goes on waiting; without it, it is raised once the work is done.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fluxjax") as thread:
        future = thread.submit(asyncio.run, work)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if on_interrupt is None:
                    raise
                on_interrupt()
