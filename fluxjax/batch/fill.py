"""Writes packed groups into the arrays of their microbatches.

The cells (row, column) of a microbatch are numbered row by row, so that each prompt and each response is a span of
successive cells. Sequences that are spread over devices are first laid out as one long row, as if there were one
device. The layout of the plan then gives the device and the column of each token of the long row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from models.config import VisionConfig
from models.inputs import ModelInput, PackedTokens, PromptInput, VisionInput, blank, concatenate, side_by_side
from sharding.planner.plan import Round, ShardPlan
from sharding.spread.buffers import SizedLayout, Spread, lay
from sharding.spread.shapes import Sizes

from ..base.scored import ENVIRONMENT, bytes_of, numbers_of, turn_numbers
from ..base.types import Columns, TrainBatch
from .composition import Composition, Microbatch
from .part import Part, Room, inputs_of, rows_of, sources_of
from .share import PROMPT, Groups, Outline, Piece, Row, Share, Source, TrainGroup


@dataclasses.dataclass
class Spans:
    """The spans of a microbatch's prompts and responses. Columns are counted within a row, features within a shard."""

    total: int  # number of cells
    prompts: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # first cell, segment, first feature
    inputs: list[ModelInput] = dataclasses.field(default_factory=list)  # inputs of each prompt
    responses: list[tuple[int, int, int, int, int]] = dataclasses.field(default_factory=list)
    # For each response: first cell, segment, branch, column of the token that predicts the response's first token,
    # rotary position of the response's first token.
    # For each response with media: first cell, first feature, inputs
    observed: list[tuple[int, int, PromptInput]] = dataclasses.field(default_factory=list)
    keys: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (draw, sample) of each response
    views: list[int] = dataclasses.field(default_factory=list)  # index of each response in its group
    data: list[bytes] = dataclasses.field(default_factory=list)  # `Response.data` of each response
    lengths: list[int] = dataclasses.field(default_factory=list)  # number of tokens of each response
    trained: list[int] = dataclasses.field(default_factory=list)  # number of tokens that are trained on, by response
    weights: list[float] = dataclasses.field(default_factory=list)  # loss weight of each token, by response
    advantages: list[np.ndarray] = dataclasses.field(default_factory=list)  # of each response, or of each of its turns

    def place(self, row: Row, cell: int, groups: Groups, features: Mapping[Source, int], share: bool) -> None:
        """Appends the spans of a row from `cell` on. `features` has the first of each sequence with media."""
        column = 0
        for segment, piece in enumerate(row, 1):
            group = groups[piece.item]
            prompt, (draw, numbers_G4, advantages_GU, data) = group.inputs.laid_out(), group.columns
            self.prompts.append((cell + column, segment, features.get((piece.item, PROMPT), 0)))
            self.inputs.append(prompt)
            column += len(prompt)
            last, numbers = column - 1, numbers_G4.tolist()
            for branch, k in enumerate(piece.responses, 1):
                sample, length, _, trained = numbers[k]
                if k in group.observed:
                    first = features.get((piece.item, k), 0)
                    self.observed.append((cell + column, first, group.observed[k]))
                branch = branch if share else 0
                self.responses.append((cell + column, segment, branch, last, prompt.next_position))
                self.keys.append((draw, sample))
                self.views.append(k)
                self.data.append(data[k])
                self.lengths.append(length)
                self.trained.append(trained)
                self.weights.append(group.weights[k])
                self.advantages.append(advantages_GU[k])
                column += length


def lay_out(share: Share, room: Room, tempered: bool) -> Composition:
    """Returns the microbatches of a share. With `tempered`, each batch has the sampling temperatures of its tokens.
    Without `room.share_prompts`, every piece must have one response."""
    here = [outline for outline in share.micros if outline.shards]
    elsewhere: list[Microbatch] = []
    for outline in share.micros:
        if not outline.shards:
            shapes = _shapes_alone(tuple(sorted(outline.sizes.items())), room, tempered)
            layout = None if outline.plan is None else SizedLayout(lay(outline.plan), outline.sizes)
            elsewhere.append(Microbatch(shapes, outline.owner, outline.work, layout))
    coming = [dataclasses.replace(outline, sizes=outline.coming) for outline in here if outline.coming is not None]
    batches = _written(coming, share, room, tempered).batches if coming else ()
    composition = _written(here, share, room, tempered)
    return dataclasses.replace(composition, elsewhere=tuple(elsewhere), filled=share.filled, coming=batches)


def _written(outlines: Sequence[Outline], share: Share, room: Room, tempered: bool) -> Composition:
    """Returns the microbatches of `outlines`. Of those that all devices compute, only the share's rows are written."""
    microbatches: list[Microbatch] = []
    keys: list[tuple[int, int]] = []
    views: list[int] = []
    cells, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    first = 0
    for outline in outlines:
        if outline.plan is None:
            spans, at, batch = _packed(outline, share, room, tempered)
            lengths, total, layout = np.array(spans.trained, np.int64), spans.total, None
        else:
            devices = share.shards if outline.owner is None else range(1)
            part: Part = outline.part or Part(share.groups, outline.pieces, outline.plan, room)
            spans, at, batch, layout = _spread(part, outline, devices, share, room, tempered)
            at, here, total = _on(layout, devices, layout.cells[at])
            ends = np.cumsum(np.array(spans.trained, np.int64))
            at, lengths = at[here], np.add.reduceat(here, [0, *ends[:-1].tolist()], dtype=np.int64)
        microbatches.append(Microbatch(batch, outline.owner, outline.work, layout))
        keys += spans.keys
        views += spans.views
        cells.append(first + at)
        counts.append(lengths)
        first += total
    return Composition(tuple(microbatches), tuple(keys), tuple(views), np.concatenate(cells), np.concatenate(counts))


def _packed(outline: Outline, share: Share, room: Room, tempered: bool) -> tuple[Spans, np.ndarray, TrainBatch]:
    sizes = outline.sizes
    rows, columns = sizes["rows"], sizes["columns"]
    spans, buffers = Spans(len(outline.shards) * rows * columns), list[VisionInput]()
    for shard, shard_rows in enumerate(outline.shards):
        features: dict[Source, int] = {}
        if room.vision is not None:
            buffer, features = _media(shard_rows, share.groups, sizes["patches"], room.vision)
            buffers.append(buffer)
        for row, pieces in enumerate(shard_rows):
            spans.place(pieces, (shard * rows + row) * columns, share.groups, features, room.share_prompts)
    vision = side_by_side(buffers, sizes["frame"]) if buffers else None
    arrays, trained = _arrays(spans, columns, share.version, tempered)
    return spans, trained, _train_batch(arrays, vision, sizes, chunk=room.chunk)


def _spread(
    part: Part, outline: Outline, devices: range, share: Share, room: Room, tempered: bool
) -> tuple[Spans, np.ndarray, TrainBatch, SizedLayout]:
    layout, media, vision = SizedLayout(part.layout, outline.sizes), part.media, None
    spans = Spans(sum(part.plan.lengths))
    spans.place(part.pieces, 0, share.groups, media.first_feature if media else {}, room.share_prompts)
    arrays, trained = _arrays(spans, spans.total, share.version, tempered)
    line = {name: array.reshape(*array.shape[:-2], -1) for name, array in arrays.items()}
    line["predecessor_BT"], spread = layout.spread(line["predecessor_BT"])
    spread = dataclasses.replace(spread, runs=layout.runs(line["segments_BT"], line["branches_BT"]))
    if media is not None:
        line["feature_index_BT"], vision = media.buffers(
            line["feature_index_BT"], layout.device, outline.sizes, devices
        )
    rows = _onto_rows(line, layout, devices)
    return spans, trained, _train_batch(rows, vision, outline.sizes, rows_of(spread, devices)), layout


@functools.lru_cache(maxsize=1024)
def _shapes_alone(sizes: tuple[tuple[str, int], ...], room: Room, tempered: bool) -> TrainBatch:
    """Returns the shapes of a microbatch that one device computes alone, in buffers of `sizes`."""
    nothing = np.zeros(0, np.int64)
    plan = ShardPlan(1, (2,), (0.0,), (1,), (0,), (Round(1, ((0,),)),))
    outline = Outline((((Piece(0, (0,)),),),), dict(sizes), plan=plan, owner=0)
    group = sized_group(sized_input(1, (nothing, nothing), ()), [1], {})
    (batch,) = _written([outline], Share((outline,), {0: group}, range(1), 0, frozenset()), room, tempered).batches
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)


def sized_input(tokens: int, shown: tuple[np.ndarray, np.ndarray], frames: Sequence[int]) -> ModelInput:
    """Returns inputs of `tokens` tokens with the features `shown` (see `ModelInput.shown`), and a frame pair of n
    patches for each n of `frames`. All other values are zeros, which take no memory."""
    index = np.full(tokens, -1, np.int32)
    where, which = shown
    index[where] = which
    patches = int(np.sum(frames, dtype=np.int64))
    vision = VisionInput(
        patches_PX=_zeros((patches, 0), np.float32),
        positions_P2=_zeros((patches, 2), np.int32),
        frame_segments_P=np.repeat(np.arange(1, len(frames) + 1, dtype=np.int32), frames),
        window_segments_P=_zeros((patches,), np.int32),
        frame_bound=1,  # not used, because `Outline.sizes` has the batch's bound
    )
    positions = _zeros((3, tokens), np.int32)
    return ModelInput(_zeros((tokens,), np.int32), positions, index, 0, vision if len(frames) else None)


def sized_group(inputs: ModelInput, lengths: Sequence[int], observed: Mapping[int, PromptInput]) -> TrainGroup:
    """Returns a group with these inputs of its prompt and its responses with media (`TrainGroup.observed`). Its
    responses have `lengths` tokens, and all other values are zeros."""
    count = len(lengths)
    numbers_G4 = np.array([(k, n, 0, n) for k, n in enumerate(lengths)], np.int64).reshape(-1, 4)
    data = tuple(bytes_of(k, None, (0,) * n, (0.0,) * n, (0,) * n) for k, n in enumerate(lengths))
    return TrainGroup("", inputs, Columns(-1, numbers_G4, np.zeros((count, 1)), data), np.zeros(count), observed)


def _zeros(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)


_FLOATS = "loss_weights_BT", "advantages_BT", "behaviour_logprobs_BT", "reference_logprobs_BT", "response_log_ratios_BT"
_PADDING = {"feature_index_BT": -1, "lags_BT": -1, "temperatures_BT": 1.0}  # other fields: 0


def _onto_rows(line: dict[str, np.ndarray], layout: SizedLayout, devices: range) -> dict[str, np.ndarray]:
    """Moves the values of one long row, `[..., tokens]`, into the rows of `devices`, `[..., devices, columns]`."""
    at, here, size = _on(layout, devices, layout.cells)
    rows = {}
    for name, values in line.items():
        flat = np.full((*values.shape[:-1], size), _PADDING.get(name, 0), values.dtype)
        flat[..., at[here]] = values[..., here]
        rows[name] = flat.reshape(*values.shape[:-1], len(devices), layout.columns)
    return rows


def _on(layout: SizedLayout, devices: range, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns (each cell's index within the rows of `devices`, whether it is in them, the number of their cells)."""
    at, size = cells - devices.start * layout.columns, len(devices) * layout.columns
    return at, (at >= 0) & (at < size), size


def span_cells(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all cells of all spans, one span after the other, and the index of each cell within its span."""
    ends = np.cumsum(lengths)
    within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + within, within


def _arrays(
    spans: Spans, tokens_per_row: int, version: int, tempered: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the arrays of a microbatch by field name, with all shards' rows in one stack `[rows, T]` (positions: `[3,
    rows, T]`), and the cells of all response tokens that are trained on, response after response."""
    total = spans.total
    arrays: dict[str, Any] = {name: np.zeros(total, np.int32) for name in ("tokens_BT", "segments_BT", "branches_BT")}
    arrays |= {name: np.zeros(total, np.float32) for name in _FLOATS}
    arrays |= {name: np.full(total, -1, np.int32) for name in ("feature_index_BT", "lags_BT")}
    arrays["positions_3BT"] = np.zeros((3, total), np.int32)
    if tempered:
        arrays["temperatures_BT"] = np.ones(total, np.float32)
    column = np.arange(total, dtype=np.int32) % tokens_per_row
    arrays["predecessor_BT"] = np.maximum(column - 1, 0)

    if not spans.prompts:  # no row of this microbatch is on this process's devices
        return _rows(arrays, tokens_per_row), np.zeros(0, np.int64)
    starts, segments, features = np.array(spans.prompts).T
    lengths = np.array([len(prompt) for prompt in spans.inputs])
    cells, _ = span_cells(starts, lengths)
    arrays["tokens_BT"][cells] = np.concatenate([prompt.token_ids_T for prompt in spans.inputs])
    arrays["positions_3BT"][:, cells] = np.concatenate([prompt.positions_3T for prompt in spans.inputs], axis=1)
    index = np.concatenate([prompt.feature_index_T for prompt in spans.inputs])
    arrays["feature_index_BT"][cells] = np.where(index >= 0, index + np.repeat(features, lengths), -1)
    arrays["segments_BT"][cells] = np.repeat(segments, lengths)
    arrays["predecessor_BT"][starts] = column[starts]  # a prompt's first token has no predecessor and names itself

    starts, segments, branches, last, position = np.array(spans.responses).T
    lengths = np.array(spans.lengths, np.int64)
    cells, within = span_cells(starts, lengths)
    numbers = [numbers_of(data) for data in spans.data]
    arrays["tokens_BT"][cells] = np.concatenate([response.tokens for response in numbers])
    arrays["behaviour_logprobs_BT"][cells] = np.concatenate([response.logprobs for response in numbers])
    versions = np.concatenate([response.versions for response in numbers])
    pairs = zip(spans.advantages, numbers, strict=True)
    turns = [a[turn_numbers(n.versions)] if len(a) > 1 else a.repeat(len(n.versions)) for a, n in pairs]
    arrays["advantages_BT"][cells] = np.concatenate(turns)
    arrays["lags_BT"][cells] = np.where(versions < 0, -1, version - versions)
    for name, values in (
        ("segments_BT", segments),
        ("branches_BT", branches),
        ("loss_weights_BT", spans.weights),
        *([("temperatures_BT", [response.temperature or 1.0 for response in numbers])] if tempered else ()),
    ):
        arrays[name][cells] = np.repeat(np.asarray(values, arrays[name].dtype), lengths)
    arrays["loss_weights_BT"][cells[versions == ENVIRONMENT]] = 0.0
    arrays["positions_3BT"][:, cells] = np.repeat(position, lengths) + within
    arrays["predecessor_BT"][starts] = last
    for start, first, shown in spans.observed:
        inputs, span = shown.laid_out(), slice(start, start + len(shown))
        arrays["positions_3BT"][:, span] = inputs.positions_3T
        index = inputs.feature_index_T
        arrays["feature_index_BT"][span] = np.where(index >= 0, index + first, -1)
    return _rows(arrays, tokens_per_row), cells[versions != ENVIRONMENT]


def _rows(arrays: dict[str, np.ndarray], tokens: int) -> dict[str, np.ndarray]:
    return {name: array.reshape(*array.shape[:-1], -1, tokens) for name, array in arrays.items()}


def _train_batch(
    rows: dict[str, np.ndarray], vision: VisionInput | None, sizes: Sizes, spread: Spread | None = None, chunk: int = 0
) -> TrainBatch:
    """The table of runs (`sharding.kernels.runs`) has `sizes["chunks"]` chunks for each row, each of `chunk` tokens."""
    inputs: dict[str, Any] = {name: rows[name] for name in rows if name in PackedTokens.__dataclass_fields__}
    beside: dict[str, Any] = {name: rows[name] for name in rows if name not in inputs}
    packed = PackedTokens(**inputs, vision=vision, spread=spread)
    packed = packed.with_runs(sizes["chunks"], chunk) if "chunks" in sizes else packed
    return TrainBatch(inputs=packed, **beside)


def _media(
    rows: Iterable[Row], groups: Groups, num_patches: int, vision: VisionConfig
) -> tuple[VisionInput, dict[Source, int]]:
    """Returns a shard's vision buffer, with the media of each sequence once, and each one's first feature."""
    first: dict[Source, int] = {}
    parts: list[VisionInput] = []
    used = 0
    for item, response in sources_of((piece for row in rows for piece in row), groups):
        part = inputs_of((item, response), groups).laid_out().vision
        if part is not None:
            first[item, response] = used // vision.merge_unit
            parts.append(part)
            used += part.num_patches
    return concatenate([*parts, blank(num_patches - used, vision.patch_values)]), first
