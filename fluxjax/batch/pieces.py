"""Cuts all groups of a step at once into pieces, each of which is computed as one sequence.

A step of many processes has tens of thousands of responses, so arrays hold the decisions about them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain

import numpy as np

from .composition import Item, Piece


@dataclasses.dataclass(frozen=True)
class SizedPieces:
    """Pieces with their `tokens` (int64, one entry for each piece, the prompt included); `order` has their indices by
    item, then by responses: their order in a row."""

    pieces: list[Piece]
    tokens: np.ndarray
    order: np.ndarray


def pieces_of(items: Sequence[Item], longest: int, share_prompts: bool, responses: int = 0) -> list[Piece]:
    """Returns the pieces, each computed as one sequence: groups with `share_prompts`, else responses.

    A group is cut into pieces of at most `longest` tokens, and of at most `responses` tokens without the prompt (0: no
    limit). A response that exceeds these limits alone, with its prompt, is still a piece.
    """
    return sized_pieces(items, longest, share_prompts, responses).pieces


def sized_pieces(items: Sequence[Item], longest: int, share_prompts: bool, responses: int = 0) -> SizedPieces:
    """Returns the pieces of `pieces_of`, with their sizes. A group becomes as few pieces as first-fit-decreasing finds,
    nearly always one piece."""
    if not items:
        return SizedPieces([], np.zeros(0, np.int64), np.zeros(0, np.int64))
    prompts = np.fromiter((item.prompt for item in items), np.int64, len(items))
    counts = np.fromiter((len(item.responses) for item in items), np.int64, len(items))
    sizes = np.fromiter(chain.from_iterable(item.responses for item in items), np.int64, int(counts.sum()))
    firsts = np.cumsum(counts) - counts
    item_of = np.repeat(np.arange(len(items)), counts)
    number = np.arange(len(sizes)) - firsts[item_of]  # index of each response in its item
    if not share_prompts:
        pieces = [Piece(item, (k,)) for item, k in zip(item_of.tolist(), number.tolist(), strict=True)]
        return SizedPieces(pieces, prompts[item_of] + sizes, np.arange(len(pieces)))

    most = np.minimum(longest, prompts + responses) if responses else longest
    rooms = np.maximum(most - prompts, np.maximum.reduceat(sizes, firsts))
    part = np.zeros(len(sizes), np.int64)
    wide = np.add.reduceat(sizes, firsts) > rooms
    if wide.any():
        here = wide[item_of]
        part[here] = _parts(sizes[here], counts[wide], rooms[wide])
    key = item_of * (int(part.max()) + 1) + part
    by_piece = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.diff(key[by_piece], prepend=-1))
    owner, least = item_of[by_piece[begins]], number[by_piece[begins]]
    tokens = prompts[owner] + np.add.reduceat(sizes[by_piece], begins)
    numbers, ends = number[by_piece].tolist(), [*begins[1:].tolist(), len(sizes)]
    spans = zip(owner.tolist(), begins.tolist(), ends, strict=True)
    pieces = [Piece(item, tuple(numbers[begin:end])) for item, begin, end in spans]
    return SizedPieces(pieces, tokens, np.lexsort((least, owner)))  # pieces of an item share no response


def _parts(sizes: np.ndarray, counts: np.ndarray, rooms: np.ndarray) -> np.ndarray:
    """Returns the part of each response, group after group: the first part of the group with room for it, largest
    responses first. A part holds `rooms` tokens of its group; no response exceeds that."""
    groups, most = len(counts), int(counts.max())
    group = np.repeat(np.arange(groups), counts)
    order = np.lexsort((-sizes, group))  # stable: equal sizes stay in order
    held = np.arange(most) < counts[:, None]
    ranked = np.zeros((groups, most), np.int64)
    ranked[held] = sizes[order]
    free, chosen = np.repeat(rooms[:, None], most, axis=1), np.zeros((groups, most), np.int64)
    every = np.arange(groups)
    for rank in range(most):
        size = ranked[:, rank]
        chosen[:, rank] = (free[:, : rank + 1] >= size[:, None]).argmax(axis=1)
        free[every, chosen[:, rank]] -= size
    part = np.empty(len(sizes), np.int64)
    part[order] = chosen[held]
    return part
