"""Starts the preprocessors of a run on this host, starts them again when they die, and ends them."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from rollout.listening import TOKEN
from rollout.local_server import LocalProcess

from ..base.errors import DataError
from ..config.data import DataConfig
from .places import Places

_LOOK_SECONDS = 0.1
_LONGEST_PAUSE = 5.0  # seconds before a preprocessor that dies again and again is started once more


class _Preprocessor(LocalProcess):
    def __init__(
        self, name: str, host: str, words: Sequence[str], variables: Mapping[str, str], log: pathlib.Path
    ) -> None:
        super().__init__(log)
        self.name, self._words, self._variables = name, words, variables
        self._listen = f"[{host}]" if ":" in host else host
        self.address = ""  # empty until the process announces it
        self.since = 0.0  # monotonic time of the last start, or of the announcement of the address
        self.deaths = 0  # deaths in a row
        self.due: float | None = 0.0  # monotonic time of the next start; None: the process runs
        self._read = 0  # bytes of the log that have been searched

    def start(self, now: float) -> None:
        """Starts the process. Raises OSError if no process can be started."""
        # Other processes know the last announced port. If the last start announced no port, any free port will do.
        port = self.address.rpartition(":")[2] or "0"
        self.address, self.since, self.due = "", now, None
        self._read = self.log.stat().st_size if self.log.exists() else 0
        self.begin([*self._words, f"--listen={self._listen}:{port}"], self._variables)

    def announced(self) -> str:
        """Returns the address that the process has written to its log; empty if the log has none yet."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                if line.startswith(b'{"address"'):
                    return json.loads(line)["address"]
        return ""


class Preprocessors:
    """`count` processes of `python -m fluxjax.preprocess`, with the settings `data` of a run, each with its log
    `preprocessor-K.log` in `folder`. `addresses` has their addresses by name; `token` gives access to them.

    Blocks until all listen on `host`. Raises DataError, with the end of a log, if a process ends before that or does
    not listen after `start_seconds`. A process that dies later is started again. `Places.fail` ends the run if a
    process dies more than `restarts` times in a row, each time within `steady_seconds`.
    """

    def __init__(
        self,
        count: int,
        folder: pathlib.Path,
        data: DataConfig,
        *,
        host: str = "127.0.0.1",
        token: str = "",
        prefix: str = "",
        start_seconds: float = 60.0,
        restarts: int = 5,
        steady_seconds: float = 30.0,
    ) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self._start_seconds, self._restarts, self._steady = start_seconds, restarts, steady_seconds
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = data.workers or max(1, cores // max(1, count))
        words = [sys.executable, "-m", "fluxjax.preprocess", f"--workers={workers}", f"--cache-gib={data.cache_gib}"]
        root = pathlib.Path(__file__).resolve().parents[2]
        paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
        variables = {**os.environ, TOKEN: self.token, "PYTHONPATH": paths}
        self._all = [
            _Preprocessor(
                f"{prefix}preprocessor-{number}", host, words, variables, folder / f"preprocessor-{number}.log"
            )
            for number in range(count)
        ]
        self._changed = threading.Condition()  # guards the three fields below
        self._places: Places | None = None
        self._failure = ""
        self._complete = False  # every process has announced an address
        self._closing = threading.Event()
        # The system ends the preprocessors when the thread that started them ends.
        self._thread = threading.Thread(target=self._run, name="preprocessors", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._complete)
        if self._failure:
            self.close()
            raise DataError(self._failure)

    @property
    def addresses(self) -> dict[str, str]:
        with self._changed:
            return {process.name: process.address for process in self._all}

    @property
    def pids(self) -> dict[str, int]:
        """The ids of the running processes, by name."""
        running = ((process.name, process.running) for process in self._all)
        return {name: process.pid for name, process in running if process is not None}

    def tell(self, places: Places) -> None:
        """Tells `places` the current addresses and, from now on, each new address and the failure."""
        with self._changed:
            self._places = places
            for process in self._all:
                if process.address:
                    places.moved(process.name, process.address)
            if self._failure:
                places.fail(self._failure)

    def restart(self, place: str) -> None:
        """Kills the preprocessor named `place`; the thread of this object starts it again."""
        for process in self._all:
            if process.name == place:
                process.send(signal.SIGKILL)

    def close(self) -> None:
        """Ends all preprocessors. Blocks for at most 3 seconds for each preprocessor that ignores SIGTERM."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.is_set() and not self._failure:
                for process in self._all:
                    self._look(process, time.monotonic())
                self._closing.wait(_LOOK_SECONDS)
            self._closing.wait()
        except Exception as error:
            self._fail(f"preprocessors can't be watched: {type(error).__name__}: {error}")
        finally:
            for process in self._all:
                process.send(signal.SIGTERM)
            for process in self._all:
                process.stop()

    def _look(self, process: _Preprocessor, now: float) -> None:
        if process.due is not None:
            if now >= process.due:
                process.start(now)
            return
        status = process.ended()
        if status is not None:
            self._bury(process, f"{process.name} ended with status {status}", now)
        elif not process.address:
            if address := process.announced():
                with self._changed:
                    process.address, process.since = address, now
                    self._complete = self._complete or all(peer.address for peer in self._all)
                    self._changed.notify_all()
                    if self._places is not None:
                        self._places.moved(process.name, address)
            elif now - process.since > self._start_seconds:
                self._bury(process, f"{process.name} does not listen after {self._start_seconds:g} s", now)

    def _bury(self, process: _Preprocessor, reason: str, now: float) -> None:
        process.kill()  # and the processes that it has started
        steady = process.address and now - process.since >= self._steady
        process.deaths = 1 if steady else process.deaths + 1
        if process.deaths > self._restarts:
            reason += f", {process.deaths} times in a row"
        elif self._complete:
            process.due = now + min(_LONGEST_PAUSE, 0.1 * 2 ** (process.deaths - 1))
            return
        self._fail(f"{reason}; its log, {process.log}, ends with:\n{process.last_words()}")

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = reason
            self._changed.notify_all()
            if self._places is not None:
                self._places.fail(reason)
