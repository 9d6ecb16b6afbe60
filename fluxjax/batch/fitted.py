"""Rows whose length fits what stands in them (`sharding.strategy` `fsdp`).

All rows of a microbatch are as long as its longest one, on every device. So where sequences are long beside
`packing.tokens_per_row`, rows of that length are half empty; here each microbatch has a length of its own, long
sequences share one with others as long, and the lengths are those of compiled programs where these waste little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import numpy as np

from sharding.spread.shapes import round_up

from .composition import Item, Piece, Row, tokens_of

MORE = 2  # microbatches beyond the fewest that could hold all tokens
GOOD = 1.06  # cells over tokens at which no further microbatch is tried
LEAST = 8  # tokens of a row


def lengths_between(shortest: int, longest: int) -> list[int]:
    """The lengths that rows may have, ascending, from the first that holds `shortest` to `longest`."""
    lengths, length = [], round_up(max(shortest, LEAST), longest)
    while length < longest:
        lengths.append(length)
        length = round_up(length + 1)
    return [*lengths, longest]


def fit_rows(
    items: Sequence[Item], pieces: Sequence[Piece], rows: int, lengths: Sequence[int]
) -> list[tuple[int, list[Row]]] | None:
    """The pieces in microbatches of `rows` rows each, (the length of its rows, the rows that are not empty).

    `lengths` are those that rows may have, ascending; the last one bounds the number of microbatches. Of the choices
    that hold all pieces, the one with the fewest cells is taken. None if the longest piece fits no row, or too many
    microbatches would be needed.
    """
    sizes = np.array([tokens_of(items, piece) for piece in pieces], np.int64)
    order = np.argsort(-sizes, kind="stable")
    if not len(lengths) or sizes.max() > lengths[-1]:
        return None
    total, smallest = int(sizes.sum()), int(sizes.min())
    fewest = -(-total // (rows * lengths[-1]))
    best: tuple[int, tuple[int, ...], np.ndarray] | None = None
    for count in range(fewest, fewest + MORE + 1):
        for chosen in _choices(lengths, count, total, rows, int(sizes.max())):
            cells = rows * sum(chosen)
            if best is not None and cells >= best[0]:
                break
            if rows * sum(length // smallest for length in chosen) < len(pieces):
                continue  # there are more pieces than even the smallest one fits times
            where = _placed(sizes, order, np.repeat(chosen, rows))
            if where is not None:
                best = cells, chosen, where
                break
        if best is not None and best[0] <= GOOD * total:
            break
    if best is None:
        return None
    found: list[tuple[int, list[Row]]] = []
    for k, length in enumerate(best[1]):
        members: list[list[Piece]] = [[] for _ in range(rows)]
        for i in np.flatnonzero(best[2] // rows == k).tolist():
            members[best[2][i] % rows].append(pieces[i])
        found.append((length, [_in_order(row) for row in members if row]))
    return [(length, filled) for length, filled in found if filled]


def _choices(lengths: Sequence[int], count: int, total: int, rows: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Lengths of `count` microbatches' rows, descending, that could hold `total` tokens; fewest cells first. All but
    the last two are as long as may be, or all but the last one are equal."""
    pairs = list(combinations_with_replacement(reversed(lengths), min(count, 2)))
    chosen = {(*(lengths[-1],) * (count - 2), *pair) for pair in pairs}
    chosen |= {(*(pair[0],) * (count - 2), *pair) for pair in pairs}
    enough = [each for each in chosen if each[0] >= longest and rows * sum(each) >= total]
    yield from sorted(enough, key=lambda each: (sum(each), each))


def _placed(sizes: np.ndarray, order: np.ndarray, room: np.ndarray) -> np.ndarray | None:
    """The row of each piece: longest first, where it leaves the least room. None if one fits nowhere."""
    left, where = room.astype(np.int64), np.zeros(len(sizes), np.int64)
    for i in order.tolist():
        after = left - sizes[i]
        fits = np.flatnonzero(after >= 0)
        if not len(fits):
            return None
        row = fits[after[fits].argmin()]
        where[i], left[row] = row, after[row]
    return where


def _in_order(pieces: Sequence[Piece]) -> Row:
    return tuple(sorted(pieces, key=lambda piece: (piece.item, piece.responses)))
