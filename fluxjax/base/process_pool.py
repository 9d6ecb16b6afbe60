"""Processes that work for a run, one job at a time; a process that takes too long, or too much memory, is killed.

They are started when there is work, by `subprocess`: no process with threads is forked, and the main module is not
imported again. Other modules define the work: `data/decoders.py`, `base/worker_pool.py`.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

from .process_channel import Channel

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
CLOSING_SECONDS = 5.0  # seconds that a process may take to end
# One thread of OpenBLAS, and one heap of glibc for all threads: more would use up address space, which is bounded.
ALONE = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


class ProcessEnded(Exception):
    """The process ended by itself, or something outside the run ended it."""


class WorkerProcess:
    """A process that runs `python -m MODULE DESCRIPTOR` and does one job at a time."""

    def __init__(self, module: str, begin: Mapping[str, Any]) -> None:
        """Starts the process, sends it `begin`, and waits for its answer. Raises ProcessEnded or OSError if that
        fails."""
        here, there = socket.socketpair()
        self.channel = Channel(here)
        self.jobs = 0  # jobs given to this process so far
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[there.fileno()],
                process_group=0,  # Ctrl-C reaches only the run; and the run can kill the process's children with it
            )
        try:
            self.channel.send(begin)
            self.ready, _ = self.channel.receive(START_SECONDS)
        except (EOFError, TimeoutError):
            raise ProcessEnded(self.end()) from None

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kills the process, and its children that are still in its process group."""
        if self._process.poll() is None:  # else its number may belong to another process by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()

    def end(self) -> str:
        """Kills the process if it lives, and returns how it ended."""
        self.channel.close()
        try:
            code = self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class PoolLoad(NamedTuple):
    """`waiting` and `busy` count jobs at this moment; `killed` processes and `seconds` of work are totals."""

    waiting: int
    busy: int
    killed: int
    seconds: float


class ProcessPool:
    """Up to `count` processes, each made by `start`, lent to one job at a time."""

    def __init__(self, start: Callable[[], WorkerProcess], count: int, closed: str, *, patient: bool = False) -> None:
        """`closed` is the message of the RuntimeError that a closed pool raises. A `patient` pool starts another
        process only when jobs have waited, in sum, as long as a start takes: for few and quick jobs another process is
        not worth its start."""
        self.count, self._patient = count, patient
        self._starting = 0
        self._start_seconds = 0.0  # seconds that the last start took
        self._seeking = 0  # jobs that have a turn and wait for a process
        # seconds that these jobs have waited since the last start; the time of that sum
        self._sought, self._tallied = 0.0, time.monotonic()
        self._start, self._closed_text = start, closed
        self._changed = threading.Condition()
        self._processes: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._busy = 0  # jobs that have a process, or start one
        self._urgent = 0  # waiting jobs that go before all others
        self._waiting = 0  # all jobs that wait
        self._killed = 0
        self._seconds = 0.0
        self._closed = False

    def load(self) -> PoolLoad:
        with self._changed:
            return PoolLoad(self._waiting, self._busy, self._killed, self._seconds)

    def close(self) -> None:
        """Ends the processes. Threads that wait for a process get a RuntimeError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for process in self._processes:
                process.kill()
            self._changed.wait_for(lambda: not self._busy, CLOSING_SECONDS)  # a starting process ends once it is ready
            ended, self._processes = self._processes, set()
        for process in ended:
            process.end()

    @contextlib.contextmanager
    def turn(self, urgent: bool = False) -> Iterator[None]:
        """Waits until one more job may have a process."""
        with self._changed:
            self._waiting += 1
            self._urgent += urgent
            try:
                self._changed.wait_for(
                    lambda: self._closed or (self._busy < self.count and (urgent or not self._urgent))
                )
            finally:
                self._waiting -= 1
                self._urgent -= urgent
            self._check_open()
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def take(self) -> WorkerProcess:
        """Returns a living process, starting it if need be; to be called within a `turn`. Raises RuntimeError once the
        pool is closed, and the errors of `start`."""
        while (process := self._idle_one()) is not None:
            if process.lives:
                return process
            self.give_back(process, answered=False)  # something killed the process while it was idle
        begin = time.monotonic()
        try:
            process = self._start()
        finally:
            with self._changed:
                self._tally()
                self._starting -= 1
                self._start_seconds, self._sought = time.monotonic() - begin, 0.0
                self._changed.notify_all()
        with self._changed:
            if not self._closed:
                self._processes.add(process)
                return process
        process.kill()
        process.end()
        raise RuntimeError(self._closed_text)

    def give_back(self, process: WorkerProcess, answered: bool, seconds: float = 0.0) -> None:
        """Makes the process available to the next job, or ends a process that has not answered fully."""
        if not answered:
            process.kill()
            process.end()
        with self._changed:
            self._seconds += seconds
            self._changed.notify_all()
            if answered:
                self._idle.append(process)
            elif not self._closed:
                self._processes.discard(process)
                self._killed += 1

    def _idle_one(self) -> WorkerProcess | None:
        """Waits for an idle process and returns it; None if another process is to be started."""
        with self._changed:
            self._tally(1)
            try:
                while True:
                    self._check_open()
                    if self._idle:
                        return self._idle.pop()
                    patience = self._patience()
                    if patience is not None and patience <= 0:
                        self._starting += 1
                        return None
                    self._changed.wait(patience)
            finally:
                self._tally(-1)

    def _patience(self) -> float | None:
        """The seconds for which a job should still wait before another process is started; None: until a start ends."""
        if not self._patient or not (self._processes or self._starting):
            return 0.0
        if self._starting:
            return None
        self._tally()
        return (self._start_seconds - self._sought) / self._seeking

    def _tally(self, change: int = 0) -> None:
        """Adds up the seconds that jobs wait for a process, then changes the number of waiting jobs by `change`."""
        now = time.monotonic()
        self._sought += self._seeking * (now - self._tallied)
        self._tallied, self._seeking = now, self._seeking + change

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._closed_text)
