"""Packs pieces into rows of fitted lengths (`sharding.strategy` `fsdp`).

All rows of a microbatch have the same length on every device, at least that of the longest sequence. Rows of
`packing.tokens_per_row` are half empty for sequences a little longer than half of this length. Here each microbatch has
its own row length, and long sequences share a microbatch with sequences of similar length. Compiled lengths are
preferred if they waste little.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import numpy as np

from sharding.spread.shapes import round_up

from .share import Piece, Row

MORE = 2  # additional microbatches tried, beyond the fewest that could hold all tokens
GOOD = 1.06  # no additional microbatch is tried if the ratio of cells to tokens is at most this
LEAST = 8  # the least length of a row, in tokens


def lengths_between(shortest: int, longest: int) -> list[int]:
    """Returns the possible lengths of rows, ascending, from the first that is not below `shortest` to `longest`."""
    lengths, length = [], round_up(max(shortest, LEAST), longest)
    while length < longest:
        lengths.append(length)
        length = round_up(length + 1)
    return [*lengths, longest]


@dataclasses.dataclass(frozen=True)
class Fit:
    """A packing into microbatches of `rows` rows each. `lengths` has the row length of each microbatch. Piece `i` is in
    row `where[i]`, counted over all microbatches."""

    rows: int
    lengths: tuple[int, ...]
    where: np.ndarray

    @functools.cached_property
    def used(self) -> list[int]:
        """The microbatches that have a piece."""
        return np.unique(self.where // self.rows).tolist()

    def columns(self) -> int:
        return sum(self.lengths[k] for k in self.used)

    def filled(self, pieces: Sequence[Piece]) -> list[tuple[int, list[Row]]]:
        """Returns, for each of the `used` microbatches, the length of its rows and its non-empty rows."""
        rows: dict[int, list[Piece]] = {}
        for piece, row in sorted(zip(pieces, self.where.tolist(), strict=True)):
            rows.setdefault(row, []).append(piece)
        members: dict[int, list[Row]] = {k: [] for k in self.used}
        for row, row_pieces in rows.items():
            members[row // self.rows].append(tuple(row_pieces))
        return [(self.lengths[k], used_rows) for k, used_rows in members.items()]


def fit_rows(sizes: np.ndarray, rows: int, lengths: Sequence[int]) -> Fit | None:
    """Packs pieces of these `sizes` (tokens) into microbatches of `rows` rows each. `lengths` are the allowed row
    lengths, ascending. The last length decides how many microbatches are tried. Returns the packing with the fewest
    cells among those found, or None if none is found."""
    order = np.argsort(-sizes, kind="stable")
    if not len(lengths) or sizes.max() > lengths[-1]:
        return None
    total, smallest = int(sizes.sum()), int(sizes.min())
    fewest = -(-total // (rows * lengths[-1]))
    best: tuple[int, Fit] | None = None
    for count in range(fewest, fewest + MORE + 1):
        for chosen in _choices(lengths, count, total, rows, int(sizes.max())):
            cells = rows * sum(chosen)
            if best is not None and cells >= best[0]:
                break
            if rows * sum(length // smallest for length in chosen) < len(sizes):
                continue  # not even pieces of the smallest size would all fit
            where = _placed(sizes, order, np.repeat(chosen, rows))
            if where is not None:
                best = cells, Fit(rows, chosen, where)
                break
        if best is not None and best[0] <= GOOD * total:
            break
    return best[1] if best is not None else None


def _choices(lengths: Sequence[int], count: int, total: int, rows: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Yields row lengths, descending, for `count` microbatches that could hold `total` tokens, fewest cells first.
    Either all but the last two are the greatest of `lengths`, or all but the last are equal."""
    pairs = list(combinations_with_replacement(reversed(lengths), min(count, 2)))
    chosen = {(*(lengths[-1],) * (count - 2), *pair) for pair in pairs}
    chosen |= {(*(pair[0],) * (count - 2), *pair) for pair in pairs}
    enough = [choice for choice in chosen if choice[0] >= longest and rows * sum(choice) >= total]
    yield from sorted(enough, key=lambda choice: (sum(choice), choice))


def _placed(sizes: np.ndarray, order: np.ndarray, room: np.ndarray) -> np.ndarray | None:
    """Puts each piece, the longest first, into the row with the fewest free tokens among the rows that can hold the
    piece. Returns the row of each piece, or None if a piece fits no row."""
    count = len(room)
    left = np.sort(room.astype(np.int64) * count + np.arange(count)).tolist()  # ascending by free tokens, then by row
    where: list[int] = []
    for size in sizes[order].tolist():
        k = bisect.bisect_left(left, size * count)
        if k == len(left):
            return None
        key = left.pop(k)
        where.append(key % count)
        bisect.insort(left, key - size * count)
    found = np.empty(len(sizes), np.int64)
    found[order] = where
    return found
