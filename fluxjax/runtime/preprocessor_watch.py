"""Asks preprocessors for their statistics, in a thread of its own: a slow or lost preprocessor delays nobody."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any

from ..base.errors import DataError
from ..base.preprocessor_status import PreprocessorStatus
from ..data.flight_client import FlightPlace, PlaceLost
from ..data.local_store import StoreStats
from .flight_store import FlightStore

_POLL_SECONDS = 2.0  # between two rounds
_MOST_SECONDS = 2.0  # that a preprocessor may take to say it
_LEVELS = ("memory_bytes", "spilled_bytes", "queue_depth", "busy_workers")  # the other counts of a store only grow


class PlaceCounts:
    """The statistics that a place has sent of its store. When the place is started anew, counts go on where they were;
    levels, such as a queue's depth, are those of its present life only."""

    def __init__(self) -> None:
        self._ended = StoreStats()  # of its earlier lives, added up
        self._newest = StoreStats()

    def hear(self, said: StoreStats) -> None:
        """Takes in newly sent statistics. A count that has decreased shows that the place was started anew."""
        if any(getattr(said, count) < getattr(self._newest, count) for count in _counts()):
            self._ended = self._total
        self._newest = said

    def silent(self) -> None:
        """Sets the levels to 0: the place is not there now. It may come back as it was, or anew."""
        self._newest = dataclasses.replace(self._newest, **dict.fromkeys(_LEVELS, 0))

    @property
    def stats(self) -> StoreStats:
        return dataclasses.replace(self._total, **{name: getattr(self._newest, name) for name in _LEVELS})

    @property
    def _total(self) -> StoreStats:
        return _sum(self._ended, self._newest, _counts())


class PreprocessorWatch:
    """Asks all places of `store` in turn from `start` to `close`, in one thread."""

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
        total = StoreStats()
        with self._lock:
            for counts in self._counts.values():
                total = _sum(total, counts.stats, (*_counts(), *_LEVELS))
            return total, self._asked

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
        return StoreStats(**{name: said[name] for name in (*_counts(), *_LEVELS) if name in said})
    except (PlaceLost, DataError, TypeError):  # it is asked again soon; whoever needs it finds out what is wrong
        return None


def _counts() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(StoreStats) if field.name not in _LEVELS)


def _sum(first: StoreStats, second: StoreStats, names: tuple[str, ...]) -> StoreStats:
    return StoreStats(**{name: getattr(first, name) + getattr(second, name) for name in names})


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
