"""A process of this machine that a run starts: its log, its end, and that it does not outlive the run."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

GRACE = 3.0  # seconds between SIGTERM and SIGKILL


class LocalProcess:
    """Starts commands, one after the other, with their output behind `log`. Each ends with the thread that started it,
    where the system is Linux."""

    def __init__(self, log: pathlib.Path) -> None:
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """Runs a command in an environment. Raises OSError where there is no such program."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(pathlib.Path(__file__).with_name("bound.py")), *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=variables,
                start_new_session=True,  # Ctrl-C is for the run; and a group, so that all of its processes end
            )

    @property
    def running(self) -> subprocess.Popen[bytes] | None:
        """The process, if there is one; another thread may end it meanwhile."""
        return self._process

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ended(self) -> int | None:
        """The exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Ends it and all of its processes: politely, then not. Blocks for a few seconds at most."""
        process = self._process  # another thread may kill it meanwhile
        if process is None:
            return
        _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def send(self, number: int) -> None:
        """Sends a signal to it and all of its processes."""
        if self._process is not None:
            _signal(self._process, number)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _signal(process, signal.SIGKILL)
            process.wait()

    def last_words(self, lines: int = 5) -> str:
        """The end of its log, for messages."""
        return "\n".join(_tail(self.log, lines))


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(file: pathlib.Path, lines: int) -> Sequence[str]:
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - 8192))
            return log.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
