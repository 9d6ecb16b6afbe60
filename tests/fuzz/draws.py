"""The loop of a fuzzer: one draw after the other, each with its own seed, and a word now and then."""

import contextlib
import pathlib
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

SAY_EVERY = 5.0  # seconds
MOST_FAILURES = 50  # after which it is enough


class Failures:
    """Collects failures, a line each with the seed that repeats it; counts draws, and prints how many are done."""

    def __init__(self, count: int) -> None:
        self.lines: list[str] = []
        self._count, self._done, self._said = count, 0, time.monotonic()

    def add(self, seed: int, error: BaseException) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1:] or [None]
        where = f" ({frame[0].filename.rpartition('/')[2]}:{frame[0].lineno})" if frame[0] else ""
        self.lines.append(f"--seed {seed}: {type(error).__name__}: {' '.join(str(error).split())[:400]}{where}")
        print(self.lines[-1], file=sys.stderr, flush=True)

    def done(self) -> None:
        self._done += 1
        if time.monotonic() - self._said > SAY_EVERY:
            self._said = time.monotonic()
            print(f"{self._done} of {self._count}, {len(self.lines)} failed", file=sys.stderr, flush=True)

    @property
    def enough(self) -> bool:
        return len(self.lines) >= MOST_FAILURES


class Fuzzer(Protocol):
    def draw(self, draw: random.Random) -> None: ...

    def close(self) -> None: ...


def each_of(make: Callable[[pathlib.Path], Fuzzer], count: int, seed: int) -> list[str]:
    """Runs the draws of a fuzzer that is made for a folder of its own, which is the working directory meanwhile: odd
    input may name a place without a root. Returns what `each` does."""
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.chdir(name),
        contextlib.closing(make(pathlib.Path(name))) as fuzzer,
    ):
        return each(count, seed, fuzzer.draw)


def each(count: int, seed: int, check: Callable[[random.Random], Any]) -> list[str]:
    """Calls `check` for `count` draws and returns what failed: what it raises, or what a thread raises meanwhile."""
    failures, before = Failures(count), threading.excepthook
    current = seed

    def raised(arguments: Any) -> None:
        failures.add(current, arguments.exc_value)

    threading.excepthook = raised
    try:
        for current in range(seed, seed + count):
            try:
                check(random.Random(current))
            except Exception as error:
                failures.add(current, error)
            failures.done()
            if failures.enough:
                break
    finally:
        threading.excepthook = before
    return failures.lines
