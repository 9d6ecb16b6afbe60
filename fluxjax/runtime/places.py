"""Keeps connections with preprocessors, called places: chooses a place for each medium, gives up connections that fail,
and asks places for their statistics."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from models.processing.media import MediaSettings

from ..base.errors import DataError
from ..base.statuses import MediumStage, PreprocessorStatus, Transition
from ..data.flight_client import FlightPlace, PlaceLost, PlaceRefuses, PlaceSilent
from ..data.local_store import StoreStats
from ..data.media_cache import Recent
from ..data.tickets import MediaRef, Ticket

_HELD = 1 << 16  # the most media whose holders are remembered
_HISTORY = 1 << 14  # transitions that are remembered
_GREETING = 10.0  # seconds that a place may take to start workers and answer the first question
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts to reach a place
_STATS_SECONDS = 2.0  # seconds that a place may take to send its statistics
_ROUNDS = 2  # media and ranges that a place is asked for at a time, for each of its threads
_LEVELS = {"memory_bytes", "queue_depth", "busy_workers"}  # the other counts of a store only grow
Answer = TypeVar("Answer")


class PlaceCounts:
    """The statistics that a place has sent of its store. When the place is started anew, counts go on where they were.
    A level, such as a queue's depth, is that of the last answer only."""

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
        """Sets the levels to 0, since the place does not answer. Its counts stay."""
        self._newest -= Counter({level: self._newest[level] for level in _LEVELS})

    @property
    def total(self) -> Counter[str]:
        return self._ended + self._newest


class PlaceSeat:
    """A place, connected or not. Guarded by the lock of `Places`, which `changed` shares."""

    def __init__(self, name: str, address: str, lock: Any) -> None:
        self.name, self.address = name, address
        self.changed = threading.Condition(lock)
        self.link: FlightPlace | None = None  # None: not connected
        self.reason = "it was not reached yet"  # why there is no connection
        self.refused = ""  # the reason why the place refuses this client, or empty
        self.busy = self.asked = 0  # media and ranges that the place was asked for: without an answer yet, and in all
        self.counts: Counter[str] = Counter()  # looks, fetches, bytes, lost
        self.said = PlaceCounts()

    def status(self) -> PreprocessorStatus:
        said = StoreStats(**self.said.total)
        return PreprocessorStatus(
            self.name,
            up=self.link is not None,
            looks=self.counts["looks"],
            bytes=self.counts["bytes"],
            queued=said.queue_depth,
            lost=self.counts["lost"],
            decoded=said.decoded_media,
            memory_bytes=said.memory_bytes,
            hits=said.hits,
            misses=said.misses,
            reason=self.reason,
        )


class Places:
    """The places at these addresses, HOST:PORT, by name (if `addresses` has no names, each address is a name).

    A place may take `lease_seconds` for a medium, and longer if other media are before it. A late place is lost if it
    sent nothing at all, not even statistics, for `lease_seconds`; `silent` is then called with its name. A lost place
    is used again when it answers again. Methods raise DataError if no place answers for `patience` seconds, and at once
    if a place refuses this client. Each place is asked for its statistics every `stats_seconds`, and at least four
    times in `lease_seconds`. `lock` guards `seats`, the places by name.
    """

    def __init__(
        self,
        addresses: Mapping[str, str] | Sequence[str],
        settings: MediaSettings,
        token: str = "",
        *,
        lease_seconds: float = 120.0,
        patience: float = 120.0,
        stats_seconds: float = 2.0,
        silent: Callable[[str], object] = lambda place: None,
    ) -> None:
        self.settings, self._token = settings, token
        self._lease, self._patience, self._stats_seconds = lease_seconds, patience, stats_seconds
        self._silent = silent
        self.lock = threading.RLock()
        self.seats: dict[str, PlaceSeat] = {}
        self.known = time.perf_counter()  # when a place was last asked for its statistics
        self._settled = threading.Condition(self.lock)  # notified after each attempt to reach a place, and at the end
        self._holders = Recent[tuple[PlaceSeat, FlightPlace]](_HELD)  # valid as long as the place has this connection
        self._history: collections.deque[Transition] = collections.deque(maxlen=_HISTORY)
        self._alone_since = time.monotonic()  # when the last remaining connection was lost
        self._failure = ""  # the reason why all work has ended, or empty
        self._closed = False
        named = addresses if isinstance(addresses, Mapping) else {address: address for address in addresses}
        for place, address in named.items():
            self.moved(place, address)

    def hint(self, ticket: str, place: str) -> None:
        """Notes that this place holds the medium of this ticket, as another process says."""
        with self.lock:
            if (seat := self.seats.get(place)) is not None and seat.link is not None:
                self._holders.put(Ticket.parse(ticket).ref, (seat, seat.link))

    def holder(self, ticket: str) -> str:
        """Returns the name of the place that holds this ticket's medium, for a `hint` in another process, or ""."""
        with self.lock:
            seat = self._holder(Ticket.parse(ticket).ref)
            return "" if seat is None else seat.name

    def statuses(self) -> list[PreprocessorStatus]:
        """Returns the last known status of every place, by name; never waits for a place."""
        with self.lock:
            return [seat.status() for _, seat in sorted(self.seats.items())]

    def stats(self) -> StoreStats:
        """Returns the sum of the statistics of all places, as they were last known."""
        with self.lock:
            return StoreStats(**sum((seat.said.total for seat in self.seats.values()), Counter[str]()))

    def history(self) -> list[Transition]:
        """Returns the last transitions of media and places, oldest first, with times by `time.monotonic`."""
        with self.lock:
            return list(self._history)

    def moved(self, place: str, address: str) -> None:
        """Notes the address of a place; the place may be new."""
        with self.lock:
            seat = self.seats.get(place)
            if seat is None:
                seat = self.seats[place] = PlaceSeat(place, address, self.lock)
                keeping = started(lambda: self._keep(seat), f"flight-keep-{place}")
                keeping.add_done_callback(lambda ended: self._kept(seat, ended))
                return
            seat.address, seat.refused = address, ""
            if seat.link is not None:
                self.lose(seat, seat.link, "it has moved")
            seat.changed.notify_all()

    def fail(self, reason: str) -> None:
        """Ends all work for this reason: every caller gets a DataError."""
        with self.lock:
            self._failure = self._failure or reason
            self._settled.notify_all()

    def close(self) -> None:
        """Ends threads and connections; the preprocessors run on. Callers that still wait get a DataError."""
        with self.lock:
            self._closed = True
            self._settled.notify_all()
            for seat in self.seats.values():
                seat.changed.notify_all()
                if seat.link is not None:
                    seat.link.close()

    # These methods need the lock:

    def lose(self, seat: PlaceSeat, link: FlightPlace, reason: str) -> bool:
        """Gives up the connection `link`, which failed. Returns False, and does nothing, if the place has another."""
        if seat.link is not link:
            return False
        link.close()
        seat.link, seat.reason = None, reason
        seat.counts["lost"] += 1
        seat.said.silent()
        self.note("", seat, MediumStage.LOST)
        if not any(peer.link for peer in self.seats.values()):
            self._alone_since = time.monotonic()
        seat.changed.notify_all()
        return True

    def check(self) -> None:
        """Raises DataError if the store is closed or failed, a place refuses, or none is connected for `patience` s."""
        if self._closed:
            raise DataError("the media store is closed")
        if self._failure:
            raise DataError(self._failure)
        for seat in self.seats.values():
            if seat.refused:
                raise DataError(seat.refused)
        alone = time.monotonic() - self._alone_since
        if alone > self._patience and not any(seat.link for seat in self.seats.values()):
            reasons = "; ".join(f"{seat.name} at {seat.address}: {seat.reason}" for seat in self.seats.values())
            raise DataError(f"no preprocessor answers for {alone:.0f} s: {reasons or 'there are no addresses'}")

    def _holder(self, ref: MediaRef) -> PlaceSeat | None:
        seat, link = self._holders.get(ref) or (None, None)
        return seat if seat is not None and seat.link is link else None

    def choose(self, ref: MediaRef, avoid: Sequence[PlaceSeat] = ()) -> tuple[PlaceSeat, FlightPlace]:
        """Returns the place to ask for a medium, with its connection, and counts the question. Waits until a place is
        connected. Chooses among the places that are least often in `avoid`. Raises what `check` raises."""
        while True:
            self.check()
            there = [seat for seat in self.seats.values() if seat.link is not None]
            if there:
                break
            self._settled.wait(0.5)
        least = min(map(avoid.count, there))
        there = [seat for seat in there if avoid.count(seat) == least]
        seat = self._holder(ref)
        if seat not in there:
            seat = min(there, key=lambda seat: (seat.busy, seat.asked))
        assert seat is not None and seat.link is not None
        self._holders.put(ref, (seat, seat.link))  # the place will hold the medium
        seat.busy, seat.asked = seat.busy + 1, seat.asked + 1
        return seat, seat.link

    def note(self, key: MediaRef | str, seat: PlaceSeat, stage: MediumStage) -> None:
        self._history.append(Transition(key, seat.name, stage, time.monotonic()))

    # These methods are called without the lock:

    def result(self, work: concurrent.futures.Future[Answer]) -> Answer:
        while not concurrent.futures.wait([work], 0.5).done:
            with self.lock:
                self.check()
        return work.result()

    @contextlib.contextmanager
    def asking(self, seat: PlaceSeat, link: FlightPlace, count: int) -> Iterator[float]:
        """Waits until a place has room for a question about `count` media or ranges, then yields the seconds that the
        place may take. Counts the question as open until the block ends. Gives up a connection that fails."""
        given = 0
        try:
            with self.lock:
                while seat.link is link and link.working >= _ROUNDS * link.threads:
                    self.check()
                    seat.changed.wait(0.5)
                if seat.link is not link:
                    raise PlaceLost("it was lost before it was asked")
                given = count
                link.working += given
                seconds = self._lease * math.ceil(link.working / link.threads)
            yield seconds
        except PlaceSilent:
            with self.lock:  # a place that sends anything is at work
                lapsed = time.monotonic() - link.heard >= self._lease
                lapsed = lapsed and self.lose(seat, link, f"it did not answer for {self._lease:g} s")
            if lapsed:
                self._silent(seat.name)
            raise
        except (PlaceLost, PlaceRefuses) as error:
            with self.lock:
                if isinstance(error, PlaceRefuses):
                    seat.refused = str(error)
                self.lose(seat, link, str(error))
            raise
        finally:
            with self.lock:
                seat.busy -= count
                link.working -= given
                seat.changed.notify_all()

    def _keep(self, seat: PlaceSeat) -> None:
        pause = _SHORTEST_PAUSE
        while True:
            with self.lock:
                if self._closed:
                    return
                link, address, refused = seat.link, seat.address, seat.refused
            if link is not None:
                said = self._said(link)
                with self.lock:
                    self.known = time.perf_counter()
                    if said is None:
                        seat.said.silent()
                    else:
                        seat.said.hear(said)
            elif not refused:
                self._reach(seat, address)
            with self.lock:
                connected, now = seat.link is not None, (seat.link, seat.address)
                pause = _SHORTEST_PAUSE if connected else min(_LONGEST_PAUSE, 2 * pause)
                seat.changed.wait_for(
                    lambda now=now: self._closed or (seat.link, seat.address) != now,
                    min(self._stats_seconds, self._lease / 4) if connected else pause,
                )

    def _kept(self, seat: PlaceSeat, ended: concurrent.futures.Future[None]) -> None:
        if (error := ended.exception()) is not None:
            self.fail(f"the connection with {seat.name} can't be kept any more: {type(error).__name__}: {error}")

    def _reach(self, seat: PlaceSeat, address: str) -> None:
        link: FlightPlace | None = None
        reason, refused = "", ""
        try:
            link = FlightPlace(address, self.settings, self._token)
            link.greet(min(self._lease, _GREETING))
        except PlaceRefuses as error:
            refused = str(error)
        except (PlaceLost, DataError) as error:
            reason = str(error)
        with self.lock:
            usable = not (reason or refused or self._closed or seat.address != address)
            if link is not None and not usable:
                link.close()
            if seat.address == address:
                seat.link, seat.reason, seat.refused = link if usable else None, reason, refused
            self._settled.notify_all()

    def _said(self, link: FlightPlace) -> StoreStats | None:
        try:
            said = link.stats(_STATS_SECONDS)
            return StoreStats(**{field.name: said.get(field.name, 0) for field in dataclasses.fields(StoreStats)})
        except (PlaceLost, DataError, TypeError):  # the next question to the place shows what is wrong
            return None


def started(work: Callable[[], Answer], name: str) -> concurrent.futures.Future[Answer]:
    """Starts a daemon thread for the work. A daemon thread, unlike a pool's threads, lets the process end."""
    future: concurrent.futures.Future[Answer] = concurrent.futures.Future()
    threading.Thread(target=settle, args=(future, work), name=name, daemon=True).start()
    return future


def settle(future: concurrent.futures.Future[Answer], work: Callable[[], Answer]) -> None:
    """Does the work, in this thread, and gives its result or its error to the future."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
