"""The media store of a process whose media are decoded by preprocessors, on this host or others.

FlexRL's Materializer (section 4): it fetches slices from the places that hold them, several at once, in the thread that
asks and in a pool. Any place can give any slice; one that does not hold the medium decodes it, and holds it then.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.shadow import Rows

from ..base.errors import DataError
from ..coordinator.places import Transition
from ..data.flight_client import FlightPlace, PlaceLost
from ..data.flight_wire import MOST_BATCH, MOST_REFS
from ..data.tickets import MediaRef, Ticket
from .dispatcher import Dispatcher, PlaceSeat, medium_key, named

_MOST_FETCHED = 256 << 20  # bytes of a question
_FRUITLESS = 8  # times that a fetch loses its places, none of which has given anything, until it fails
_THREADS = 16  # that fetch, beside those that ask
_LOOKS = 8  # at a time, of each place
Become: TypeAlias = Callable[[str, np.ndarray], np.ndarray]  # of a medium's kind and its patches `[P, 3, n]` (uint8)


class _Part(NamedTuple):
    """A range of a medium's rows, small enough for one question."""

    rows: Rows
    kind: str  # of the medium
    key: str


class _Question(NamedTuple):
    seat: PlaceSeat
    link: FlightPlace
    numbers: list[int]  # of the parts that are asked for


class FlightStore(Dispatcher):
    """A `MediaStore` over the preprocessors at these addresses, HOST:PORT, by the names of their places (where there
    are no names, the address is the name).

    A place that does not answer for `lease_seconds` is lost: its questions go to other places, and it is used again
    when it answers again. `silent` is called with its name, in a thread of the store. DataError is raised if no place
    answers for `patience` seconds, and at once if a place refuses this client.
    """

    def __init__(
        self,
        addresses: Mapping[str, str] | Sequence[str],
        settings: MediaSettings,
        token: str = "",
        *,
        lease_seconds: float = 120.0,
        patience: float = 120.0,
        silent: Callable[[str], object] = lambda place: None,
    ) -> None:
        super().__init__(settings, token, lease_seconds, patience, silent)
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "flight-fetch")
        for place, address in named(addresses).items():
            self.moved(place, address)

    @property
    def concurrency(self) -> int:
        """See `MediaStore`. Places have workers of their own; a thread that waits costs little."""
        with self.lock:
            return _LOOKS * max(len(self.seats), 1)

    def look(self, refs: Sequence[MediaRef]) -> list[Ticket | MediaError]:
        """Returns a ticket or an error for each of these media, in this order. Raises DataError if no place can look at
        them."""
        outcomes: list[Ticket | MediaError] = []
        for outcome in self.outcomes(refs):
            if isinstance(outcome, DataError):
                raise outcome
            outcomes.append(outcome)
        return outcomes

    def fetch(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Returns the patches `[P, X]` (float32) of these rows, from the places that hold them. Raises MediaError,
        StaleTicket for a file that has changed; raises DataError if no place can give them."""
        return self._fetched(rows, self.settings.normalised)

    def fetch_bytes(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Returns the patches of these rows as they travel, `[P, 3, n]` (uint8), read-only. Raises what `fetch`
        raises."""
        return self._fetched(rows, lambda kind, patches: patches)

    def _fetched(self, rows: Sequence[Rows], become: Become) -> list[np.ndarray]:
        longest = max(1, MOST_BATCH // self.settings.patch_bytes)
        parts: list[_Part] = []
        numbers: list[list[int]] = []  # of the parts of each of these rows
        for piece in rows:
            ref = Ticket.parse(piece.ticket).ref
            starts = range(piece.start, piece.stop, longest)
            numbers.append(list(range(len(parts), len(parts) + len(starts))))
            ends = [min(start + longest, piece.stop) for start in starts]
            pieces = [Rows(piece.ticket, *ends_of) for ends_of in zip(starts, ends, strict=True)]
            parts += [_Part(part, ref.kind, medium_key(ref)) for part in pieces]
        arrived = self._arrived(parts, become)
        nothing = become("image", np.zeros((0, 3, self.settings.patch_bytes // 3), np.uint8))
        return [
            arrived[some[0]] if len(some) == 1 else np.concatenate([nothing, *(arrived[number] for number in some)])
            for some in numbers
        ]

    def hint(self, ticket: str, place: str) -> None:
        """Notes that this place holds the medium of this ticket, as another process says."""
        with self.lock:
            self.places.hold(medium_key(Ticket.parse(ticket).ref), place)

    def holder(self, ticket: str) -> str:
        """Returns the place that holds the medium of this ticket, for a `hint` elsewhere; empty if none is known."""
        with self.lock:
            return self.places.holder(medium_key(Ticket.parse(ticket).ref))

    def stats(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics of each place, by name: `up`, the number of `looks` that it answered, `fetches`
        (ranges), their `bytes` and `seconds`, how often it was `lost`, the `reason` why it is not connected, and how
        many media are `queued` for it here."""
        with self.lock:
            return {name: seat.stats() for name, seat in self.seats.items()}

    def links(self) -> dict[str, FlightPlace | None]:
        """Returns the connection with each place, by name; None if there is none. A connection may end at any time."""
        with self.lock:
            return {name: seat.link for name, seat in self.seats.items()}

    def history(self) -> list[Transition]:
        """Returns the last transitions of media and places, with times by `time.monotonic`."""
        with self.lock:
            return self.places.history()

    def close(self) -> None:
        """Ends threads and connections; the preprocessors stay. Callers that still wait get a DataError."""
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _arrived(self, parts: Sequence[_Part], become: Become) -> dict[int, np.ndarray]:
        """Returns the converted patches of every part, by its number; parts of a lost place are asked of others."""
        arrived: dict[int, np.ndarray] = {}
        fruitless = 0
        while len(arrived) < len(parts):
            before, reason = len(arrived), ""
            questions = self._questions(parts, [number for number in range(len(parts)) if number not in arrived])
            for question, answer in zip(questions, self._answers(parts, questions, become), strict=True):
                if isinstance(answer, PlaceLost):
                    reason = f"{question.seat.name} at {question.link.address}: {answer}"
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    arrived.update(zip(question.numbers, answer, strict=True))
            fruitless = fruitless + 1 if len(arrived) == before else 0
            if fruitless == _FRUITLESS:
                raise DataError(f"preprocessors were lost {fruitless} times over the same slices; the last, {reason}")
        return arrived

    def _questions(self, parts: Sequence[_Part], numbers: Sequence[int]) -> list[_Question]:
        """Returns questions that together ask for these parts. Waits until there is a place."""
        with self.lock:
            self.check()
            while not self.places.living:
                self.wait()
            seats = self.seats
            questions: list[_Question] = []
            newest: dict[str, tuple[_Question, int]] = {}  # the last question to each place, and its bytes
            for number in numbers:
                part, busy = parts[number], {name: seat.fetching for name, seat in seats.items()}
                place, size = self.places.nearest(part.key, busy), len(part.rows) * self.settings.patch_bytes
                self.places.hold(part.key, place)  # it will
                question, asked = newest.get(place, (None, 0))
                if question is None or len(question.numbers) == MOST_REFS or asked + size > _MOST_FETCHED:
                    link = seats[place].link
                    assert link is not None  # of those that live
                    question, asked = _Question(seats[place], link, []), 0
                    questions.append(question)
                question.numbers.append(number)
                newest[place] = question, asked + size
                question.seat.fetching += 1
            return questions

    def _answers(
        self, parts: Sequence[_Part], questions: Sequence[_Question], become: Become
    ) -> list[list[np.ndarray] | Exception]:
        try:
            futures = [self._pool.submit(self._ask, parts, question, become) for question in questions[1:]]
            return [self._ask(parts, questions[0], become), *(future.result() for future in futures)]
        except (RuntimeError, concurrent.futures.CancelledError):  # of a pool that is shut down
            with self.lock:
                self.check()
            raise

    def _ask(self, parts: Sequence[_Part], question: _Question, become: Become) -> list[np.ndarray] | Exception:
        """Asks one question. Returns the converted patches of each of its parts, or the error."""
        asked = [parts[number] for number in question.numbers]
        seat, begin = question.seat, time.perf_counter()
        slices: Sequence[np.ndarray] = ()
        try:
            slices = question.link.fetch([part.rows for part in asked], self._lease)
        except PlaceLost as error:
            with self.lock:
                self.lose(seat, question.link, str(error))
            return error
        except (MediaError, DataError) as error:
            return error
        finally:
            with self.lock:
                seat.fetching -= len(asked)
                seat.counts.update(fetches=len(slices), bytes=sum(patches.nbytes for patches in slices))
                seat.seconds += time.perf_counter() - begin
        return [become(part.kind, patches) for part, patches in zip(asked, slices, strict=True)]
