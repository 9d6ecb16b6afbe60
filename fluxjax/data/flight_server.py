"""The Arrow Flight server of a preprocessor, which measures media and hands out requested slices of their patches.

The server is FlexRL's Local Preprocessor (section 4). It serves the media settings of its first client only. Without a
token, everybody who can connect may read all images and videos of this machine. This server can refuse a client's
question only after gRPC has received up to 2 GiB of it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hmac
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa
from pyarrow import flight

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.shadow import Rows

from .flight_wire import (
    MOST_BATCH,
    PROTOCOL,
    BadQuestion,
    batch_of,
    patch_schema,
    read_object,
    read_ranges,
    read_ref,
    refusal,
)
from .tickets import MediaRef, Ticket


@runtime_checkable
class SliceStore(Protocol):
    """Turns media into patches in this process. The methods block, and are called from any thread."""

    def look(self, refs: Sequence[MediaRef]) -> list[Ticket | MediaError]: ...

    def fetch_bytes(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Returns an array of patches `[P, 3, n]` (uint8) for each of `rows`. Raises MediaError."""
        ...

    def stats(self) -> Any:
        """Returns the store's counts, as a dataclass."""
        ...

    def close(self) -> None: ...


MakeStore: TypeAlias = Callable[[MediaSettings], SliceStore]


class _Served(NamedTuple):
    settings: MediaSettings
    store: SliceStore


class _Token(flight.ServerMiddlewareFactory):
    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[str | bytes]]) -> None:
        given = (headers.get("authorization") or [""])[0]
        given = given.encode(errors="replace") if isinstance(given, str) else given
        if not hmac.compare_digest(given, self._wanted):
            raise flight.FlightUnauthenticatedError("authorization must be Bearer TOKEN, with the token of this server")


class FlightServer(flight.FlightServerBase):
    """Serves the store that `make_store` makes for the first client. The work of all clients runs in `threads` threads.
    Raises OSError if the server can't listen on `host:port`."""

    def __init__(self, make_store: MakeStore, host: str, port: int, *, token: str = "", threads: int = 8) -> None:
        self._make_store = make_store
        self._served: _Served | None = None
        self._lock = threading.Lock()  # held while the store is made
        self._threads = threads
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "flight-work")
        self._work: set[concurrent.futures.Future[Any]] = set()  # work that waits for a thread or runs
        self.address = f"[{host}]" if ":" in host else host
        guard = {"token": _Token(token)} if token else None
        try:
            super().__init__(f"grpc://{self.address}:{port}", middleware=guard)
        except pa.ArrowException as error:
            raise OSError(f"{self.address}:{port} can't be listened on: {error}") from None
        self.address += f":{self.port}"

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        actions = {"settings": self._greet, "look": lambda asked: self._look(asked, context), "stats": self._stats}
        try:
            if action.type not in actions:
                raise BadQuestion(f"there is no action {action.type[:100]!r}")
            answer = actions[action.type](read_object(memoryview(action.body)))
            yield flight.Result(pa.py_buffer(json.dumps(answer).encode()))
        except Exception as error:
            raise refusal(error) from error

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        try:
            question = read_object(ticket.ticket)
            ranges = read_ranges(question.get("ranges"))
            served = self._of(question)
            for rows in ranges:
                _check_range(rows, served.settings)
            return flight.GeneratorStream(patch_schema(served.settings.patch_bytes), self._slices(served.store, ranges))
        except Exception as error:
            raise refusal(error) from error

    def close(self, seconds: float = 5.0) -> None:
        """Ends the server and the store. Calls under way have `seconds` to end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        ending = threading.Thread(target=self.shutdown, name="flight-shutdown", daemon=True)
        ending.start()
        ending.join(seconds)
        with self._lock:
            served, self._served = self._served, None
        if served is not None:
            served.store.close()

    def _greet(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        if question.get("protocol") != PROTOCOL:
            raise BadQuestion(
                f"the client speaks protocol {question.get('protocol')!r}, this preprocessor {PROTOCOL}: "
                "start both from one release"
            )
        return {"protocol": PROTOCOL, "digest": self._of(question).settings.digest, "threads": self._threads}

    def _of(self, question: Mapping[str, Any]) -> _Served:
        """Returns the settings in a question, and their store, which the first question makes. Raises BadQuestion."""
        try:
            settings = MediaSettings.from_json(question["settings"])
            settings.digest  # noqa: B018  (raises for values without a digest)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadQuestion(f"the media settings of the question are not settings of this release: {error}") from None
        with self._lock:
            if self._served is None:
                self._served = _Served(settings, self._make_store(settings))
            elif self._served.settings.digest != settings.digest:
                raise BadQuestion("this preprocessor serves a run with other media settings")
            return self._served

    def _look(self, question: Mapping[str, Any], context: flight.ServerCallContext) -> Mapping[str, Any]:
        ref, store = read_ref(question.get("ref")), self._of(question).store
        # A client that is gone may have asked again, so its old question is skipped.
        outcome = self._submitted(lambda: None if context.is_cancelled() else store.look([ref])[0]).result()
        if isinstance(outcome, MediaError):
            raise outcome
        return {"ticket": str(outcome)}

    def _slices(self, store: SliceStore, ranges: Sequence[Rows]) -> Iterator[pa.RecordBatch]:
        try:
            futures = [self._submitted(store.fetch_bytes, [rows]) for rows in ranges]
            try:
                for future in futures:
                    yield batch_of(future.result()[0])
            finally:
                for future in futures:
                    future.cancel()
        except Exception as error:
            raise refusal(error) from error

    def _stats(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        served = self._served
        said = dataclasses.asdict(served.store.stats()) if served else {}
        waiting = sum(not work.running() for work in self._work.copy())
        return {**said, "queue_depth": said.get("queue_depth", 0) + waiting}

    def _submitted(self, work: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
        future = self._pool.submit(work, *arguments)
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        return future


def _check_range(rows: Rows, settings: MediaSettings) -> None:
    """Raises BadQuestion unless the rows lie in a ticket of these settings and have at most `MOST_BATCH` bytes."""
    try:
        ticket = Ticket.parse(rows.ticket)
    except (ValueError, TypeError) as error:
        raise BadQuestion(str(error)) from None
    if not all(type(size) is int and 0 < size < 2**31 for size in ticket.medium.grid):
        raise BadQuestion(f"{rows.ticket[:200]!r} is no ticket: its grid is {ticket.medium.grid}")
    if ticket.settings != settings.digest:
        raise BadQuestion("the ticket has other media settings than the question")
    if rows.stop > ticket.num_patches:
        raise BadQuestion(f"rows {rows.start} to {rows.stop} were asked for, but the medium has {ticket.num_patches}")
    if len(rows) * settings.patch_bytes > MOST_BATCH:
        raise BadQuestion(f"a range has at most {MOST_BATCH} bytes, not {len(rows) * settings.patch_bytes}")
