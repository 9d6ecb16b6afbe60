"""Bin packing (`sharding.strategy` `fsdp`): which responses share a row, and which rows a shard.

Everything is a pure function of the sizes in their order, so a resumed run packs as the interrupted one did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from models.config import VisionConfig

from ..config import Config, ConfigError
from .composition import Composition
from .fill import lay_out_rows
from .pieces import Item, PackedRows, Piece, Row, TrainGroup, check, pieces_of, tokens_of

GRID = 3  # sizes of a buffer: its cap, half and a quarter of it


@dataclasses.dataclass(frozen=True)
class Budget:
    """The sizes that a shard's part of a microbatch may have: ascending, the last is the cap."""

    tokens_per_row: int
    rows: tuple[int, ...]
    patches: tuple[int, ...]
    num_shards: int = 1

    @classmethod
    def of(cls, config: Config, num_shards: int, vision: VisionConfig | None) -> Budget:
        """The sizes that `config.packing` allows. Raises ConfigError if they can hold nothing."""
        packing = config.packing
        unit = vision.merge_unit if vision is not None else 0
        for field, least in (("tokens_per_row", 2), ("rows_per_device", 1), ("patches_per_device", unit)):
            if getattr(packing, field) < least:
                raise ConfigError(f"packing.{field} = {getattr(packing, field)} must be at least {least}")
        patches = grid(packing.patches_per_device, unit) if unit else (0,)
        return cls(packing.tokens_per_row, grid(packing.rows_per_device), patches, num_shards)

    def shapes(self) -> list[tuple[int, int, int]]:
        """All (rows, tokens a row, patches) that a microbatch may have: the bound on compiled shapes."""
        shards = self.num_shards
        return [
            (rows * shards, self.tokens_per_row, patches * shards) for rows in self.rows for patches in self.patches
        ]


class RowPacking:
    """Packs groups into rows of one length, which the devices share out evenly."""

    def __init__(self, config: Config, num_shards: int, vision: VisionConfig | None) -> None:
        self._budget = Budget.of(config, num_shards, vision)
        self._share, self._vision = config.packing.share_prompts, vision

    def check(self) -> None:
        """Nothing depends on the devices here."""

    def compose(self, groups: Sequence[TrainGroup]) -> Composition:
        plan = pack([group.item for group in groups], self._budget, share_prompts=self._share)
        return lay_out_rows(plan, groups, self._budget.tokens_per_row, self._share, self._vision)


def grid(cap: int, multiple: int = 1) -> tuple[int, ...]:
    """The few sizes, ascending, that a buffer of at most `cap` may take; all are multiples of `multiple`.

    Few, because each size is compiled once; geometric, so that a small batch pays at most twice its size
    (down to a quarter of the cap).
    """
    cap = cap // multiple * multiple
    return tuple(sorted({-(-cap // (multiple << k)) * multiple for k in range(GRID)}))


def pack(items: Sequence[Item], budget: Budget, *, share_prompts: bool = True) -> list[PackedRows]:
    """Packs every response of every item once, into as little padded space as the better of two heuristics needs.

    With `share_prompts` a prompt stands once before all responses of its piece. One heuristic is first-fit-
    decreasing over whole groups; the other chains groups one after the other and lets a group run over into the
    next row, prompt repeated, which wins when few groups fit a row. Without, each response is packed with its
    own prompt, by decreasing size or in order (which keeps a group's media on one shard).

    An item's patches count once for each shard that has rows of it. Raises ConfigError if a prompt with one
    response exceeds `tokens_per_row`, or its media the patches of a shard.
    """
    check(items, budget.tokens_per_row, budget.patches[-1])
    if share_prompts:
        whole = pieces_of(items, budget.tokens_per_row, share_prompts=True)
        candidates = [_first_fit(items, _by_size(items, whole), budget), _chain(items, budget)]
    else:
        single = pieces_of(items, 0, share_prompts=False)
        candidates = [_first_fit(items, pieces, budget) for pieces in (single, _by_size(items, single))]
    plans = [_spread(items, rows, budget) for rows in candidates]
    return min(plans, key=lambda plan: _cost(plan, budget))


def _cost(plan: list[PackedRows], budget: Budget) -> int:
    """Padded tokens and patches of one shard."""
    return sum(micro.rows * budget.tokens_per_row + micro.patches for micro in plan)


def _by_size(items: Sequence[Item], pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: -tokens_of(items, piece))  # stable: ties stay in order


def _first_fit(items: Sequence[Item], pieces: Sequence[Piece], budget: Budget) -> list[Row]:
    """Each piece goes into the first row with room for its tokens and patches."""
    free = np.zeros(len(pieces), np.int64)
    rows: list[list[Piece]] = []
    patches: list[int] = []
    members: list[set[int]] = []
    for piece in pieces:
        size, media = tokens_of(items, piece), items[piece.item].patches
        for row in np.flatnonzero(free[: len(rows)] >= size):
            added = 0 if piece.item in members[row] else media
            if patches[row] + added <= budget.patches[-1]:
                break
        else:
            row, added = len(rows), media
            free[row] = budget.tokens_per_row
            rows.append([])
            patches.append(0)
            members.append(set())
        free[row] -= size
        rows[row].append(piece)
        patches[row] += added
        members[row].add(piece.item)
    return [tuple(sorted(row, key=lambda piece: (piece.item, piece.responses))) for row in rows]


def _chain(items: Sequence[Item], budget: Budget) -> list[Row]:
    """Groups in order, each begun in the row where the last one ended and continued in the next."""
    rows: list[list[Piece]] = []
    free = patches = 0
    for index, item in enumerate(items):
        pending = sorted(range(len(item.responses)), key=lambda k: -item.responses[k])
        while pending:
            room = free - item.prompt if patches + item.patches <= budget.patches[-1] else 0
            taken: list[int] = []
            for k in pending:
                if item.responses[k] <= room:
                    taken.append(k)
                    room -= item.responses[k]
            if taken:
                rows[-1].append(Piece(index, tuple(sorted(taken))))
                free, patches = room, patches + item.patches
                pending = [k for k in pending if k not in taken]
            if pending:
                rows.append([])
                free, patches = budget.tokens_per_row, 0
    return [tuple(row) for row in rows]


def _spread(items: Sequence[Item], rows: Sequence[Row], budget: Budget) -> list[PackedRows]:
    """Deals rows to the shards of as many microbatches as they need.

    A row goes where it adds the fewest patches (beside rows of the same groups), then to the shard with the
    fewest patches, then with the fewest rows. What fits in no shard waits for the next microbatch.
    """
    waiting = sorted(rows, key=lambda row: (row[0].item, row[0].responses))
    plan: list[PackedRows] = []
    while waiting:
        wanted = min(-(-len(waiting) // budget.num_shards), budget.rows[-1])
        per_shard = next(size for size in budget.rows if size >= wanted)
        shards: list[list[Row]] = [[] for _ in range(budget.num_shards)]
        members: list[set[int]] = [set() for _ in shards]
        patches = [0] * budget.num_shards
        left: list[Row] = []
        for row in waiting:
            media = {piece.item for piece in row if items[piece.item].patches}
            best: tuple[int, int, int, int] | None = None
            for shard in range(budget.num_shards):
                added = sum(items[item].patches for item in media if item not in members[shard])
                if len(shards[shard]) < per_shard and patches[shard] + added <= budget.patches[-1]:
                    key = (added, patches[shard], len(shards[shard]), shard)
                    best = key if best is None else min(best, key)
            if best is None:
                left.append(row)
                continue
            added, _, _, shard = best
            shards[shard].append(row)
            members[shard] |= media
            patches[shard] += added
        size = next(size for size in budget.rows if size >= max(map(len, shards)))
        buffer = next(size for size in budget.patches if size >= max(patches))
        plan.append(PackedRows(size, buffer, tuple(tuple(shard) for shard in shards)))
        assert len(left) < len(waiting), "a row has more patches than a shard may hold"
        waiting = left
    return plan
