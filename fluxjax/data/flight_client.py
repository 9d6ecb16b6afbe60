"""A client's connection with one preprocessor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.shadow import Rows

from ..base.errors import DataError
from .flight_wire import MOST_ANSWER, PROTOCOL, BadQuestion, patches_of, told_error
from .tickets import MediaRef, Ticket

_OPTIONS = [
    ("grpc.max_receive_message_length", MOST_ANSWER),
    # Without this option, all connections of a process share one retry delay, and a restarted preprocessor is not tried
    # for minutes.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class PlaceLost(Exception):
    """The preprocessor gives no usable answer. The message says why."""


class PlaceSilent(PlaceLost):
    """The preprocessor has not answered within the bound."""


class PlaceRefuses(DataError):
    """The preprocessor will not serve this client: the token, the release, the settings or the address is wrong."""


class FlightPlace:
    """The preprocessor at `address` (HOST:PORT). Each request carries `settings`; the first request connects. A method
    raises PlaceSilent if its request is not answered within `seconds`. The methods may be called from any thread. They
    raise PlaceLost, PlaceRefuses, and DataError for a failure within the preprocessor."""

    def __init__(self, address: str, settings: MediaSettings, token: str = "") -> None:
        self.address, self._settings = address, settings
        self.threads = 1  # threads of the preprocessor; `greet` gets the number
        self.working = 0  # requests of media and ranges under way; the caller counts them
        self.heard = 0.0  # `time.monotonic` of the preprocessor's last answer, batch or error
        self._headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        try:
            self._client = flight.FlightClient(f"grpc://{address}", generic_options=_OPTIONS)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise PlaceRefuses(f"{address!r} is no address of a preprocessor, HOST:PORT: {error}") from None

    def greet(self, seconds: float) -> None:
        """Compares protocol and media settings with the preprocessor's, and gets its number of threads."""
        answer = self._ask("settings", seconds, protocol=PROTOCOL)
        said = answer.get("protocol"), answer.get("digest")
        if said != (PROTOCOL, self._settings.digest):
            raise PlaceRefuses(
                f"the preprocessor at {self.address} has protocol {said[0]} and reads the media settings as {said[1]}, "
                f"this run has {PROTOCOL} and {self._settings.digest}: start both from one release"
            )
        self.threads = max(1, threads) if isinstance(threads := answer.get("threads"), int) else 1

    def look(self, ref: MediaRef, seconds: float) -> Ticket:
        """Asks for the ticket of a medium. Raises MediaError if the medium can't be used."""
        with self._translated():
            return Ticket.parse(self._ask("look", seconds, ref=dataclasses.astuple(ref))["ticket"])

    def fetch(self, rows: Sequence[Rows], seconds: float) -> list[np.ndarray]:
        """Returns the patches `[P, 3, n]` (uint8) of each of `rows`. The rows must respect `MOST_RANGES` and
        `MOST_BATCH`. Raises MediaError for media that can't be used, and StaleTicket for a file that has changed."""
        question = flight.Ticket(self._question(ranges=[dataclasses.astuple(piece) for piece in rows]))
        with self._translated():
            chunks = self._client.do_get(question, self._bounds(seconds))
            slices = []
            for chunk in chunks:
                self.heard = time.monotonic()
                slices.append(patches_of(chunk.data, self._settings.patch_bytes))
            if [len(patches) for patches in slices] != [len(piece) for piece in rows]:
                raise ValueError(
                    f"batches of {[len(patches) for patches in slices]} rows came, not {[len(r) for r in rows]}"
                )
            return slices

    def stats(self, seconds: float) -> Mapping[str, Any]:
        """Returns the counts of the preprocessor's store."""
        return self._ask("stats", seconds)

    def close(self) -> None:
        """Closes the connection. Requests under way raise PlaceLost."""
        with contextlib.suppress(pa.ArrowException, OSError):
            self._client.close()

    def _question(self, **fields: object) -> bytes:
        return json.dumps({"settings": self._settings.to_json(), **fields}).encode()

    def _ask(self, action: str, seconds: float, **fields: object) -> Mapping[str, Any]:
        with self._translated():
            body = flight.Action(action, self._question(**fields))
            answer = json.loads(next(self._client.do_action(body, self._bounds(seconds))).body.to_pybytes())
            self.heard = time.monotonic()
            if not isinstance(answer, dict):
                raise ValueError(f"answered {str(answer)[:100]}")
            return answer

    def _bounds(self, seconds: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=seconds, headers=self._headers)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError):
            raise PlaceRefuses(
                f"the preprocessor at {self.address} wants another token: FLUXJAX_TOKEN must be the same on both sides"
            ) from None
        except (pa.ArrowException, flight.FlightError, OSError, StopIteration) as error:
            told = told_error(getattr(error, "extra_info", b"") or b"")
            self.heard = self.heard if told is None else time.monotonic()
            if isinstance(told, MediaError):
                raise told from None
            if isinstance(told, BadQuestion):
                raise PlaceRefuses(f"the preprocessor at {self.address} refuses: {told}") from None
            if isinstance(told, DataError):
                raise DataError(f"the preprocessor at {self.address}: {told}") from None
            lost = PlaceSilent if isinstance(error, flight.FlightTimedOutError) else PlaceLost
            line = (str(error).splitlines() or [""])[0][:300]
            raise lost(f"{type(error).__name__}: {line}") from None
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, MediaError | DataError):
                raise
            raise PlaceLost(f"gave an answer that can't be read: {error}") from None
