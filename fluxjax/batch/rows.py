"""Packs responses into rows, and rows into shards, by bin packing (`sharding.strategy` `fsdp`).

The packing is a pure function of the ordered sizes and the shape book, so that a resumed run packs as the interrupted
run did.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from models.config import VisionConfig
from models.inputs import common_bound
from sharding.spread.buffers import size_weight
from sharding.spread.shapes import ShapeBook, Sizes

from ..config import Config, ConfigError
from .fitted import Fit, fit_rows, lengths_between
from .share import Item, Outline, Piece, Row, TrainGroup, check, chunks_for, most_chunks, patches_of, pieces_of, runs_of

# Least `packing.tokens_per_row`, in tokens, for fitted row lengths. In shorter rows, fitted lengths save less time than
# their compilation takes.
LONG = 1024
FEWER = 0.97  # microbatches get fewer rows only if all of them together then have less than this share of the cells
SHORTEST = 16  # no row is shorter than `packing.tokens_per_row` divided by this number
GRID = 3  # number of sizes of a buffer: 1, 1/2 and 1/4 of the cap; rows shorter than LONG may also number 3/4 of it


@dataclasses.dataclass(frozen=True)
class Budget:
    """The sizes that a shard's part of a microbatch may have. Each tuple is ascending and ends with the cap."""

    tokens_per_row: int
    rows: tuple[int, ...]
    patches: tuple[int, ...]
    num_shards: int = 1

    @classmethod
    def of(cls, config: Config, num_shards: int, vision: VisionConfig | None) -> Budget:
        """Returns the sizes that `config.packing` allows. Raises ConfigError if such a buffer can hold nothing."""
        packing = config.packing
        unit = vision.merge_unit if vision is not None else 0
        for field, least in (("tokens_per_row", 2), ("rows_per_device", 1), ("patches_per_device", unit)):
            if getattr(packing, field) < least:
                raise ConfigError(f"packing.{field} = {getattr(packing, field)} must be at least {least}")
        patches = grid(packing.patches_per_device, unit) if unit else (0,)
        rows = grid(packing.rows_per_device)
        if packing.tokens_per_row < LONG:
            rows = tuple(sorted({*rows, -(-3 * rows[-1] // 4)}))
        return cls(packing.tokens_per_row, rows, patches, num_shards)


class RowPacking:
    """Packs groups into rows, equally many on each device, of one length or, for less padding, of fitted lengths."""

    def __init__(
        self, config: Config, num_shards: int, vision: VisionConfig | None, shapes: ShapeBook, chunk: int = 0
    ) -> None:
        """`chunk` is the number of tokens of a chunk in a `PackedRuns`; 0: batches have no `PackedRuns`."""
        self._budget = Budget.of(config, num_shards, vision)
        self._share, self._vision, self._shapes, self._chunk = config.packing.share_prompts, vision, shapes, chunk
        self._most_chunks = most_chunks(config) if chunk else 0

    def outline(self, groups: Sequence[TrainGroup]) -> tuple[list[Outline], Sequence[TrainGroup]]:
        """Returns the microbatches, with buffer sizes that the shape book chooses, and `groups`."""
        items = [group.item for group in groups]
        check(items, self._budget.tokens_per_row, self._budget.patches[-1])
        pieces = pieces_of(items, self._budget.tokens_per_row, self._share, patches=self._budget.patches[-1])
        exact = self._budget.tokens_per_row < LONG
        plan = None if exact else self._fitted(pieces)
        if plan is None or cells_of(plan) > _least_cells(items, self._budget, self._share):
            full = packed(items, pieces, self._budget, self._share)
            plan = full if plan is None or cells_of(full) < cells_of(plan) else plan
        frame = common_bound(shown for group in groups for shown in group.shown) if self._vision is not None else 0
        return [self._sized(micro, frame, exact) for micro in plan], groups

    def _fitted(self, pieces: Sequence[Piece]) -> list[Outline] | None:
        budget, shapes, shards = self._budget, self._shapes, self._budget.num_shards
        best: tuple[int, Fit] | None = None  # (cells of one shard, fit)
        tokens = np.array([piece.tokens for piece in pieces])
        for rows in reversed(budget.rows):
            known = shapes.columns(shards, 0, budget.tokens_per_row, rows)
            free = lengths_between(budget.tokens_per_row // SHORTEST, budget.tokens_per_row)
            found = [fit_rows(tokens, rows * shards, known)]
            if not shapes.full(shards):
                found.append(fit_rows(tokens, rows * shards, sorted({*known, *free})))
            cells = [rows * plan.columns() if plan is not None else math.inf for plan in found]
            k = 0 if cells[0] <= (1 + shapes.patience(shards)) * cells[-1] else -1
            if (plan := found[k]) is not None and (best is None or cells[k] < FEWER * best[0]):
                best = rows * plan.columns(), plan
        if best is None:
            return None
        filled, rows = best[1].filled(pieces), best[1].rows // shards
        if max(patches_of(row) for _, members in filled for row in members) > budget.patches[-1]:
            return None
        return [micro for length, members in filled for micro in _spread(members, budget, rows, length)]

    def _sized(self, micro: Outline, frame: int, exact: bool) -> Outline:
        budget = self._budget
        needs = {"rows": micro.sizes["rows"], "columns": micro.sizes["columns"]}
        caps = {"rows": budget.rows[-1], "columns": budget.tokens_per_row}
        if self._most_chunks:
            rows = (row for shard in micro.shards for row in shard)
            needs["chunks"] = chunks_for(needs["columns"], max(runs_of(row, self._share) for row in rows), self._chunk)
            caps["chunks"] = max(self._most_chunks, needs["chunks"])
        if self._vision is not None:
            # The vision tower's program accepts no empty buffer. Every buffer therefore holds the patches of at least
            # one feature.
            needs |= {"patches": max(micro.sizes["patches"], self._vision.merge_unit), "frame": frame}
            caps |= {"patches": budget.patches[-1], "frame": max(frame, 1 << (budget.patches[-1] - 1).bit_length())}
        sizes, coming = self._shapes.choose(needs, caps, _rows_cost, budget.num_shards, exact)
        return Outline(micro.shards, self._whole(sizes), self._whole(coming) if coming is not None else None)

    def _whole(self, sizes: Sizes) -> Sizes:
        if self._vision is None:
            return sizes
        unit = self._vision.merge_unit
        return sizes | {"patches": -(-sizes["patches"] // unit) * unit}


def _rows_cost(sizes: Mapping[str, int]) -> float:
    media = sum(size_weight(name) * sizes.get(name, 0) for name in ("patches", "frame"))
    return sizes["rows"] * sizes["columns"] + media


def cells_of(plan: Iterable[Outline]) -> int:
    """Returns the number of token cells of one shard, padding included."""
    return sum(micro.sizes["rows"] * micro.sizes["columns"] for micro in plan)


def grid(cap: int, multiple: int = 1) -> tuple[int, ...]:
    """Returns the few sizes, ascending, that a buffer of at most `cap` may take; all are multiples of `multiple`. The
    sizes are few because each size is compiled. They are geometric, so that a batch of at least a quarter of the cap is
    padded to less than twice its size."""
    cap = cap // multiple * multiple
    return tuple(sorted({-(-cap // (multiple << k)) * multiple for k in range(GRID)}))


def packed(items: Sequence[Item], pieces: Sequence[Piece], budget: Budget, share_prompts: bool) -> list[Outline]:
    """Packs the responses of all items by two heuristics, and returns the packing with the smaller buffers.

    With `share_prompts` a prompt stands once before all responses of its piece. The first heuristic is
    first-fit-decreasing over `pieces`. The second heuristic chains groups: a group may continue in the next row, where
    its prompt is repeated. Without `share_prompts`, each response has its own prompt. The first heuristic then packs
    responses in order, which keeps a group's media on one shard; the second packs them by decreasing size.

    An item's patches count once for each shard that has rows of the item.
    """
    ways = [
        lambda: _first_fit(sorted(pieces, key=lambda piece: -piece.tokens), budget),
        lambda: _chain(items, budget) if share_prompts else _first_fit(pieces, budget),
    ]
    first, second = ways if share_prompts else ways[::-1]
    plan = _spread(first(), budget)
    if _cost(plan) <= _least_cells(items, budget, share_prompts) + budget.patches[0]:
        return plan  # the second heuristic can't be better
    return min(plan, _spread(second(), budget), key=_cost)


def _least_cells(items: Sequence[Item], budget: Budget, share_prompts: bool) -> int:
    """Returns a lower bound on `cells_of` any packing into rows of `budget`."""
    tokens = sum(sum(item.responses) + item.prompt * (1 if share_prompts else len(item.responses)) for item in items)
    rows = -(-tokens // (budget.tokens_per_row * budget.num_shards))
    return budget.tokens_per_row * max(rows, budget.rows[0])


def _cost(plan: Sequence[Outline]) -> int:
    return cells_of(plan) + sum(micro.sizes["patches"] for micro in plan)


def _first_fit(pieces: Sequence[Piece], budget: Budget) -> list[Row]:
    rows: list[list[Piece]] = []
    free, patches = np.zeros(len(pieces), np.int64), np.zeros(len(pieces), np.int64)  # free tokens and patches of rows
    members: list[set[int]] = []

    def added(row: int, piece: Piece) -> int:
        return (0 if piece.item in members[row] else piece.patches) + piece.observed

    for piece in pieces:
        fitting = np.flatnonzero(free[: len(rows)] >= piece.tokens).tolist()
        room = (row for row in fitting if patches[row] + added(row, piece) <= budget.patches[-1])
        row = next(room, len(rows))
        if row == len(rows):
            free[row] = budget.tokens_per_row
            rows.append([])
            members.append(set())
        free[row] -= piece.tokens
        patches[row] += added(row, piece)
        rows[row].append(piece)
        members[row].add(piece.item)
    return [tuple(sorted(row)) for row in rows]


def _chain(items: Sequence[Item], budget: Budget) -> list[Row]:
    """Packs groups in order. A group begins in the row where the last group ends, and may go on in the next rows."""
    rows: list[list[Piece]] = []
    free = patches = 0
    for index, item in enumerate(items):
        pending = sorted(range(len(item.responses)), key=lambda k: -item.responses[k])
        while pending:
            held = budget.patches[-1] - patches - item.patches
            room = free - item.prompt if held >= 0 else 0
            taken: list[int] = []
            for k in pending:
                if item.responses[k] <= room and (observed := item.observed_by([k])) <= held:
                    taken.append(k)
                    room -= item.responses[k]
                    held -= observed
            if taken:
                tokens = item.prompt + sum(item.responses[k] for k in taken)
                observed = item.observed_by(taken)
                rows[-1].append(Piece(index, tuple(sorted(taken)), tokens, 0.0, item.patches, observed))
                free, patches = room, patches + item.patches + observed
                pending = [k for k in pending if k not in taken]
            if pending:
                rows.append([])
                free, patches = budget.tokens_per_row, 0
    return [tuple(row) for row in rows]


def _spread(rows: Sequence[Row], budget: Budget, most: int = 0, tokens: int = 0) -> list[Outline]:
    """Deals rows to the shards of microbatches. A shard has at most `most` rows (0: as `budget` allows) of `tokens`
    tokens (0: `budget.tokens_per_row`). A row goes to the shard where the row adds the fewest patches. Ties go to the
    fewest patches, then to the fewest rows. A row that fits in none waits for the next microbatch."""
    waiting = sorted(rows, key=lambda row: row[0])
    media = any(piece.patches or piece.observed for row in rows for piece in row)
    allowed = (most,) if most else budget.rows
    plan: list[Outline] = []
    while waiting:
        wanted = min(-(-len(waiting) // budget.num_shards), allowed[-1])
        per_shard = next(size for size in allowed if size >= wanted)
        if media:
            packed, buffer, left = _dealt(waiting, budget.num_shards, per_shard, budget.patches[-1])
        else:  # without media, the shards take the rows in turn
            now, left = waiting[: budget.num_shards * per_shard], waiting[budget.num_shards * per_shard :]
            packed, buffer = tuple(tuple(now[shard :: budget.num_shards]) for shard in range(budget.num_shards)), 0
        size = next(size for size in allowed if size >= max(map(len, packed)))
        buffer = buffer if tokens else next(size for size in budget.patches if size >= buffer)
        sizes = {"rows": size, "columns": tokens or budget.tokens_per_row, "patches": buffer}
        plan.append(Outline(packed, sizes))
        assert len(left) < len(waiting), "a row has more patches than a shard may hold"
        waiting = left
    return plan


def _dealt(
    rows: Sequence[Row], num_shards: int, most_rows: int, most_patches: int
) -> tuple[tuple[tuple[Row, ...], ...], int, list[Row]]:
    shards: list[list[Row]] = [[] for _ in range(num_shards)]
    held, counts = np.zeros(num_shards, np.int64), np.zeros(num_shards, np.int64)  # patches and rows of each shard
    holders: dict[int, np.ndarray] = {}  # by item: the shards that hold its media
    left: list[Row] = []
    for row in rows:
        media = {piece.item: piece.patches for piece in row if piece.patches}
        added = np.full(num_shards, sum(media.values()) + sum(piece.observed for piece in row))
        for item in media.keys() & holders.keys():
            added -= media[item] * holders[item]
        free = np.flatnonzero((counts < most_rows) & (held + added <= most_patches))
        if not len(free):
            left.append(row)
            continue
        shard = free[np.lexsort((counts[free], held[free], added[free]))[0]]
        shards[shard].append(row)
        held[shard] += added[shard]
        counts[shard] += 1
        for item in media:
            holders.setdefault(item, np.zeros(num_shards, bool))[shard] = True
    return tuple(map(tuple, shards)), int(held.max()), left
