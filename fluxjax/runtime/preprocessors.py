"""The preprocessors that a run starts on this host: their start, their end, another start when one has died. Then the
statistics of all preprocessors that the run uses."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rollout.listening import TOKEN
from rollout.local_server import LocalProcess

from ..base.errors import DataError
from ..base.statuses import PreprocessorStatus
from ..config.data import DataConfig
from ..data.flight_client import FlightPlace, PlaceLost
from ..data.local_store import StoreStats
from ..data.preprocessor_flags import flags_of
from .flight_store import FlightStore

_POLL_SECONDS = 2.0  # between two rounds
_MOST_SECONDS = 2.0  # that a preprocessor may take to say it
_LEVELS = {"memory_bytes", "spilled_bytes", "queue_depth", "busy_workers"}  # the other counts of a store only grow
_LOOK_SECONDS = 0.1
_LONGEST_PAUSE = 5.0  # seconds before a preprocessor that dies again and again is started once more


@runtime_checkable
class Listener(Protocol):
    """Is told what becomes of preprocessors, in a thread of `Preprocessors`; a `FlightStore` is one."""

    def moved(self, place: str, address: str) -> None: ...

    def fail(self, reason: str) -> None: ...


class _Preprocessor(LocalProcess):
    def __init__(
        self, name: str, host: str, words: Sequence[str], variables: Mapping[str, str], log: pathlib.Path
    ) -> None:
        super().__init__(log)
        self.name, self._words, self._variables = name, words, variables
        self._listen = f"[{host}]" if ":" in host else host
        self.address = ""  # once it has said so
        self.since = 0.0  # when it was started, or had its address
        self.deaths = 0  # in a row
        self.due: float | None = 0.0  # when it is to be started, if it is
        self._read = 0  # bytes of the log, up to which there is no address

    def start(self, now: float) -> None:
        """Starts the process, on its last port if it had one. Raises OSError."""
        # Other processes know it at the port that it had; at any, where that one could not be had.
        port = self.address.rpartition(":")[2] or "0"
        self.address, self.since, self.due = "", now, None
        self._read = self.log.stat().st_size if self.log.exists() else 0
        self.begin([*self._words, f"--listen={self._listen}:{port}"], self._variables)

    def announced(self) -> str:
        """Returns the address that the process has written to its log; empty if it has not yet."""
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
    `preprocessor-K.log` in `folder`. `addresses` has their addresses by the names of their places; `token` gives access
    to them.

    Blocks until all listen, on `host`. Raises DataError, with the end of the log, if one ends before, or does not
    listen after `start_seconds`. One that dies later is started again; one that dies more than `restarts` times in a
    row, each time within `steady_seconds`, ends the run: the listener's `fail` is called.
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
        settings = dataclasses.replace(data, workers=data.workers or max(1, cores // max(1, count)))
        words = [sys.executable, "-m", "fluxjax.preprocess", *flags_of(settings)]
        root = pathlib.Path(__file__).resolve().parents[2]
        paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
        variables = {**os.environ, TOKEN: self.token, "PYTHONPATH": paths}
        self._all = [
            _Preprocessor(
                f"{prefix}preprocessor-{number}", host, words, variables, folder / f"preprocessor-{number}.log"
            )
            for number in range(count)
        ]
        self._changed = threading.Condition()  # the lock of what follows
        self._listener: Listener | None = None
        self._failure = ""
        self._complete = False  # all have listened
        self._closing = threading.Event()
        # They end with the thread that starts them.
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
        """The process ids of those that run, by place."""
        running = ((process.name, process.running) for process in self._all)
        return {name: process.pid for name, process in running if process is not None}

    def tell(self, listener: Listener) -> None:
        """Tells this listener of the current addresses, and from now on of new addresses and of failure."""
        with self._changed:
            self._listener = listener
            for process in self._all:
                if process.address:
                    listener.moved(process.name, process.address)
            if self._failure:
                listener.fail(self._failure)

    def restart(self, place: str) -> None:
        """Kills a preprocessor that hangs; it is started again."""
        for process in self._all:
            if process.name == place:
                process.send(signal.SIGKILL)

    def close(self) -> None:
        """Ends all preprocessors. Blocks for a few seconds at most."""
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
                    if self._listener is not None:
                        self._listener.moved(process.name, address)
            elif now - process.since > self._start_seconds:
                self._bury(process, f"{process.name} does not listen after {self._start_seconds:g} s", now)

    def _bury(self, process: _Preprocessor, reason: str, now: float) -> None:
        process.kill()  # and what it has started
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
            if self._listener is not None:
                self._listener.fail(reason)


# --- statistics -----------------------------------------------------------------------------------


class PlaceCounts:
    """The statistics that a place has sent of its store. When the place is started anew, counts go on where they were;
    levels, such as a queue's depth, are those of its present life only."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()  # counts of its earlier lives
        self._newest: Counter[str] = Counter()

    def hear(self, said: StoreStats) -> None:
        """Takes in newly sent statistics. A count that has decreased shows that the place was started anew."""
        newest = Counter(dataclasses.asdict(said))
        if any(newest[name] < self._newest[name] for name in newest.keys() - _LEVELS):
            self.silent()
            self._ended += self._newest
        self._newest = newest

    def silent(self) -> None:
        """Sets the levels to 0: the place is not there now. It may come back as it was, or anew."""
        self._newest -= Counter({level: self._newest[level] for level in _LEVELS})

    @property
    def total(self) -> Counter[str]:
        return self._ended + self._newest

    @property
    def stats(self) -> StoreStats:
        return StoreStats(**self.total)


class PreprocessorWatch:
    """Asks all places of `store` for their statistics in turn from `start` to `close`, in one thread of its own: a slow
    or lost preprocessor delays nobody."""

    def __init__(self, store: FlightStore, seconds: float = _POLL_SECONDS) -> None:
        """Asks each place every `seconds` seconds."""
        self._store, self._seconds = store, seconds
        self._lock = threading.Lock()
        self._counts: dict[str, PlaceCounts] = {}  # by place
        self._asked = time.perf_counter()  # when one of them was, last
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; does nothing when called again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="preprocessor-watch", daemon=True)
            self._thread.start()

    def statuses(self) -> list[PreprocessorStatus]:
        """Returns the last known status of every preprocessor. May be called from any thread; never waits for a
        preprocessor."""
        with self._lock:
            said = {place: counts.stats for place, counts in self._counts.items()}
        return [
            _status(place, seen, said.get(place, StoreStats())) for place, seen in sorted(self._store.stats().items())
        ]

    def stats(self) -> tuple[StoreStats, float]:
        """Returns the sum of the statistics of all preprocessors, and when one was last asked, by
        `time.perf_counter`."""
        with self._lock:
            total = sum((counts.total for counts in self._counts.values()), Counter[str]())
            return StoreStats(**total), self._asked

    def close(self) -> None:
        """Ends the thread. Blocks for at most the time that one preprocessor may take to answer."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            for place, link in self._store.links().items():
                if self._closing.is_set():
                    return
                said = None if link is None else _said(link, self._store.settings.digest)
                with self._lock:
                    counts = self._counts.setdefault(place, PlaceCounts())
                    if said is None:
                        counts.silent()
                    else:
                        counts.hear(said)
                    self._asked = time.perf_counter()
            self._closing.wait(self._seconds)


def _said(link: FlightPlace, digest: str) -> StoreStats | None:
    """Returns the statistics of a preprocessor's store for the settings of this digest; None if it does not answer."""
    try:
        said = link.stats(_MOST_SECONDS).get(digest, {})
        return StoreStats(**{field.name: said.get(field.name, 0) for field in dataclasses.fields(StoreStats)})
    except (PlaceLost, DataError, TypeError):  # it is asked again soon; whoever needs it finds out what is wrong
        return None


def _status(place: str, seen: Mapping[str, Any], said: StoreStats) -> PreprocessorStatus:
    return PreprocessorStatus(
        place,
        up=seen["up"],
        looks=seen["looks"],
        bytes=seen["bytes"],
        queued=seen["queued"] + said.queue_depth,
        lost=seen["lost"],
        decoded=said.decoded_media,
        memory_bytes=said.memory_bytes,
        spilled_bytes=said.spilled_bytes,
        hits=said.hits,
        misses=said.misses,
        reason=seen["reason"],
    )
