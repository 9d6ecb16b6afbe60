"""What each of several processes lays out of a step: the rows of its own devices, from the groups that stand in them.

The plan of a step is made once, of sizes alone, by the process that knows all groups. The others get their share of it,
and read no prompt, no response and no pixel of the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .composition import Filled, PackedRows, Piece, TrainGroup
from .fill import SizedRows


@dataclasses.dataclass(frozen=True)
class Share:
    """`micros` are the step's microbatches, each with some of its shards only; their items are `groups`."""

    micros: tuple[PackedRows, ...]
    groups: tuple[TrainGroup, ...]
    filled: tuple[Filled, ...] = ()  # of the microbatches with all of their shards


def share(outline: Sequence[SizedRows], groups: Sequence[TrainGroup], shards: range) -> Share:
    """The share of the process that has these shards, with those of `groups` that it needs."""
    micros = [sized.micro for sized in outline]
    own = [micro.shards[shards.start : shards.stop] for micro in micros]
    needed = sorted({piece.item for micro in own for rows in micro for row in rows for piece in row})
    number = {item: k for k, item in enumerate(needed)}

    def renumbered(micro: PackedRows, own: Sequence[tuple[tuple[Piece, ...], ...]]) -> PackedRows:
        rows = [[tuple(Piece(number[p.item], p.responses) for p in row) for row in shard] for shard in own]
        return dataclasses.replace(micro, shards=tuple(map(tuple, rows)))

    filled = tuple(sized.filled for sized in outline)
    return Share(tuple(map(renumbered, micros, own)), tuple(groups[item] for item in needed), filled)
