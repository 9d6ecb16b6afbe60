"""The media store of a process whose media are decoded by preprocessors, on this host or others.

This is FlexRL's Proxy Dataloader and Materializer (section 4). A "place" is a preprocessor, a "question" a request to
it. Questions about a medium go to the place that holds the medium, or else to the least busy place. Any place can
answer: one without the medium decodes it first. If a place is lost, or does not answer in time, another one is asked.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.shadow import Rows

from ..base.errors import DataError
from ..base.statuses import MediumStage
from ..data.flight_client import FlightPlace, PlaceLost, PlaceRefuses
from ..data.flight_wire import MOST_BATCH, MOST_RANGES
from ..data.tickets import MediaRef, Ticket, normalised
from .places import Places, PlaceSeat, settle, started

_LOOKS = 8  # calls of `look` that callers should make at a time, for each place (`concurrency`)
_LOOKERS = 32  # the most threads that the store starts for the questions of these calls, for each place
_MOST_FETCHED = 256 << 20  # the most bytes that a question asks for
_ATTEMPTS = 4  # failures to look at a medium, the last of which is raised
_LOSSES = 8  # a question that finds its place lost or late this often raises the last error


class _Part(NamedTuple):
    """A range of a medium's rows, small enough for one question."""

    number: int  # among all parts of a fetch
    rows: Rows
    ref: MediaRef


class _Question(NamedTuple):
    seat: PlaceSeat
    link: FlightPlace
    parts: list[_Part]


class FlightStore(Places):
    """A `MediaStore` over preprocessors. Its parameters are those of `Places`."""

    def __init__(
        self, addresses: Mapping[str, str] | Sequence[str], settings: MediaSettings, token: str = "", **options: Any
    ) -> None:
        self._looks: dict[MediaRef, concurrent.futures.Future[Ticket | MediaError]] = {}  # open looks, by medium
        self._unasked: collections.deque[MediaRef] = collections.deque()  # media of open looks that no thread has taken
        self._lookers = 0  # threads that look
        super().__init__(addresses, settings, token, **options)

    @property
    def concurrency(self) -> int:
        """See `MediaStore`. Places have workers of their own; a thread that waits costs little."""
        with self.lock:
            return _LOOKS * max(len(self.seats), 1)

    def look(self, refs: Sequence[MediaRef]) -> list[Ticket | MediaError]:
        """Returns a ticket or an error for each of these media, in order. Raises DataError without a usable place."""
        with self.lock:
            looks = [self._looks.get(ref) or self._begin_look(ref) for ref in refs]
        return [self.result(look) for look in looks]

    def fetch(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Returns the patches `[P, X]` (float32) of these rows. Raises what `fetch_bytes` raises."""
        return normalised(self.settings, rows, self.fetch_bytes(rows))

    def fetch_bytes(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Returns the patches of these rows, `[P, 3, n]` (uint8), from the places that hold them; no caller may change
        the arrays. Raises MediaError (StaleTicket for a changed file), and DataError if no place can give the rows."""
        longest = max(1, MOST_BATCH // self.settings.patch_bytes)
        parts: list[_Part] = []
        numbers: list[range] = []  # the numbers of the parts of each of `rows`
        for piece in rows:
            ref = Ticket.parse(piece.ticket).ref
            starts = range(piece.start, piece.stop, longest)
            numbers.append(range(len(parts), len(parts) + len(starts)))
            for start in starts:
                part = Rows(piece.ticket, start, min(start + longest, piece.stop))
                parts.append(_Part(len(parts), part, ref))
        arrived = self._arrived(parts)
        nothing = np.zeros((0, 3, self.settings.patch_bytes // 3), np.uint8)
        return [
            arrived[some[0]] if len(some) == 1 else np.concatenate([nothing, *(arrived[number] for number in some)])
            for some in numbers
        ]

    # These methods need the lock:

    def _begin_look(self, ref: MediaRef) -> concurrent.futures.Future[Ticket | MediaError]:
        self._looks[ref] = concurrent.futures.Future()
        self._unasked.append(ref)
        if self._lookers < _LOOKERS * max(len(self.seats), 1):
            self._lookers += 1
            started(self._look_on, "flight-look")
        return self._looks[ref]

    def _questions(self, parts: Sequence[_Part], avoid: Sequence[PlaceSeat]) -> list[_Question]:
        """Waits until a place is connected."""
        questions: list[_Question] = []
        newest: dict[FlightPlace, tuple[_Question, int]] = {}  # the last question to each place, and its bytes
        for part in parts:
            seat, link = self.choose(part.ref, avoid)
            question, asked = newest.get(link, (_Question(seat, link, []), _MOST_FETCHED))
            size = len(part.rows) * self.settings.patch_bytes
            if len(question.parts) == MOST_RANGES or asked + size > _MOST_FETCHED:
                question, asked = _Question(seat, link, []), 0
                questions.append(question)
            question.parts.append(part)
            newest[link] = question, asked + size
        return questions

    # These methods are called without the lock:

    def _look_on(self) -> None:
        while True:
            with self.lock:
                if not self._unasked:
                    self._lookers -= 1
                    return
                ref = self._unasked.popleft()
                look = self._looks[ref]
            settle(look, lambda ref=ref: self._looked(ref))

    def _looked(self, ref: MediaRef) -> Ticket | MediaError:
        """Asks a place to look at a medium. If the place fails, is lost or is late, asks other places."""
        failed: list[PlaceSeat] = []
        lost: list[PlaceSeat] = []
        try:
            while True:
                with self.lock:
                    seat, link = self.choose(ref, failed + lost)
                    self.note(ref, seat, MediumStage.LOOKED_AT)
                try:
                    with self.asking(seat, link, 1) as seconds:
                        outcome = link.look(ref, seconds)
                except MediaError as error:
                    outcome = error
                except PlaceLost as error:
                    lost.append(seat)
                    if len(lost) == _LOSSES:
                        raise _lost_over(seat, link, error) from None
                    continue
                except PlaceRefuses:
                    raise
                except DataError:
                    failed.append(seat)
                    if len(failed) == _ATTEMPTS:
                        raise
                    continue
                with self.lock:
                    seat.counts["looks"] += 1
                    usable = isinstance(outcome, Ticket)
                    self.note(ref, seat, MediumStage.HELD if usable else MediumStage.UNUSABLE)
                return outcome
        finally:
            with self.lock:
                self._looks.pop(ref, None)

    def _arrived(self, parts: Sequence[_Part], lost: Sequence[PlaceSeat] = ()) -> dict[int, np.ndarray]:
        """Returns the patches of every part, by its number. Places are asked at the same time, one of them in this
        thread. The places in `lost`, which were lost when they were asked for these parts, are asked last."""
        with self.lock:
            questions = self._questions(parts, lost)
        asked = [started(lambda q=q: self._given(q, lost), "flight-fetch") for q in questions[1:]]
        arrived = self._given(questions[0], lost) if questions else {}
        for question in asked:
            arrived |= self.result(question)
        return arrived

    def _given(self, question: _Question, lost: Sequence[PlaceSeat]) -> dict[int, np.ndarray]:
        seat, link, parts = question
        try:
            with self.asking(seat, link, len(parts)) as seconds:
                slices = link.fetch([part.rows for part in parts], seconds)
        except PlaceLost as error:
            if len(lost) + 1 == _LOSSES:
                raise _lost_over(seat, link, error) from None
            return self._arrived(parts, [*lost, seat])
        with self.lock:
            seat.counts.update(fetches=len(slices), bytes=sum(patches.nbytes for patches in slices))
        return {part.number: patches for part, patches in zip(parts, slices, strict=True)}


def _lost_over(seat: PlaceSeat, link: FlightPlace, error: PlaceLost) -> DataError:
    last = f"{seat.name} at {link.address}: {error}"
    return DataError(
        f"preprocessors were lost or did not answer {_LOSSES} times over the same media; the last time: {last}"
    )
