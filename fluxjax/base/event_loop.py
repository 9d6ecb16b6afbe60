"""Runs coroutines from scripts and notebooks, and handles Ctrl-C and SIGTERM."""

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
_STOPPING = "stopping after this step; a second Ctrl-C (or SIGTERM) stops at once"


def hear_signals(stops: list[Callable[[], None]], end: Callable[[int], None]) -> None:
    """Starts a thread that handles Ctrl-C and SIGTERM. At each signal, the thread pops a function from `stops` and
    calls it. If `stops` is empty, the thread calls `end` with the signal's number. Python's own handlers run in the
    main thread, which may compile for minutes or wait for other processes for ever. Only commands call `hear_signals`.
    `jax.distributed.initialize` takes SIGTERM over: call `take_signals` again after it."""
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
    """Does nothing, because the thread of `hear_signals` reads the signal's number."""


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` at the first Ctrl-C and at the first SIGTERM within the block. A second signal of the same kind has
    its usual effect. Does nothing after `hear_signals`, and outside the main thread, which alone gets signals."""
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
    """Returns the result of `work`. If an event loop runs already (in a notebook), `work` runs in a new thread.
    KeyboardInterrupt is then ignored until `work` ends."""
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
    """Awaits `call(engine)` for all engines at the same time. The first failure cancels the remaining calls."""
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(not_silently_cancelled(call, engine))


async def not_silently_cancelled(work: Callable[..., Awaitable[None]], *args: object) -> None:
    """Awaits `work(*args)`. Raises RuntimeError if `work` ends as cancelled although nobody cancelled the current task.
    A task group overlooks a task that ends as cancelled, and other tasks could wait for ever for its result."""
    try:
        await work(*args)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise RuntimeError(f"{work.__qualname__} cancelled itself") from error
        raise


def first_of(failures: BaseExceptionGroup) -> BaseException:
    """Returns the first error within nested exception groups."""
    error = failures.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error
