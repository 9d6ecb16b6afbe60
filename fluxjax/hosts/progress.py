"""A watchdog for a process that is alive but makes no progress, as in a deadlock, which heartbeats do not notice."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from sharding.links import LinkError, Links

from ..base.timeline import compilations

HEAD_START = 5.0  # seconds by which the limit of process 0 is longer, because it waits for the other processes
_LOOK = 0.5  # seconds between two looks at the clock
_LONG = 3.0  # seconds after which a process tells the other processes that it compiles
_BEGUN, _ENDED = "progress/compiles", "progress/compiled"  # topics of `Links`


class Progress:
    """Ends all processes if this process is at the same piece of work for `limit` seconds (in process 0: `HEAD_START`
    seconds more). The clock restarts when a compilation of this process, or a long one of another process, ends."""

    def __init__(self, links: Links, limit: float) -> None:
        self._links, self._limit = links, limit + (0.0 if links.process else HEAD_START)
        self._compilations = compilations()
        self._work: tuple[float, Callable[[], str]] | None = None  # start and description of the present work
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="progress", daemon=True).start()

    def begin(self, what: Callable[[], str]) -> None:
        """Starts the clock for a piece of work. `what` returns a description of the work, for the error."""
        self._work = time.monotonic(), what

    def end(self) -> None:
        """Stops the clock. The wait for the next piece of work has no limit."""
        self._work = None

    @contextlib.contextmanager
    def of(self, what: Callable[[], str]) -> Iterator[None]:
        self.begin(what)
        yield
        self.end()

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        compiles_since, announced, moved = 0.0, False, 0.0
        with contextlib.suppress(LinkError):  # another process has failed, and all processes end
            while not self._ended.wait(_LOOK):
                now = time.monotonic()
                if not self._compilations.under_way:
                    compiles_since = now
                long = now > compiles_since + _LONG
                if long != announced:
                    announced = long
                    self._tell(_BEGUN if long else _ENDED)
                if self._compilations.under_way or self._links.counted(_BEGUN) > self._links.counted(_ENDED):
                    moved = now
                work = self._work
                if work is not None and now > max(work[0], moved) + self._limit:
                    self._links.fail(f"{self._links.name} has made no progress for {self._limit:g} s, at {work[1]()}")
                    return

    def _tell(self, topic: str) -> None:
        for peer in range(self._links.processes):
            if peer != self._links.process:
                self._links.notify(peer, topic)
