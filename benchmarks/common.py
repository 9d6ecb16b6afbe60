"""The parts that both sides of a benchmark share: workers driven over pipes, and measures of time and memory. Standard
library only, because the peer's interpreter need not have anything of this project installed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import os
import pathlib
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TextIO

ROOT = pathlib.Path(__file__).resolve().parent.parent
MIB = 2**20


class WorkerError(RuntimeError):
    """A worker process ended, or its answer is no result. The message says how."""


# --- measures -----------------------------------------------------------------------------------


def peak_rss_mib() -> float:
    """The most memory that this process ever had resident, in MiB."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # unlike ru_maxrss, this begins at zero with the program
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1024, 1)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes, or KiB
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB, 1)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum, in seconds."""
    return {
        "median": round(statistics.median(seconds), 4),
        "min": round(min(seconds), 4),
        "max": round(max(seconds), 4),
    }


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def response_lengths(natural: bool, prompts: int, group_size: int, most: int, seed: int) -> list[list[int]]:
    """Returns the tokens of each response of a step, group by group: `most` for all, or, if `natural`, sampled from a
    lognormal around a third of `most` and cut off at `most` (mean about 0.4 of `most`, one in 16 cut off). That is
    about as uneven as groups of answers are."""
    draw = random.Random(seed)

    def length() -> int:
        return min(max(round(draw.lognormvariate(math.log(most / 3), 0.7)), 1), most) if natural else most

    return [[length() for _ in range(group_size)] for _ in range(prompts)]


class Stopwatch:
    """Adds up the wall time of named parts.

    with watch("rollout"): ...
    watch.take() -> {"rollout": seconds}, and starts afresh
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds


# --- the parent's end of the pipes --------------------------------------------------------------


class Worker:
    """A process that answers each request with a JSON line: see `Channel`. Its standard error passes through.

    The worker itself measures the seconds of its stages: in `train_step.py`, `prepare`, `rollout`, `train`, `sync` and
    `step`.
    """

    def __init__(self, name: str, command: Sequence[str], settings: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [*command, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ) | dict(env),
            start_new_session=True,  # a Ctrl-C reaches the parent, which then ends its workers
        )
        self.about = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and returns its answer. Raises `WorkerError` if the worker does not answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_answer` says how the worker ended
        return self._answer()

    def finish(self) -> dict[str, Any]:
        """Asks the worker to finish, waits for its end, and returns its last answer."""
        last = self.ask(do="finish")
        self._process.wait(60)
        return last

    def close(self) -> None:
        """Kills the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise WorkerError(f"the {self.name} worker {how}; its messages are above")
        return json.loads(line)


class Team:
    """Workers of one distributed program, a process each, on this machine."""

    def __init__(
        self, script: str, settings: Mapping[str, Any], env: Mapping[str, str], count: int, *, pinned: bool = False
    ) -> None:
        """Starts `count` workers. Each gets the `settings` and its `port`, `processes` and `process` (its number); if
        `pinned`, also a `core` of its own. Raises `WorkerError` if there are fewer cores than workers."""
        available = sorted(os.sched_getaffinity(0))
        if pinned and len(available) < count:
            raise WorkerError(f"{count} cores are needed, one for each process")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            shared = {**settings, "port": probe.getsockname()[1], "processes": count}
        command = [sys.executable, str(ROOT / "benchmarks" / script)]
        self._stack = contextlib.ExitStack()
        self._pool = self._stack.enter_context(concurrent.futures.ThreadPoolExecutor(count))

        def start(process: int) -> Worker:
            told = {**shared, "process": process} | ({"core": available[process]} if pinned else {})
            return Worker(f"process {process}", command, told, thread_environment(1) | {"JAX_PLATFORMS": "cpu"} | env)

        self._workers = [self._stack.enter_context(worker) for worker in self._pool.map(start, range(count))]
        self.about = self._workers[0].about
        self._number = 0

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Sends a request to all workers at the same time and returns their answers. Requests are numbered from 1:
        their field `number`."""
        self._number += 1
        return list(self._pool.map(lambda worker: worker.ask(number=self._number, **request), self._workers))

    def finish(self) -> list[dict[str, Any]]:
        return list(self._pool.map(Worker.finish, self._workers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Pair(Team):
    """Two workers of one distributed program, each pinned to a core of its own."""

    def __init__(self, script: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> None:
        super().__init__(script, settings, env, 2, pinned=True)


# --- the worker's end ---------------------------------------------------------------------------


class Channel:
    """The worker's end of the pipes. It reserves standard output for answers: other prints go to standard error."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **answer: Any) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yields all requests until `finish`, the last one, or until the parent is gone."""
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "finish":
                return
            yield request


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables that give a worker so many threads, set before its libraries load."""
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
