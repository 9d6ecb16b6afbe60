"""A client's connection with one preprocessor: questions out, tickets and patches back, errors by their kind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import flight

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.shadow import Rows

from ..base.errors import DataError
from .flight_wire import (
    MOST_ANSWER,
    PROTOCOL,
    BadQuestion,
    UnknownSettings,
    error_of,
    patches_of,
    range_words,
    ref_words,
    told_error,
)
from .tickets import MediaRef, Ticket

Answer = TypeVar("Answer")
_OPTIONS = [
    ("grpc.max_receive_message_length", MOST_ANSWER),
    # Connections of a process share how long they wait before they try an address again: one that has come back would
    # not be tried for minutes.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class PlaceLost(Exception):
    """The preprocessor gives no answer, or none that can be used. The message says why."""


class PlaceRefuses(DataError):
    """The preprocessor answers, but will never serve this client: another token, another release."""


class FlightPlace:
    """The preprocessor at `address`, HOST:PORT, asked by these settings. Connects when it is first asked.

    Each question has its bound of `seconds`. Raises PlaceLost and PlaceRefuses, and DataError for what went wrong in
    the preprocessor. From any thread.
    """

    def __init__(self, address: str, settings: MediaSettings, token: str = "") -> None:
        self.address, self._settings = address, settings
        self.threads = 1  # in which it works, as it says when it is greeted
        self._headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        try:
            self._client = flight.FlightClient(f"grpc://{address}", generic_options=_OPTIONS)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise PlaceRefuses(f"{address!r} is no address of a preprocessor, HOST:PORT: {error}") from None

    def register(self, seconds: float) -> None:
        """Greets the preprocessor, and registers the media settings with it."""
        answer = self._ask("settings", {"protocol": PROTOCOL, "settings": self._settings.to_json()}, seconds)
        said = answer.get("protocol"), answer.get("digest")
        if said != (PROTOCOL, self._settings.digest):
            raise PlaceRefuses(
                f"the preprocessor at {self.address} speaks protocol {said[0]} and takes the settings for {said[1]}, "
                f"not {PROTOCOL} and {self._settings.digest}: start both from one release"
            )
        self.threads = max(1, int(answer.get("threads", 1)))

    def look(self, refs: Sequence[MediaRef], seconds: float) -> Iterator[tuple[int, Ticket | MediaError | DataError]]:
        """Yields (index of a medium, its ticket or the error) as the answers come, in any order, for as many as come.
        The error is a DataError where the preprocessor failed, whatever the medium is."""
        question = {"settings": self._settings.digest, "refs": [ref_words(ref) for ref in refs]}
        with self._translated():
            for result in self._registered(lambda: self._results("look", question, seconds), seconds):
                index, kind, word, reason = json.loads(result)
                if kind == "ticket":
                    yield index, Ticket.parse(word)
                    continue
                error = error_of(kind, word, reason)
                known = isinstance(error, MediaError | DataError)
                yield index, error if known else DataError(f"the preprocessor at {self.address}: {error}")

    def fetch(self, rows: Sequence[Rows], seconds: float) -> list[np.ndarray]:
        """The patches `[P, 3, n]` (uint8) of each of these rows, which are as few and as short as a question may have.
        Raises MediaError: StaleTicket for a file that has changed."""
        with self._translated():
            slices = list(self._registered(lambda: self._slices(rows, seconds), seconds))
            if [len(patches) for patches in slices] != [len(piece) for piece in rows]:
                raise ValueError(f"came as {[len(patches) for patches in slices]} rows, not {[len(r) for r in rows]}")
            return slices

    def stats(self, seconds: float) -> Mapping[str, Any]:
        """The counts of each store, by the digest of its settings."""
        return self._ask("stats", {}, seconds)

    def close(self) -> None:
        """Questions under way raise PlaceLost at their bound, if not before."""
        with contextlib.suppress(pa.ArrowException, OSError):
            self._client.close()

    def _ask(self, action: str, question: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        with self._translated():
            answer = json.loads(next(self._results(action, question, seconds)))
            if not isinstance(answer, dict):
                raise ValueError(f"answered {str(answer)[:100]}")
            return answer

    def _registered(self, ask: Callable[[], Iterator[Answer]], seconds: float) -> Iterator[Answer]:
        """Asks again where the preprocessor has forgotten the settings, which it says before it answers anything."""
        try:
            yield from ask()
            return
        except flight.FlightServerError as error:
            if not isinstance(told_error(error.extra_info), UnknownSettings):
                raise
        self.register(seconds)
        yield from ask()

    def _results(self, action: str, question: Mapping[str, Any], seconds: float) -> Iterator[bytes]:
        body = flight.Action(action, json.dumps(question).encode())
        for result in self._client.do_action(body, self._bounds(seconds)):
            yield result.body.to_pybytes()

    def _slices(self, rows: Sequence[Rows], seconds: float) -> Iterator[np.ndarray]:
        for chunk in self._client.do_get(flight.Ticket(range_words(rows)), self._bounds(seconds)):
            yield patches_of(chunk.data, self._settings.patch_bytes)

    def _bounds(self, seconds: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=seconds, headers=self._headers)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of Flight become those of this module."""
        try:
            yield
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError):
            raise PlaceRefuses(
                f"the preprocessor at {self.address} wants another token: FLUXJAX_TOKEN must be the same on both sides"
            ) from None
        except (pa.ArrowException, flight.FlightError, OSError, StopIteration) as error:
            told = told_error(getattr(error, "extra_info", b"") or b"")
            if isinstance(told, MediaError):
                raise told from None
            if isinstance(told, BadQuestion):
                raise PlaceRefuses(f"the preprocessor at {self.address} refuses: {told}") from None
            if isinstance(told, DataError):
                raise DataError(f"the preprocessor at {self.address}: {told}") from None
            line = (str(error).splitlines() or [""])[0][:300]
            raise PlaceLost(f"{type(error).__name__}: {line}") from None
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, MediaError | DataError):
                raise
            raise PlaceLost(f"gave an answer of another kind: {error}") from None
