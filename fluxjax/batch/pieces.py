"""Cuts groups into the pieces that are computed as one sequence each: all groups of a step at once.

A step of many processes has tens of thousands of responses, so decisions for each of them are made in arrays here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain

import numpy as np

from .composition import Item, Piece


@dataclasses.dataclass(frozen=True)
class SizedPieces:
    """Pieces with their `tokens` (int64, one entry each, the prompt included); `order` are their indices by item, then
    by responses: as they stand in a row."""

    pieces: list[Piece]
    tokens: np.ndarray
    order: np.ndarray


def pieces_of(items: Sequence[Item], longest: int, share_prompts: bool, responses: int = 0) -> list[Piece]:
    """Returns the pieces that are one sequence each: with `share_prompts` groups, else responses.

    A group is cut into pieces of at most `longest` tokens, and of at most `responses` without the prompt (0: any). A
    response that has more with its prompt is a piece all the same.
    """
    return sized_pieces(items, longest, share_prompts, responses).pieces


def sized_pieces(items: Sequence[Item], longest: int, share_prompts: bool, responses: int = 0) -> SizedPieces:
    """Returns the same pieces as `pieces_of`, with their sizes. A group becomes as few pieces as first-fit-decreasing
    finds, nearly always one."""
    if not items:
        return SizedPieces([], np.zeros(0, np.int64), np.zeros(0, np.int64))
    prompts = np.fromiter((item.prompt for item in items), np.int64, len(items))
    counts = np.fromiter((len(item.responses) for item in items), np.int64, len(items))
    sizes = np.fromiter(chain.from_iterable(item.responses for item in items), np.int64, int(counts.sum()))
    firsts = np.cumsum(counts) - counts
    item_of = np.repeat(np.arange(len(items)), counts)
    number = np.arange(len(sizes)) - firsts[item_of]  # of a response in its item
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
    """Returns the part of each response, group after group: of a group's parts, which hold `rooms` tokens, the first
    one with room for it, largest responses first. No response is larger than its room."""
    groups, most = len(counts), int(counts.max())
    group = np.repeat(np.arange(groups), counts)
    order = np.lexsort((-sizes, group))  # stable: of equal ones the first comes first
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
