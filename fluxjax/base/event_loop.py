"""Runs a coroutine to its end, from a script or a notebook, and ends it cleanly after Ctrl-C."""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from rollout.engine import Engine

log = logging.getLogger(__name__)
T = TypeVar("T")
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_STOPPING = "stopping after this step; once more to stop at once"


def hear_signals(stops: list[Callable[[], None]], end: Callable[[int], None]) -> None:
    """Handles Ctrl-C and SIGTERM from now on: a signal pops a function from `stops` and calls it; if `stops` is empty,
    it calls `end` with its number. Only commands call `hear_signals`. `jax.distributed.initialize` takes SIGTERM for
    itself, so call `take_signals` again after it. A thread makes the calls: Python would wait for the main thread,
    which may compile for minutes or wait for other processes for ever.
    """
    heard, pipe = os.pipe()

    def hear() -> None:
        while number := os.read(heard, 1)[0]:
            if number in _NUMBERS and stops:
                log.warning(_STOPPING)
                stops.pop()()
            elif number in _NUMBERS:
                end(number)

    threading.Thread(target=hear, name="signals", daemon=True).start()
    os.set_blocking(pipe, False)
    signal.set_wakeup_fd(pipe)
    take_signals()


def take_signals() -> None:
    for number in _NUMBERS:
        signal.signal(number, _heard)


def _heard(number: int, frame: types.FrameType | None) -> None:
    """Does nothing: the thread of `hear_signals` reads the signal's number."""


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` at the first Ctrl-C or SIGTERM within its body; a second signal has its usual effect.

    Does nothing after `hear_signals`, which handles signals itself, and outside the main thread: Python hands signals
    to no other thread.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(_NUMBERS[0]) is _heard:
        yield
        return

    def handle(number: int, frame: types.FrameType | None) -> None:
        signal.signal(number, previous[number])
        log.warning(_STOPPING)
        stop()

    previous: dict[int, Any] = {n: signal.signal(n, handle) for n in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs `asyncio.run(work)`; within a running loop (a notebook), in a new thread. However many interrupts come, the
    call returns when that thread has ended (`stop_on_signals` brings its end nearer)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fluxjax") as thread:
        future = thread.submit(asyncio.run, work)
        while not future.done():
            with contextlib.suppress(KeyboardInterrupt):
                concurrent.futures.wait([future])
        return future.result()


async def on_all(engines: Sequence[Engine], call: Callable[[Engine], Awaitable[None]]) -> None:
    """Calls all engines at the same time; the first failure cancels the other calls."""
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(not_silently_cancelled(call, engine))


async def not_silently_cancelled(work: Callable[..., Awaitable[None]], *args: object) -> None:
    """Awaits `work(*args)`; raises RuntimeError if it ends as cancelled although nobody cancelled this task.

    A task group overlooks a task that ends as cancelled. If a collaborator leaked a cancellation, the event that
    everyone waits for would never happen.
    """
    try:
        await work(*args)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise RuntimeError(f"{work.__qualname__} was cancelled from inside") from error
        raise


def first_of(failures: BaseExceptionGroup) -> BaseException:
    """Returns the first error within nested groups of errors."""
    error = failures.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error
