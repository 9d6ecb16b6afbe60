"""Shadow tensors: placeholders that say where their data can be fetched (FlexRL, section 4, "FakeTensor").

Planning a step needs only the shapes of its pixels; only devices need the pixels themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np


class ShadowError(RuntimeError):
    """A shadow tensor was used as if it had its data."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows `start .. stop - 1` of the tensor that `ticket` names. The data that a ticket names never change."""

    ticket: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Piece: TypeAlias = Rows | np.ndarray  # arrays: rows that need no fetching, such as padding
Fetch: TypeAlias = Callable[[Sequence[Rows]], Sequence[np.ndarray]]


class ShadowTensor(np.lib.mixins.NDArrayOperatorsMixin):
    """The shape and dtype of an array, and the `pieces` along its first axis (patches or frames) that form its data. A
    shadow can be sliced along that axis, concatenated with shadows and arrays by `np.concatenate`, and be a leaf of a
    pytree. Every other use of its data, such as arithmetic, raises ShadowError."""

    __slots__ = ("dtype", "pieces", "shape")

    def __init__(self, pieces: Sequence[Piece], row_shape: Sequence[int], dtype: np.dtype) -> None:
        self.pieces = tuple(_joined(pieces))
        self.shape = (sum(map(len, self.pieces)), *row_shape)
        self.dtype = np.dtype(dtype)

    @classmethod
    def of(cls, ticket: str, shape: Sequence[int], dtype: Any) -> ShadowTensor:
        """The complete tensor that `ticket` names."""
        return cls([Rows(ticket, 0, shape[0])], shape[1:], np.dtype(dtype))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor's data would take in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> ShadowTensor:
        """The tensor of neighbouring rows. Raises ShadowError for an index that is no slice of step 1."""
        if not isinstance(rows, slice):
            self._refuse(f"a shadow tensor was indexed by {rows!r} instead of a slice of neighbouring rows")
        start, stop, step = rows.indices(len(self))
        if step != 1:
            self._refuse(f"a shadow tensor was indexed by a slice of step {step} instead of neighbouring rows")
        pieces: list[Piece] = []
        begin = 0
        for piece in self.pieces:
            low, high = max(start - begin, 0), min(stop - begin, len(piece))
            if low < high:
                if isinstance(piece, Rows):
                    pieces.append(Rows(piece.ticket, piece.start + low, piece.start + high))
                else:
                    pieces.append(piece[low:high])
            begin += len(piece)
        return ShadowTensor(pieces, self.shape[1:], self.dtype)

    def shard(self, index: int, count: int) -> ShadowTensor:
        """Part `index` of `count` consecutive parts; the first parts may be one row longer. Raises ShadowError."""
        if not 0 <= index < count:
            self._refuse(f"part {index} of {count} of a shadow tensor was asked for; parts are 0 to {count - 1}")
        size, longer = divmod(len(self), count)
        start = index * size + min(index, longer)
        return self[start : start + size + (index < longer)]

    @property
    def elsewhere(self) -> tuple[Rows, ...]:
        """The rows that have to be fetched."""
        return tuple(piece for piece in self.pieces if isinstance(piece, Rows))

    def materialize(self, fetch: Fetch) -> np.ndarray:
        """The data; calls `fetch(elsewhere)` once. Raises ShadowError if `fetch` returns another shape or dtype."""
        wanted = self.elsewhere
        fetched = fetch(wanted)
        for rows, data in zip(wanted, fetched, strict=True):
            shape = (len(rows), *self.shape[1:])
            if data.shape != shape or data.dtype != self.dtype:
                came = f"{data.dtype}{list(data.shape)}"
                raise ShadowError(f"{_named(rows)} were fetched as {came}, but must be {self.dtype}{list(shape)}")
        if not self.pieces:
            return np.empty(self.shape, self.dtype)
        arrived = iter(fetched)
        whole = [next(arrived) if isinstance(piece, Rows) else piece for piece in self.pieces]
        return np.concatenate(whole) if len(whole) != 1 else whole[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> ShadowTensor:
        if function is not np.concatenate or kwargs.get("axis", 0) != 0 or len(args) != 1:
            self._refuse(f"numpy.{function.__name__} was called on a shadow tensor")
        pieces: list[Piece] = []
        for part in args[0]:
            if part.shape[1:] != self.shape[1:] or part.dtype != self.dtype:
                raise ValueError(f"{part.dtype}{list(part.shape)} can't be concatenated with {self!r}")
            pieces += part.pieces if isinstance(part, ShadowTensor) else [part]
        return ShadowTensor(pieces, self.shape[1:], self.dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(f"numpy.{ufunc.__name__} was called on a shadow tensor")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        self._refuse("a shadow tensor was used as data")

    def _refuse(self, what: str) -> NoReturn:
        names = ", ".join(map(_named, self.elsewhere[:3])) + (", ..." if len(self.elsewhere) > 3 else "")
        raise ShadowError(f"{what}, but its data is not in this process: {names}; fetch it with a materializer")

    def __eq__(self, other: object) -> bool:
        """Says whether two shadows have the same shape and dtype, and the same rows to fetch."""
        if not isinstance(other, ShadowTensor):
            return NotImplemented
        return (self.shape, self.dtype, self.elsewhere) == (other.shape, other.dtype, other.elsewhere)

    def __hash__(self) -> int:
        return hash((self.shape, self.elsewhere))

    def __repr__(self) -> str:
        return f"ShadowTensor({self.dtype}{list(self.shape)} of {', '.join(map(_named, self.elsewhere[:3]))})"


def _named(rows: Rows) -> str:
    return f"rows {rows.start} to {rows.stop} of {rows.ticket}"


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    result: list[Piece] = []
    for piece in pieces:
        match result[-1:], piece:
            case [Rows(ticket, start, stop)], Rows() if (ticket, stop) == (piece.ticket, piece.start):
                result[-1] = Rows(ticket, start, piece.stop)
            case _ if len(piece):
                result.append(piece)
    return result
