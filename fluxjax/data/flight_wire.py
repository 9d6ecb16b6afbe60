"""The protocol of preprocessors and their clients over Arrow Flight.

A client's question is a JSON object with the client's media settings. The question is the body of an action, or the
Flight ticket of DoGet. The action `look` asks for the ticket of the medium `ref`. The question of DoGet has `ranges`, a
list of `[ticket word, start, stop]`. The answer has a record batch for each range, in order. Each row of a batch is a
patch. An error carries the name of its kind, so that the client raises the same kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from models.processing import MediaError
from models.processing.media_file import MediaUnavailable
from models.shadow import Rows

from ..base.errors import DataError
from .tickets import MediaRef, StaleTicket

PROTOCOL = 2  # version of this protocol; both sides must have the same version
MOST_REQUEST = 4 << 20  # bytes of a question, at most
MOST_BATCH = 64 << 20  # bytes of the patches of a range, at most
MOST_ANSWER = MOST_BATCH + (1 << 20)  # bytes of a message to a client, at most
MOST_RANGES = 64  # ranges of a question, at most
_MOST_WORDS = 1024  # bytes of an error's path, and of its reason, at most: both travel in a header


class BadQuestion(ValueError):
    """The question of a client does not follow this protocol."""


# The names of errors on the wire. The first type that fits an error gives the error's name.
_KINDS: dict[str, type[Exception]] = {
    "stale": StaleTicket,
    "unavailable": MediaUnavailable,
    "media": MediaError,
    "question": BadQuestion,
}


def refusal(error: Exception) -> flight.FlightServerError:
    """Returns a Flight error that carries the kind, path and reason of `error` to the client."""
    kind = next((kind for kind, known in _KINDS.items() if isinstance(error, known)), "failed")
    path, reason = (error.path, error.reason) if isinstance(error, MediaError) else ("", str(error))
    if kind == "failed":
        reason = f"{type(error).__name__}: {reason}"
    words = {"kind": kind, "path": _short(path), "reason": _short(reason)}
    return flight.FlightServerError(f"{kind}: {words['reason'][:200]}", json.dumps(words).encode())


def _short(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # UTF-8 has no half of a surrogate pair
    return text if len(text) <= _MOST_WORDS // 4 else f"{text[: _MOST_WORDS // 4 - 3]}..."


def told_error(info: bytes) -> Exception | None:
    """Returns the error that `refusal` wrote into `info`, else None. Names that `_KINDS` lacks are DataErrors."""
    try:
        words = json.loads(info)
        known = _KINDS.get(words["kind"], DataError)
        path, reason = words["path"], words["reason"]
    except (ValueError, TypeError, KeyError):
        return None
    return known(path, reason) if issubclass(known, MediaError) else known(reason)


def read_ref(words: Any) -> MediaRef:
    """Reads a question's reference of a medium. Raises BadQuestion if `words` are no reference."""
    whole = isinstance(words, list) and len(words) == 4 and all(isinstance(word, str) for word in words)
    if not whole or words[0] not in ("image", "video"):
        raise BadQuestion(f"{str(words)[:200]} is no medium")
    return MediaRef(*words)


def read_object(body: bytes | memoryview) -> Mapping[str, Any]:
    """Returns the JSON object of a question. Raises BadQuestion if the body is too long or is no JSON object."""
    if len(body) > MOST_REQUEST:
        raise BadQuestion(f"a question has at most {MOST_REQUEST} bytes, not {len(body)}")
    try:
        question = json.loads(bytes(body) or b"{}")
    except ValueError as error:
        raise BadQuestion(f"the question is not JSON: {error}") from None
    if not isinstance(question, dict):
        raise BadQuestion("the question is not a JSON object")
    return question


def read_ranges(words: Any) -> list[Rows]:
    """Reads a question's ranges of rows, which tickets may lack. Raises BadQuestion for no or too many ranges."""
    try:
        ranges = [Rows(word, start, stop) for word, start, stop in words]
    except (ValueError, TypeError) as error:
        raise BadQuestion(f"the question has no list of ranges: {error}") from None
    for rows in ranges:
        whole = isinstance(rows.ticket, str) and type(rows.start) is int and type(rows.stop) is int
        if not whole or not 0 <= rows.start < rows.stop:
            raise BadQuestion(f"rows {rows.start!r} to {rows.stop!r} of {str(rows.ticket)[:100]} are no range")
    if not 0 < len(ranges) <= MOST_RANGES:
        raise BadQuestion(f"one question has 1 to {MOST_RANGES} ranges, not {len(ranges)}")
    return ranges


def patch_schema(patch_bytes: int) -> pa.Schema:
    return pa.schema([("patches", pa.binary(patch_bytes))])


def batch_of(patches: np.ndarray) -> pa.RecordBatch:
    """Returns patches `[P, 3, n]` (uint8) as a batch of P rows, which shares the memory of contiguous patches."""
    width = patches.shape[1] * patches.shape[2]
    buffer = pa.py_buffer(np.ascontiguousarray(patches))
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(patches), [None, buffer])
    return pa.RecordBatch.from_arrays([column], schema=patch_schema(width))


def patches_of(batch: pa.RecordBatch, patch_bytes: int) -> np.ndarray:
    """Returns the patches `[P, 3, n]` (uint8) of a batch, which share the batch's memory. Raises ValueError if the
    batch does not hold patches of `patch_bytes`."""
    if batch.schema != patch_schema(patch_bytes) or batch.column(0).null_count:
        raise ValueError(f"a batch of {batch.schema} came, not of patches of {patch_bytes} bytes")
    column = batch.column(0)
    values = np.frombuffer(column.buffers()[1], np.uint8, len(column) * patch_bytes, column.offset * patch_bytes)
    return values.reshape(len(column), 3, patch_bytes // 3)
