"""Calls a function in processes that can be killed: the time and the memory of each call are bounded.

A thread that hangs, or takes memory without end, ends the run; a process loses only its one call. Such a process is
`python -m fluxjax.base.worker_pool DESCRIPTOR`: the run sends it over a socket the name of the function to call, then
one argument at a time. Only the function's module may import JAX, not this file.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from .errors import said
from .process_channel import Channel
from .process_pool import PoolLoad, ProcessEnded, ProcessPool, WorkerProcess
from .worker_bounds import GRACE, bound_memory, end_with_run, lacked_memory, leave_signals_to_the_run


class WorkerTimeout(Exception):
    """A call took longer than it may; its process was killed."""


class WorkerDied(Exception):
    """The process of a call ended, needed too much memory, or could not be started."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerMemory(WorkerDied):
    """The process of a call needed too much memory."""


class WorkerError(Exception):
    """The function raised, or returned what can't be sent; the text names the type of its error."""


class WorkerPool:
    """Up to `workers` processes that call the function at `function_path` (`module:function`), one call at a time each.

    Argument and result are types of msgpack: None, numbers, text, bytes, lists, dictionaries (a tuple arrives as a
    list). Processes start when calls have to wait, import the module by this process's `sys.path`, and stay; they do
    not import JAX. The function runs in a process's main thread, so that it may use `signal.alarm`. Its standard output
    is dropped, its standard error is shown. Thread-safe.
    """

    def __init__(
        self,
        function_path: str,
        workers: int,
        *,
        seconds: float,
        memory_gib: float,
        name: str,
        made_with: Any = None,
    ) -> None:
        """`seconds` bounds a call without a bound of its own; `memory_gib` is the memory that the function may take
        beside its imports; `name` is for messages. With `made_with`, each process calls the object at `function_path`
        with it once, before memory is bounded; that call returns the function."""
        self.function_path, self.workers, self.name = function_path, workers, name
        self.seconds, self.memory_gib, self._made_with = seconds, memory_gib, made_with
        self._pool = ProcessPool(self._start, workers, f"the workers of {name} are closed", patient=True)
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def call(self, argument: Any, seconds: float | None = None) -> Any:
        """Returns the function's result, within `seconds` from when a process has the argument. Raises WorkerTimeout,
        WorkerDied, WorkerError, and RuntimeError once the pool is closed."""
        with self._pool.turn():
            try:
                process = self._pool.take()
            except (ProcessEnded, OSError) as error:
                raise WorkerDied(f"a process for {self.name} can't be started: {error}") from error
            return self._called(process, argument, self.seconds if seconds is None else seconds)

    async def acall(self, argument: Any, seconds: float | None = None) -> Any:
        """Does the same as `call`, for an event loop. A cancellation ends the wait, but not a call that has begun."""
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self.workers, thread_name_prefix=self.name)
        return await asyncio.wrap_future(self._threads.submit(self.call, argument, seconds))

    def load(self) -> PoolLoad:
        return self._pool.load()

    def close(self) -> None:
        """Kills the processes, at work or not."""
        self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _start(self) -> WorkerProcess:
        memory = int(self.memory_gib * (1 << 30))
        path = [os.path.abspath(folder) for folder in sys.path]  # "" means the current folder
        function = {"function": self.function_path, "made_with": self._made_with}
        process = WorkerProcess("fluxjax.base.worker_pool", {**function, "path": path, "memory": memory})
        if "failed" in process.ready:
            process.end()
            raise ProcessEnded(f"importing {self.function_path!r} raised {process.ready['failed']}")
        return process

    def _called(self, process: WorkerProcess, argument: Any, seconds: float) -> Any:
        answered, begin = False, time.monotonic()
        process.jobs += 1
        try:
            job = {"number": process.jobs, "argument": argument, "seconds": seconds}
            process.channel.send(job, seconds=seconds)
            reply, _ = process.channel.receive(seconds)
            if reply.get("number") != process.jobs:  # a process that answers another request cannot be trusted any more
                raise WorkerDied("it answered what it was not asked")
            if "memory" in reply:
                raise WorkerMemory(f"needs more than {self.memory_gib:g} GiB of memory")
            answered = True
        except TimeoutError:
            raise WorkerTimeout(f"timed out after {seconds:g} s") from None
        except EOFError:
            raise WorkerDied(f"ended its process ({process.end()})") from None
        finally:
            self._pool.give_back(process, answered, time.monotonic() - begin)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]


# --- the process of calls -------------------------------------------------------------------------


def main(descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor))
    leave_signals_to_the_run()
    end_with_run(descriptor)
    begin, _ = channel.receive()
    sys.path.extend(path for path in begin["path"] if path not in sys.path)
    try:
        function = found(begin["function"])
        if begin["made_with"] is not None:
            function = function(begin["made_with"])
    except Exception as error:  # whatever the module raises as it is imported
        channel.send({"failed": f"{type(error).__name__}: {error}"})
        return
    bound_memory(begin["memory"])
    channel.send({"ready": os.getpid()})
    with contextlib.suppress(EOFError):
        while True:
            job, _ = channel.receive()
            _answer(channel, function, job)


def found(path: str) -> Callable[[Any], Any]:
    """Returns the function at `module:function`. Raises the errors of importing it."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _answer(channel: Channel, function: Callable[[Any], Any], job: Mapping[str, Any]) -> None:
    number, process = job["number"], os.getpid()
    reply: dict[str, Any]
    try:
        signal.setitimer(signal.ITIMER_REAL, job["seconds"] + GRACE)
        reply = {"result": function(job["argument"])}
    except BaseException as error:  # includes SystemExit: the run gets an error, not the end of the process
        reply = {"memory": True} if lacked_memory(error) else {"error": said(error)}
    finally:
        if os.getpid() != process:  # a child that the function forked: only its parent answers
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        channel.send({"number": number, **reply})
    except (TypeError, ValueError, OverflowError) as error:
        channel.send({"number": number, "error": f"returned what can't be sent: {error}"})


if __name__ == "__main__":
    main(int(sys.argv[1]))
