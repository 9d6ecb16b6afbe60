"""The numbers of a response (tokens, log-probs, versions) as bytes, written once and sent to other processes.

A head (the response's index in its group, tokens, runs of versions, bytes of a token, temperature), the versions as
runs of (version, tokens), log-probs as float32, and tokens as the smaller of two integer types that holds all of them;
little endian. Nearly all responses have one version, so their runs are short.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

_HEAD = struct.Struct("<iiiid")
_TOKENS = {2: np.dtype("<u2"), 4: np.dtype("<i4")}  # by the bytes of a token
_RUN = np.dtype("<i4")  # the type of both numbers of a run


@dataclasses.dataclass(frozen=True)
class ResponseNumbers:
    """The numbers of a response: `tokens` int32, `logprobs` float32 and `versions` int32, `[T]` each."""

    sample: int
    temperature: float | None
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def bytes_of(
    sample: int,
    temperature: float | None,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int],
) -> bytes:
    """Writes the numbers of a response. Raises ValueError for a value that is no number, or too large for 32 bits."""
    count = len(tokens)
    if count and versions.count(versions[0]) == count:
        runs = [versions[0], count]
    else:
        runs = [n for version, run in groupby(versions) for n in (version, len(list(run)))]
    try:
        width, ids = 2, struct.pack(f"<{count}H", *tokens)  # twice as fast as numpy reads a tuple
    except struct.error:
        width, ids = 4, _packed(f"<{count}i", tokens)
    values = _packed(f"<{count}f", logprobs)
    head = _HEAD.pack(sample, count, len(runs) // 2, width, math.nan if temperature is None else temperature)
    return b"".join((head, _packed(f"<{len(runs)}i", runs), values, ids))


def _packed(form: str, values: Sequence[int] | Sequence[float]) -> bytes:
    try:
        return struct.pack(form, *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"numbers of a response: {error}") from error


class ResponseHead(NamedTuple):
    """The head of a response's bytes, which can be read alone; `size` counts the bytes of the entire response."""

    sample: int
    temperature: float | None
    tokens: int
    runs: int  # of versions
    width: int  # bytes of a token
    size: int


def head_of(data: bytes | memoryview, start: int = 0) -> ResponseHead:
    """Reads the head of a response written by `bytes_of`, `start` bytes into `data`. Raises ValueError for other bytes,
    and for a response that is cut off."""
    try:
        sample, count, runs, width, temperature = _HEAD.unpack_from(data, start)
    except struct.error as error:
        raise ValueError(f"a response is cut off: {error}") from error
    if count < 0 or runs < 0 or width not in _TOKENS:
        raise ValueError(f"no response has {count} tokens of {width} bytes and {runs} runs of versions")
    size = _HEAD.size + 2 * _RUN.itemsize * runs + (4 + width) * count
    if len(data) < start + size:
        raise ValueError(f"a response is cut off: {len(data) - start} of {size} bytes")
    return ResponseHead(sample, None if math.isnan(temperature) else temperature, count, runs, width, size)


def numbers_of(data: bytes | memoryview) -> ResponseNumbers:
    """Reads the numbers that `bytes_of` wrote. Raises ValueError for other bytes."""
    sample, temperature, count, runs, width, _ = head_of(data)
    at = _HEAD.size
    pairs = np.frombuffer(data, _RUN, 2 * runs, at).reshape(runs, 2)
    at += pairs.nbytes
    logprobs = np.frombuffer(data, "<f4", count, at)
    at += logprobs.nbytes
    ids = np.frombuffer(data, _TOKENS[width], count, at)
    if pairs[:, 1].min(initial=1) < 1 or pairs[:, 1].sum(dtype=np.int64) != count:
        raise ValueError(f"runs of {pairs[:, 1].tolist()} versions for {count} tokens")
    return ResponseNumbers(
        sample,
        temperature,
        ids.astype(np.int32),
        logprobs.astype(np.float32, copy=False),
        np.repeat(pairs[:, 0].astype(np.int32), pairs[:, 1]),
    )


def version_span_of(data: bytes) -> tuple[int, int]:
    """Returns the oldest and the newest version in bytes from `bytes_of`; -1 for both if there is no token."""
    _, _, runs, _, _ = _HEAD.unpack_from(data)
    versions = struct.unpack_from(f"<{2 * runs}i", data, _HEAD.size)[::2]
    return (min(versions), max(versions)) if versions else (-1, -1)
