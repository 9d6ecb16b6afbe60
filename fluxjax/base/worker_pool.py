"""Calls a function in processes that can be killed, so that the time and the memory of each call are bounded.

`subprocess` starts the processes when there is work. No process with threads is forked, and the main module is not
imported again. The processes run `worker_process.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from .process_channel import Channel
from .process_tree import descendants, resident

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
CLOSING_SECONDS = 5.0  # seconds that a process may take to end
LOOK_SECONDS = 0.1  # seconds between two looks at the resident memory of a process
# Several threads of OpenBLAS, or several heaps of glibc, would use up the bounded address space.
ALONE = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
T = TypeVar("T")
Received: TypeAlias = Callable[[Any, int, np.ndarray], object]


class WorkerTimeout(Exception):
    """A call took longer than its bound, and its process was killed."""


class WorkerDied(Exception):
    """The process of a call ended, needed too much memory, answered another job, or could not be started."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerEnded(WorkerDied):
    """The process of a call ended, but the run did not kill it. `how` is the signal or the exit code."""

    def __init__(self, how: str) -> None:
        super().__init__(f"ended its process ({how})")
        self.how = how


class WorkerAbsent(WorkerDied):
    """No process could be started for a call. `why` is the reason."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"a process for {name} can't be started: {why}")
        self.why = why


class WorkerMemory(WorkerDied):
    """The process of a call needed too much memory."""


class WorkerError(Exception):
    """The function raised, or its result can't be sent. The text names the type of the error."""


class _Process:
    def __init__(self, begin: Mapping[str, Any]) -> None:
        """Starts the process, sends `begin`, and waits for the answer. Raises WorkerEnded or OSError."""
        here, there = socket.socketpair()
        self.channel = Channel(here)
        self.jobs = 0  # jobs given to this process so far
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fluxjax.base.worker_process", str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[there.fileno()],
                process_group=0,  # Ctrl-C reaches only the run, and `kill` reaches the children of the process
            )
        try:
            self.channel.send(begin)
            self.ready, _ = self.channel.receive(START_SECONDS)
        except (EOFError, TimeoutError):
            raise WorkerEnded(self.end()) from None

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def resident(self) -> int:
        """The resident memory of the process and its descendants in bytes; 0 once the process has ended."""
        return resident(descendants(self._process.pid)) if self.lives else 0

    def kill(self) -> None:
        if self._process.poll() is None:  # the number of an ended process may belong to another process
            for member in reversed(descendants(self._process.pid)[1:]):  # they may have left the process group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()

    def end(self) -> str:
        self.channel.close()
        try:
            code = self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class PoolLoad(NamedTuple):
    """`waiting` and `busy` count present calls. `killed` counts the processes that were killed or died."""

    waiting: int = 0
    busy: int = 0
    killed: int = 0


class WorkerPool:
    """Up to `workers` processes, each of which makes one call at a time of the function at `function_path`
    (`module:function`).

    Argument and result have types of msgpack: None, numbers, text, bytes, lists, dictionaries. A tuple arrives as a
    list. A function may also return `WithArrays`. Processes start when calls have to wait, import the module by this
    process's `sys.path`, and stay. The function runs in the main thread of a process, so that it may use
    `signal.alarm`. Standard output of the function is dropped, standard error is shown. Thread-safe.
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
        patient: bool = True,
        look_at_memory: bool = False,
    ) -> None:
        """`seconds` bounds a call without its own bound. `memory_gib` is the memory that the function may take beside
        its imports. `name` is for messages. If `made_with` is not None, the object at `function_path` makes the
        function: each process calls it once with `made_with`, before memory is bounded. A `patient` pool starts another
        process only after a call has waited as long as a start takes. With `look_at_memory`, `memory_gib` bounds the
        resident memory of a process and its descendants, imports included, during calls. The address space is then not
        bounded, because browsers and JAX reserve far more than they use."""
        self.function_path, self.workers, self.name = function_path, workers, name
        self.seconds, self.memory_gib, self._made_with = seconds, memory_gib, made_with
        self._patient, self._look_at_memory = patient, look_at_memory
        self._memory, self._memory_text = int(memory_gib * (1 << 30)), f"needs more than {memory_gib:g} GiB of memory"
        self._starting = 0
        self._start_seconds = 0.0  # duration of the last start
        self._changed = threading.Condition()
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []
        self._load = PoolLoad()
        self._urgent = 0  # waiting calls that go before all other calls
        self._closed = False
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def call(
        self,
        argument: Any,
        seconds: float | None = None,
        *,
        urgent: bool = False,
        received: Received = lambda result, number, array: None,
    ) -> Any:
        """Returns the function's result, at most `seconds` after a process has the argument. `received(result, number,
        array)` is called for each array after the result. Each array may take `seconds` more. Urgent calls go before
        others. Raises WorkerTimeout, WorkerDied, WorkerError, or RuntimeError after `close`."""
        seconds = self.seconds if seconds is None else seconds
        held = self._hold(urgent)
        try:
            return held.call(argument, seconds, received)
        finally:
            held.release()

    async def acall(self, argument: Any, seconds: float | None = None) -> Any:
        """Makes a `call` in an event loop. Cancelling ends the wait, but not a call that has begun."""
        return await asyncio.wrap_future(self._in_thread(self.call, argument, seconds))

    async def ahold(self) -> HeldWorker:
        """Waits for a process, and holds it for one caller. Raises WorkerDied, or RuntimeError after `close`."""
        holding = self._in_thread(self._hold)
        try:
            return await asyncio.wrap_future(holding)
        except asyncio.CancelledError:  # the thread goes on
            holding.add_done_callback(lambda held: held.cancelled() or held.exception() or held.result().release())
            raise

    def _hold(self, urgent: bool = False) -> HeldWorker:
        with contextlib.ExitStack() as turn:
            turn.enter_context(self._turn(urgent))
            return HeldWorker(self, self._take(), turn.pop_all())

    def _in_thread(self, function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self.workers, thread_name_prefix=self.name)
        return self._threads.submit(function, *arguments)

    def _reply(self, process: _Process, argument: Any, seconds: float, received: Received) -> dict[str, Any]:
        """Sends an argument to a process and returns the message of its answer. It is useless after an error."""
        process.jobs += 1
        try:
            job = {"number": process.jobs, "argument": argument, "seconds": seconds}
            process.channel.send(job, seconds=seconds)
            if self._look_at_memory:
                self._watch(process, seconds)
            reply, _ = process.channel.receive(seconds)
            if reply.get("number") != process.jobs:  # the process cannot be trusted any more
                raise WorkerDied("its reply does not belong to the job that it was sent")
            if "memory" in reply:
                raise WorkerMemory(self._memory_text)
            for number in range(reply.get("arrays", 0)):
                _, array = process.channel.receive(seconds)
                assert array is not None
                received(reply["result"], number, array)
        except TimeoutError:
            raise WorkerTimeout(f"timed out after {seconds:g} s") from None
        except EOFError:
            raise WorkerEnded(process.end()) from None
        return reply

    def _watch(self, process: _Process, seconds: float) -> None:
        """Waits until a process answers. Raises WorkerMemory if its resident memory exceeds the bound."""
        end, answered = time.monotonic() + seconds, False
        while not answered:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            answered = process.channel.has_message(min(LOOK_SECONDS, left))
            if process.resident > self._memory:
                raise WorkerMemory(self._memory_text)

    def load(self) -> PoolLoad:
        return self._load

    def close(self) -> None:
        """Kills all processes. Threads that wait for a process get a RuntimeError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for process in self._processes:
                process.kill()
            self._changed.wait_for(lambda: not self._load.busy, CLOSING_SECONDS)  # busy calls may start processes
            ended, self._processes = self._processes, set()
        for process in ended:
            process.end()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def _turn(self, urgent: bool) -> Iterator[None]:
        with self._changed:
            self._count(waiting=1)
            self._urgent += urgent
            try:
                self._changed.wait_for(
                    lambda: self._closed or (self._load.busy < self.workers and (urgent or not self._urgent))
                )
            finally:
                self._count(waiting=-1)
                self._urgent -= urgent
            self._check_open()
            self._count(busy=1)
        try:
            yield
        finally:
            with self._changed:
                self._count(busy=-1)
                self._changed.notify_all()

    def _take(self) -> _Process:
        while (process := self._idle_one()) is not None:
            if process.lives:
                return process
            self._give_back(process, answered=False)  # the process was killed while it was idle
        begin = time.monotonic()
        try:
            process = self._start()
        except (WorkerEnded, OSError) as error:
            raise WorkerAbsent(self.name, error.how if isinstance(error, WorkerEnded) else str(error)) from error
        finally:
            with self._changed:
                self._starting -= 1
                self._start_seconds = time.monotonic() - begin
                self._changed.notify_all()
        with self._changed:
            if not self._closed:
                self._processes.add(process)
                return process
        process.kill()
        process.end()
        raise RuntimeError(self._closed_text)

    def _idle_one(self) -> _Process | None:
        """Returns an idle process, for which a patient pool waits, or None if the caller must start one."""
        with self._changed:
            while self._patient:
                self._changed.wait_for(lambda: self._idle or self._closed or not self._starting)
                if self._idle or self._closed or not self._processes:
                    break
                if not self._changed.wait_for(
                    lambda: self._idle or self._closed or self._starting, self._start_seconds
                ):
                    break  # otherwise looks again: a process is idle, or another call is starting a process
            self._check_open()
            if self._idle:
                return self._idle.pop()
            self._starting += 1
            return None

    def _start(self) -> _Process:
        memory = 0 if self._look_at_memory else self._memory
        path = [os.path.abspath(folder) for folder in sys.path]  # an empty text means the current folder
        function = {"function": self.function_path, "made_with": self._made_with}
        process = _Process({**function, "path": path, "memory": memory})
        if "failed" in process.ready:
            process.end()
            raise WorkerEnded(f"importing {self.function_path!r} raised {process.ready['failed']}")
        return process

    def _give_back(self, process: _Process, answered: bool) -> None:
        if not answered:
            process.kill()
            process.end()
        with self._changed:
            self._changed.notify_all()
            if answered:
                self._idle.append(process)
            elif not self._closed:
                self._processes.discard(process)
                self._count(killed=1)

    def _count(self, **more: Any) -> None:  # Any, because jaxtyping compares the dictionary with the annotation
        self._load = self._load._replace(**{name: getattr(self._load, name) + count for name, count in more.items()})

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._closed_text)

    @property
    def _closed_text(self) -> str:
        return f"the workers of {self.name} are closed"


class HeldWorker:
    """A process of a pool that one caller holds for several calls, one at a time, until `release`."""

    def __init__(self, pool: WorkerPool, process: _Process, turn: contextlib.ExitStack) -> None:
        self._pool, self._process, self._turn = pool, process, turn
        self._lock = threading.RLock()  # held during calls
        self._released = False

    @property
    def resident(self) -> int:
        """The resident memory of the process and its descendants in bytes; 0 once the process has ended."""
        return self._process.resident

    async def acall(self, argument: Any, seconds: float) -> Any:
        """Returns the function's result, as `WorkerPool.call` does. A process that fails to answer is released.
        Cancelling ends the wait; the caller must then call `kill`."""
        return await asyncio.wrap_future(self._pool._in_thread(self.call, argument, seconds))

    def call(self, argument: Any, seconds: float, received: Received = lambda result, number, array: None) -> Any:
        with self._lock:
            if self._released:
                raise WorkerDied("its process was released")
            try:
                reply = self._pool._reply(self._process, argument, seconds, received)
            except BaseException:
                self.release(fit=False)
                raise
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def kill(self) -> None:
        """Ends and releases the process. A call under way raises WorkerEnded."""
        self._process.kill()
        self.release(fit=False)

    def release(self, fit: bool = True) -> None:
        """Gives the process back, or ends a process that is not `fit` for further callers, once."""
        with self._lock:
            if not self._released:
                self._released = True
                with self._turn:
                    self._pool._give_back(self._process, answered=fit)
