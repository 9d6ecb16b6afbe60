"""Writes packed groups into the arrays of their microbatches.

All cells (row, column) of all microbatches form one flat run here, row by row, microbatch after microbatch; a
response or a prompt is a span of it. So each array is written with one scatter, however short the responses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from models.config import VisionConfig
from models.inputs import ModelInput, PackedTokens, VisionInput, frame_bound
from models.processing.vision_input import concatenate
from sharding.spread.buffers import SizedLayout, Spread
from sharding.spread.route import Route

from ..base.types import Sample, TrainBatch
from .rows import Item, PackedRows, Row

COLLECTIVE = -1  # among the devices of microbatches: all of them, together


@dataclasses.dataclass(frozen=True)
class TrainGroup:
    """A group to lay out: its prompt, its non-empty samples in order, the loss weight of a token of each."""

    name: str  # of the prompt, for error messages
    inputs: ModelInput
    samples: tuple[Sample, ...]
    weights: np.ndarray
    version: int = 0  # of the weights that are trained
    temperature: float | None = None  # of samples that do not say theirs; None: no token's temperature is written down

    @property
    def item(self) -> Item:
        patches = self.inputs.vision.num_patches if self.inputs.vision is not None else 0
        return Item(self.name, len(self.inputs), tuple(len(s.response.token_ids) for s in self.samples), patches)

    def only(self, responses: Sequence[int]) -> TrainGroup:
        """The group with these of its samples."""
        samples = tuple(self.samples[k] for k in responses)
        return dataclasses.replace(self, samples=samples, weights=self.weights[list(responses)])


@dataclasses.dataclass(frozen=True)
class Composition:
    """The microbatches of one step, and where each response lies in them.

    `keys[i]` is the (draw, sample) of response `i`, which has `lengths[i]` tokens. `cells` says where these are,
    response after response: indices into the token buffers of all microbatches, flattened, one after the other.
    `layouts` are those of the shard plans, one a microbatch, where sequences are spread over devices.

    `devices`, empty if all devices take part in every microbatch, names the one that computes each microbatch alone, in
    this order; or it is `COLLECTIVE` for one that all compute together, before any of the others. Then `work` is what
    each is predicted to cost a device that takes part, in any unit: the one with the most to do, if all do.
    """

    batches: tuple[TrainBatch, ...]
    keys: tuple[tuple[int, int], ...]
    cells: np.ndarray
    lengths: np.ndarray
    layouts: tuple[SizedLayout, ...] = ()
    devices: tuple[int, ...] = ()
    work: tuple[float, ...] = ()

    def fill(self) -> tuple[float, float]:
        """Used over padded size of the token and of the patch buffers, between 0 and 1; 0 patches for text models."""
        tokens = np.concatenate([batch.inputs.segments_BT.reshape(-1) for batch in self.batches])
        media = [batch.inputs.vision.frame_segments_P for batch in self.batches if batch.inputs.vision is not None]
        return float(np.mean(tokens != 0)), float(np.mean(np.concatenate(media) != 0)) if media else 0.0


@dataclasses.dataclass
class Spans:
    """Where everything goes, span by span. Columns count within a row, features within a shard."""

    total: int = 0  # cells
    prompts: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # cell, segment, first feature
    inputs: list[ModelInput] = dataclasses.field(default_factory=list)  # of each prompt
    responses: list[tuple[int, int, int, int, int]] = dataclasses.field(default_factory=list)
    # cell, segment, branch, column of the token that predicts the first one, rotary position of the first one
    samples: list[Sample] = dataclasses.field(default_factory=list)  # of each response
    weights: list[float] = dataclasses.field(default_factory=list)  # of each response
    versions: list[int] = dataclasses.field(default_factory=list)  # that train each response
    temperatures: list[float] = dataclasses.field(default_factory=list)  # of each response, or none at all

    def place(self, row: Row, cell: int, entries: Sequence[TrainGroup], features: dict[int, int], share: bool) -> None:
        """Appends the spans of a row whose first cell is `cell`."""
        column = 0
        for segment, piece in enumerate(row, 1):
            entry = entries[piece.item]
            self.prompts.append((cell + column, segment, features.get(piece.item, 0)))
            self.inputs.append(entry.inputs)
            column += len(entry.inputs)
            last = column - 1
            for branch, k in enumerate(piece.responses, 1):
                sample = entry.samples[k]
                branch = branch if share else 0
                self.responses.append((cell + column, segment, branch, last, entry.inputs.next_position))
                self.samples.append(sample)
                self.weights.append(entry.weights[k])
                self.versions.append(entry.version)
                if entry.temperature is not None:
                    self.temperatures.append(sample.response.temperature or entry.temperature)
                column += len(sample.response.token_ids)

    def response_lengths(self) -> np.ndarray:
        return np.array([len(sample.response.token_ids) for sample in self.samples])

    def response_cells(self) -> np.ndarray:
        """The cells of all response tokens, response after response."""
        return _cells(np.array([span[0] for span in self.responses]), self.response_lengths())[0]


def lay_out(
    plan: Sequence[PackedRows],
    entries: Sequence[TrainGroup],
    tokens_per_row: int,
    share_prompts: bool,
    vision: VisionConfig | None,
) -> Composition:
    """The microbatches of `plan`, whose items are `entries`. Without `share_prompts` every piece has one response."""
    spans = Spans()
    bound = frame_bound_of(entries)
    visions: list[VisionInput | None] = []
    for micro in plan:
        buffers: list[VisionInput] = []
        for shard, rows in enumerate(micro.shards):
            features: dict[int, int] = {}
            if vision is not None:
                buffer, features = _media(rows, entries, micro.patches, vision)
                buffers.append(buffer)
            for row, pieces in enumerate(rows):
                cell = spans.total + (shard * micro.rows + row) * tokens_per_row
                spans.place(pieces, cell, entries, features, share_prompts)
        visions.append(side_by_side(buffers, bound) if buffers else None)
        spans.total += len(micro.shards) * micro.rows * tokens_per_row

    arrays = fill(spans, tokens_per_row)
    edges = [0, *np.cumsum([len(micro.shards) * micro.rows for micro in plan]).tolist()]
    batches = tuple(
        train_batch({name: array[..., start:stop, :] for name, array in arrays.items()}, media)
        for (start, stop), media in zip(pairwise(edges), visions, strict=True)
    )
    keys = tuple((sample.response.draw, sample.response.sample) for sample in spans.samples)
    return Composition(batches, keys, spans.response_cells(), spans.response_lengths())


def _cells(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All cells of all spans, one span after the other, and the index of each cell within its span."""
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + within, within


def fill(spans: Spans, tokens_per_row: int) -> dict[str, np.ndarray]:
    """The arrays of all microbatches as one tall stack of rows `[rows, T]` (positions `[3, rows, T]`)."""
    total = spans.total
    arrays: dict[str, Any] = {name: np.zeros(total, np.int32) for name in ("tokens", "segments", "branches")}
    arrays |= {name: np.zeros(total, np.float32) for name in ("loss_weights", "advantages", "behaviour")}
    arrays |= {name: np.zeros(total, np.float32) for name in ("reference", "response_log_ratios")}
    arrays |= {name: np.full(total, -1, np.int32) for name in ("feature_index", "lags")}
    arrays["positions"] = np.zeros((3, total), np.int32)
    if spans.temperatures:
        arrays["temperatures"] = np.ones(total, np.float32)
    column = np.arange(total, dtype=np.int32) % tokens_per_row
    arrays["predecessor"] = np.maximum(column - 1, 0)

    starts, segments, features = np.array(spans.prompts).T
    lengths = np.array([len(one) for one in spans.inputs])
    cells, _ = _cells(starts, lengths)
    arrays["tokens"][cells] = np.concatenate([one.token_ids_T for one in spans.inputs])
    arrays["positions"][:, cells] = np.concatenate([one.positions_3T for one in spans.inputs], axis=1)
    own = np.concatenate([one.feature_index_T for one in spans.inputs])
    arrays["feature_index"][cells] = np.where(own >= 0, own + np.repeat(features, lengths), -1)
    arrays["segments"][cells] = np.repeat(segments, lengths)
    arrays["predecessor"][starts] = column[starts]  # nothing predicts a first token; stay within the segment

    starts, segments, branches, last, position = np.array(spans.responses).T
    lengths = spans.response_lengths()
    cells, within = _cells(starts, lengths)
    responses = [sample.response for sample in spans.samples]
    for name, parts in (
        ("tokens", (response.token_ids for response in responses)),
        ("behaviour", (response.logprobs for response in responses)),
        ("lags", (response.versions for response in responses)),
    ):
        arrays[name][cells] = np.fromiter(chain.from_iterable(parts), arrays[name].dtype, len(cells))
    versions = arrays["lags"][cells]
    arrays["lags"][cells] = np.where(versions < 0, -1, np.repeat(spans.versions, lengths) - versions)
    for name, values in (
        ("segments", segments),
        ("branches", branches),
        ("loss_weights", spans.weights),
        ("advantages", [sample.advantage for sample in spans.samples]),
        *([("temperatures", spans.temperatures)] if spans.temperatures else ()),
    ):
        arrays[name][cells] = np.repeat(np.asarray(values, arrays[name].dtype), lengths)
    arrays["positions"][:, cells] = np.repeat(position, lengths) + within
    arrays["predecessor"][starts] = last
    return {name: array.reshape(*array.shape[:-1], -1, tokens_per_row) for name, array in arrays.items()}


def train_batch(arrays: dict[str, np.ndarray], vision: VisionInput | None, spread: Spread | None = None) -> TrainBatch:
    inputs = PackedTokens(
        tokens_BT=arrays["tokens"],
        segments_BT=arrays["segments"],
        branches_BT=arrays["branches"],
        positions_3BT=arrays["positions"],
        predecessor_BT=arrays["predecessor"],
        feature_index_BT=arrays["feature_index"],
        vision=vision,
        spread=spread,
        temperatures_BT=arrays.get("temperatures"),
    )
    return TrainBatch(
        inputs=inputs,
        loss_weights_BT=arrays["loss_weights"],
        advantages_BT=arrays["advantages"],
        behaviour_logprobs_BT=arrays["behaviour"],
        reference_logprobs_BT=arrays["reference"],
        response_log_ratios_BT=arrays["response_log_ratios"],
        lags_BT=arrays["lags"],
    )


def _media(
    rows: Iterable[Row], entries: Sequence[TrainGroup], num_patches: int, vision: VisionConfig
) -> tuple[VisionInput, dict[int, int]]:
    """A shard's vision buffer with the media of its groups once each, and the first merged feature of each group."""
    first: dict[int, int] = {}
    parts: list[VisionInput] = []
    used = 0
    for item in sorted({piece.item for row in rows for piece in row}):
        part = entries[item].inputs.vision
        if part is not None:
            first[item] = used // vision.merge_unit
            parts.append(part)
            used += part.num_patches
    return concatenate([*parts, blank(num_patches - used, vision)]), first


def blank(num_patches: int, vision: VisionConfig) -> VisionInput:
    """Padding: zero pixels in segment 0."""
    return VisionInput(
        patches_PX=np.zeros((num_patches, vision.patch_values), np.float32),
        positions_P2=np.zeros((num_patches, 2), np.int32),
        frame_segments_P=np.zeros(num_patches, np.int32),
        window_segments_P=np.zeros(num_patches, np.int32),
        frame_bound=1,
    )


def frame_bound_of(entries: Iterable[TrainGroup]) -> int:
    """One bound for the whole step: it is static, and each other value would be compiled anew."""
    visions = [entry.inputs.vision for entry in entries if entry.inputs.vision is not None]
    return max((one.frame_bound or frame_bound(one.frame_segments_P) for one in visions), default=1)


def side_by_side(shards: Sequence[VisionInput], bound: int, way: Route | None = None) -> VisionInput:
    """The buffers of all shards along one axis; segment ids stay each shard's own."""
    if len(shards) == 1:
        return dataclasses.replace(shards[0], frame_bound=bound, route=way)
    return VisionInput(
        patches_PX=np.concatenate([shard.patches_PX for shard in shards]),
        positions_P2=np.concatenate([shard.positions_P2 for shard in shards]),
        frame_segments_P=np.concatenate([shard.frame_segments_P for shard in shards]),
        window_segments_P=np.concatenate([shard.window_segments_P for shard in shards]),
        frame_bound=bound,
        route=way,
    )
