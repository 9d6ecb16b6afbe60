"""Keeps connections with preprocessors, and has them look at media: the threads and the clock of `coordinator.places`.

It is the base of `FlightStore`: the part of FlexRL's Proxy Dataloader that dispatches (section 4). Each place has a
thread that keeps a connection with it, and some threads that ask it to look at media; callers that want the answers
wait.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from models.processing import MediaError
from models.processing.media import MediaSettings

from ..base.errors import DataError
from ..coordinator.places import Forget, GiveUp, Instruction, Lapsed, Look, Places
from ..data.flight_client import FlightPlace, PlaceLost, PlaceRefuses
from ..data.flight_wire import MOST_REFS, ref_words
from ..data.tickets import MediaRef, Ticket

Outcome: TypeAlias = Ticket | MediaError | DataError

_STREAMS = 4  # questions to look at media that a place has at a time
_GREETING = 10.0  # seconds that a place may take to answer the first question: it starts workers
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts to reach a place


def medium_key(ref: MediaRef) -> str:
    """Returns the key of a medium in `Places`: it names a version of the medium's file. The media settings are the same
    for all keys."""
    return json.dumps(ref_words(ref), ensure_ascii=False)


class _Want:
    """A medium that is to be looked at, for one or more callers."""

    def __init__(self) -> None:
        self.callers = 0
        self.outcome: Outcome | None = None


class PlaceSeat:
    """A place, connected or not. Guarded by the dispatcher's lock, which `changed` shares."""

    def __init__(self, name: str, address: str, lock: Any) -> None:
        self.name, self.address = name, address
        self.changed = threading.Condition(lock)
        self.link: FlightPlace | None = None  # while it is there
        self.queue: collections.deque[str] = collections.deque()  # keys that it is to be asked to look at
        self.reason = "it was not reached yet"  # why it is not there
        self.refused = ""  # why it never will be
        self.fetching = 0  # ranges that are asked for now
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds = 0.0  # that fetches took, added up

    def stats(self) -> dict[str, Any]:
        counts = {name: self.counts[name] for name in ("looks", "fetches", "bytes", "lost")}
        state = {"up": self.link is not None, "reason": self.reason, "queued": len(self.queue)}
        return {**state, **counts, "seconds": self.seconds}


class Dispatcher:
    """Has places look at media. `lock` guards the books, `places`, and the places by name, `seats`."""

    def __init__(
        self,
        settings: MediaSettings,
        token: str,
        lease_seconds: float,
        patience: float,
        silent: Callable[[str], object],
    ) -> None:
        self.settings, self._token = settings, token
        self._lease, self._patience, self._silent = lease_seconds, patience, silent
        self.lock = threading.RLock()
        self.places = Places(lease_seconds)
        self.seats: dict[str, PlaceSeat] = {}
        self._settled = threading.Condition(self.lock)  # a caller may have what it waits for
        self._wants: dict[str, _Want] = {}
        self._alone_since = time.monotonic()  # there was no place since then, if there is none
        self._failure = ""  # for which nothing goes on
        self._closed = False
        self._start(self._watch, name="flight-watch")

    def outcomes(self, refs: Sequence[MediaRef]) -> list[Outcome]:
        """Returns the outcome of looking at each of these media, in this order. Raises DataError where there are no
        places."""
        keys = [medium_key(ref) for ref in refs]
        with self.lock:
            wants: dict[str, _Want] = {}
            try:
                for key in keys:
                    if key not in wants:
                        wants[key] = self._want(key)
                for want in wants.values():
                    while want.outcome is None:
                        self.wait()
            finally:
                for key, want in wants.items():
                    self._leave(key, want)
        return [outcome for key in keys if (outcome := wants[key].outcome) is not None]

    def moved(self, place: str, address: str) -> None:
        """Notes the address of a place; the place may be new."""
        with self.lock:
            seat = self.seats.get(place)
            if seat is None:
                seat = self.seats[place] = PlaceSeat(place, address, self.lock)
                self._start(self._keep, seat, name=f"flight-keep-{place}")
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
        with self.lock:
            self._closed = True
            self._settled.notify_all()
            for seat in self.seats.values():
                seat.changed.notify_all()
                if seat.link is not None:
                    seat.link.close()

    # With the lock:

    def wait(self) -> None:
        """Waits until something may have changed. Raises what `check` raises."""
        self.check()
        self._settled.wait(0.5)

    def check(self) -> None:
        """Raises DataError if no work can go on: the dispatcher is closed or has failed, or no place can answer."""
        if self._closed:
            raise DataError("the media store is closed")
        if self._failure:
            raise DataError(self._failure)
        for seat in self.seats.values():
            if seat.refused:
                raise DataError(seat.refused)
        alone = time.monotonic() - self._alone_since
        if not self.places.living and alone > self._patience:
            reasons = "; ".join(f"{seat.name} at {seat.address}: {seat.reason}" for seat in self.seats.values())
            raise DataError(f"no preprocessor answers for {alone:.0f} s: {reasons or 'there are no addresses'}")

    def lose(self, seat: PlaceSeat, link: FlightPlace, reason: str) -> None:
        """Gives up the connection `link`, with which a caller had trouble; does nothing if the place has another one by
        now."""
        if seat.link is link:
            self._unlink(seat, reason)
            self._carry_out(self.places.place_lost(seat.name, time.monotonic()))

    def _want(self, key: str) -> _Want:
        want = self._wants.get(key)
        if want is None:
            want = self._wants[key] = _Want()
            self._carry_out(self.places.wanted(key, time.monotonic()))
        want.callers += 1
        return want

    def _leave(self, key: str, want: _Want) -> None:
        want.callers -= 1
        if not want.callers and self._wants.get(key) is want:  # without an answer
            del self._wants[key]
            self._carry_out(self.places.released(key, time.monotonic()))

    def _settle(self, key: str, outcome: Outcome) -> None:
        if (want := self._wants.pop(key, None)) is not None:
            want.outcome = outcome
            self._settled.notify_all()

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Look(key, place):
                    self.seats[place].queue.append(key)
                    self.seats[place].changed.notify_all()
                case Forget(key, place):
                    if key in (queue := self.seats[place].queue):
                        queue.remove(key)
                case GiveUp(key, reason):
                    self._settle(key, DataError(reason))
                case Lapsed(place):
                    self._unlink(self.seats[place], f"it did not answer for {self._lease:g} s")
                    self._start(self._silent, place, name="flight-silent")

    def _answer(self, seat: PlaceSeat, key: str, outcome: Outcome) -> None:
        now = time.monotonic()
        if isinstance(outcome, DataError):
            self._carry_out(self.places.failed(key, seat.name, now, str(outcome)))
            return
        seat.counts["looks"] += 1
        self._settle(key, outcome)
        self._carry_out(self.places.answered(key, seat.name, now, usable=isinstance(outcome, Ticket)))

    def _unlink(self, seat: PlaceSeat, reason: str) -> None:
        if seat.link is not None:
            seat.link.close()
        seat.link, seat.reason = None, reason
        seat.queue.clear()
        seat.counts["lost"] += 1
        seat.changed.notify_all()
        if not any(peer.link for peer in self.seats.values()):
            self._alone_since = time.monotonic()

    # Threads:

    def _start(self, work: Callable[..., object], *arguments: object, name: str) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except Exception as error:
                self.fail(f"{name} ended: {type(error).__name__}: {error}")

        threading.Thread(target=run, name=name, daemon=True).start()

    def _watch(self) -> None:
        """Ends leases that have run out."""
        with self.lock:
            while not self._closed:
                self._carry_out(self.places.tick(time.monotonic()))
                self._settled.wait_for(lambda: self._closed, min(1.0, self._lease / 8))

    def _keep(self, seat: PlaceSeat) -> None:
        """Keeps a connection with a place."""
        pause = _SHORTEST_PAUSE
        while True:
            with self.lock:
                seat.changed.wait_for(lambda: self._closed or (seat.link is None and not seat.refused))
                if self._closed:
                    return
                address = seat.address
            link, reason, refused = self._reached(address)
            with self.lock:
                if self._closed or seat.address != address:
                    if link is not None:
                        link.close()
                elif link is not None:
                    pause, seat.link, seat.reason = _SHORTEST_PAUSE, link, ""
                    for _ in range(_STREAMS):
                        self._start(self._carry, seat, link, name=f"flight-look-{seat.name}")
                    self._carry_out(self.places.place_joined(seat.name, time.monotonic()))
                    self._settled.notify_all()
                else:
                    seat.reason, seat.refused = reason, refused
                    self._settled.notify_all()
                    seat.changed.wait_for(lambda before=address: self._closed or seat.address != before, pause)
                    pause = min(_LONGEST_PAUSE, 2 * pause)

    def _reached(self, address: str) -> tuple[FlightPlace | None, str, str]:
        """Returns (a greeted connection or None, a reason that may pass, a reason that is final)."""
        link: FlightPlace | None = None
        try:
            link = FlightPlace(address, self.settings, self._token)
            link.register(min(self._lease, _GREETING))
            return link, "", ""
        except (PlaceLost, DataError) as error:
            if link is not None:
                link.close()
            refused = isinstance(error, PlaceRefuses)
            return None, "" if refused else str(error), str(error) if refused else ""

    def _carry(self, seat: PlaceSeat, link: FlightPlace) -> None:
        """Asks a place to look at the media queued for it, and handles its answers, as long as this connection
        lasts."""
        while True:
            with self.lock:
                seat.changed.wait_for(lambda: self._closed or seat.link is not link or seat.queue)
                if self._closed or seat.link is not link:
                    return
                # No more than it works on at a time: the rest may yet go elsewhere.
                most = min(MOST_REFS, -(-link.threads // _STREAMS))
                keys = [seat.queue.popleft() for _ in range(min(most, len(seat.queue)))]
            try:
                self._hear(seat, link, keys)
            except (PlaceLost, PlaceRefuses) as error:
                with self.lock:
                    if isinstance(error, PlaceRefuses):
                        seat.refused = str(error)
                    self.lose(seat, link, str(error))
                    self._settled.notify_all()

    def _hear(self, seat: PlaceSeat, link: FlightPlace, keys: Sequence[str]) -> None:
        unanswered = dict(enumerate(keys))
        refs = [MediaRef(*json.loads(key)) for key in keys]
        reason = f"the preprocessor at {link.address} did not say what it is"
        try:
            for index, outcome in link.look(refs, self._lease * (1 + len(refs))):
                with self.lock:
                    if (key := unanswered.pop(index, None)) is not None:
                        self._answer(seat, key, outcome)
        except PlaceRefuses:
            raise
        except DataError as error:
            reason = str(error)
        with self.lock:
            for key in unanswered.values():
                self._answer(seat, key, DataError(reason))


def named(addresses: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    """Returns addresses by the names of their places; where there are no names, the address is the name."""
    return addresses if isinstance(addresses, Mapping) else {address: address for address in addresses}
