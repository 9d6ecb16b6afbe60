"""The share of a step that each of several processes lays out: the rows of its own devices, from the groups in them.

The plan of a step is made once, of sizes alone, by the process that knows all groups. The other processes get their
share of it, and read no prompt, no response and no pixel of the rest. Where sequences are spread over devices, the
places of a device's tokens and features depend on the sizes of what its neighbours have, so that these are sent, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import chain

import jax
import numpy as np

from models.inputs import ModelInput, VisionInput
from sharding.planner.plan import Round, ShardPlan
from sharding.spread.buffers import lay
from sharding.spread.shapes import Sizes

from ..base.types import Response, Reward, Sample, TrainBatch
from .composition import Composition, Filled, Microbatch, PackedRows, Piece, Row, TrainGroup
from .fill import SizedRows, lay_out_parts
from .part import Part, Room, SizedPart


@dataclasses.dataclass(frozen=True)
class PlannedRows:
    """A microbatch that a shard plan lays out, without its groups: see `part.Part` and `part.SizedPart`.

    If a device of another process computes it alone, `pieces` are left out: only its shape and its work matter. The
    plan exists only in the process that made it.
    """

    plan: ShardPlan | None
    pieces: tuple[Piece, ...]
    sizes: Sizes
    owner: int | None = None
    work: float | None = None

    def elsewhere(self, shards: range) -> bool:
        """Returns True if none of these devices computes any of the microbatch."""
        return self.owner is not None and self.owner not in shards


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a step that one process lays out. `micros` are the step's microbatches, for the devices `shards` of
    the mesh only; their items are `groups`. Groups that are not `needed` have nothing but their sizes here. `coming`
    has (microbatch, new sizes of its buffers) where a program is to be compiled for them."""

    micros: tuple[PackedRows | PlannedRows, ...]
    groups: Sequence[TrainGroup]
    shards: range
    needed: frozenset[int]
    filled: tuple[Filled, ...] = ()  # of the microbatches with all of their shards
    coming: tuple[tuple[int, Sizes], ...] = ()


def share_rows(outline: Sequence[SizedRows], shards: range) -> Share:
    """Returns the share of the process that has these shards, with the responses in their rows and no others."""
    rows = [sized.micro.shards[shards.start : shards.stop] for sized in outline]
    used: dict[int, list[int]] = {}  # responses, by item
    for piece in chain.from_iterable(row for micro in rows for shard in micro for row in shard):
        used.setdefault(piece.item, []).extend(piece.responses)
    number = {item: k for k, item in enumerate(sorted(used))}
    place = {item: {response: k for k, response in enumerate(sorted(used[item]))} for item in used}

    def here(row: Row) -> Row:
        return tuple(Piece(number[item], tuple(place[item][k] for k in responses)) for item, responses in row)

    micros = [
        dataclasses.replace(sized.micro, shards=tuple(tuple(map(here, shard)) for shard in micro))
        for sized, micro in zip(outline, rows, strict=True)
    ]
    groups = [outline[0].groups[item].only(sorted(used[item])) for item in number]
    return Share(tuple(micros), groups, shards, frozenset(number.values()), *_filled_and_coming(outline))


def _filled_and_coming(
    outline: Sequence[SizedRows] | Sequence[SizedPart],
) -> tuple[tuple[Filled, ...], tuple[tuple[int, Sizes], ...]]:
    coming = [(number, sized.coming) for number, sized in enumerate(outline) if sized.coming is not None]
    return tuple(sized.filled for sized in outline), tuple(coming)


def share_parts(outline: Sequence[SizedPart], shards: range) -> Share:
    """Returns the share of the process that has these devices. It takes part in what all compute together, and needs
    those groups of which a token or a frame lies on one of its devices. Of microbatches that are elsewhere, only shapes
    count.

    Its groups keep the order that they have in the parts, by which media are numbered: all processes send features by
    one route.
    """
    planned = [PlannedRows(sized.part.plan, (), sized.sizes, sized.part.owner, sized.part.work) for sized in outline]
    here = [None if rows.elsewhere(shards) else sized.part for rows, sized in zip(planned, outline, strict=True)]
    lists = {id(part.groups): part.groups for part in here if part is not None}  # several parts have the same list
    used = {(id(part.groups), piece.item) for part in here if part is not None for piece in part.pieces}
    order = [(of, item) for of, groups in lists.items() for item in range(len(groups)) if (of, item) in used]
    number = {place: k for k, place in enumerate(order)}
    needed: set[int] = set()
    micros: list[PlannedRows] = []
    for rows, part in zip(planned, here, strict=True):
        if part is None:
            micros.append(rows)
            continue
        local = {item: number[id(part.groups), item] for item in {piece.item for piece in part.pieces}}
        needed |= {local[item] for item in part.items_on(shards)}
        pieces = tuple(Piece(local[piece.item], piece.responses) for piece in part.pieces)
        micros.append(dataclasses.replace(rows, pieces=pieces))
    local_groups = [lists[of][item] for of, item in order]
    return Share(tuple(micros), local_groups, shards, frozenset(needed), *_filled_and_coming(outline))


def lay_out_share(share: Share, room: Room, tempered: bool) -> Composition:
    """Returns the microbatches of a share of shard plans. `tempered` says that they have the temperature of each
    token."""
    parts: list[SizedPart] = []
    elsewhere: list[Microbatch] = []
    for micro in share.micros:
        assert isinstance(micro, PlannedRows)
        if micro.elsewhere(share.shards):
            layout = None if micro.plan is None else lay(micro.plan).sized(micro.sizes)
            shapes = _shapes_alone(tuple(sorted(micro.sizes.items())), room, tempered)
            elsewhere.append(Microbatch(shapes, micro.owner, micro.work, layout))
        else:
            assert micro.plan is not None
            part = Part(share.groups, micro.pieces, micro.plan, room, micro.owner, micro.work)
            parts.append(SizedPart(part, micro.sizes))
    composition = lay_out_parts(parts, room.share_prompts, share.shards)
    coming = [SizedPart(parts[number].part, sizes) for number, sizes in share.coming]
    batches = lay_out_parts(coming, room.share_prompts, share.shards).batches if coming else ()
    return dataclasses.replace(composition, elsewhere=tuple(elsewhere), filled=share.filled, coming=batches)


@functools.lru_cache(maxsize=1024)
def _shapes_alone(sizes: tuple[tuple[str, int], ...], room: Room, tempered: bool) -> TrainBatch:
    """Returns the shapes of a microbatch, in buffers of these sizes, that one device computes alone."""
    nothing = np.zeros(0, np.int64)
    prompt, temperature = sized_input(1, (nothing, nothing), ()), 1.0 if tempered else None
    group = TrainGroup("", prompt, sized_samples([1]), np.zeros(1), temperature=temperature)
    plan = ShardPlan(1, (2,), (0.0,), (1,), (0,), (Round(1, ((0,),)),))
    part = SizedPart(Part([group], [Piece(0, (0,))], plan, room, 0), dict(sizes))
    (batch,) = lay_out_parts([part], room.share_prompts).batches
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)


# --- groups of which a process knows the sizes ----------------------------------------------------


def sized_input(tokens: int, shown: tuple[np.ndarray, np.ndarray], frames: Sequence[int]) -> ModelInput:
    """Returns a prompt of `tokens` tokens, with features `shown` as in `ModelInput.shown`, and frame pairs of so many
    patches (none: a prompt without media). Everything else about it is zero, and takes no memory."""
    index = np.full(tokens, -1, np.int32)
    where, which = shown
    index[where] = which
    patches = int(np.sum(frames, dtype=np.int64))
    segments = np.repeat(np.arange(1, len(frames) + 1, dtype=np.int32), frames)
    vision = VisionInput(
        patches_PX=_zeros((patches, 0), np.float32),
        positions_P2=_zeros((patches, 2), np.int32),
        frame_segments_P=segments,
        window_segments_P=_zeros((patches,), np.int32),
        frame_bound=1,  # that of the batch is planned
    )
    positions = _zeros((3, tokens), np.int32)
    return ModelInput(_zeros((tokens,), np.int32), positions, index, 0, vision if len(frames) else None)


def sized_samples(lengths: Sequence[int]) -> tuple[Sample, ...]:
    """Returns responses of so many tokens, of which nothing else is known."""
    return tuple(
        Sample(Response("", -1, k, (0,) * n, (0.0,) * n, (0,) * n, "stop", 1.0), Reward(0.0, False), 0.0)
        for k, n in enumerate(lengths)
    )


def _zeros(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)
