"""Writes packed groups into the arrays of their microbatches.

All cells (row, column) of all microbatches form one flat run here, row by row, microbatch after microbatch; a response
or a prompt is a span of this run. So one scatter writes each array, however short the responses. Sequences that are
spread over devices are first laid out as one long row, as if there were one device; the layout of their plan then gives
the device and column of each token of that row.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from models.config import VisionConfig
from models.inputs import ModelInput, PackedTokens, VisionInput, blank, concatenate, side_by_side
from sharding.spread.buffers import SizedLayout, Spread
from sharding.spread.shapes import Sizes

from ..base.types import Sample, TrainBatch
from .composition import Composition, Filled, Microbatch, PackedRows, Row, TrainGroup
from .part import SizedPart, rows_of


@dataclasses.dataclass
class Spans:
    """The positions of all prompts and responses, span by span. Columns count within a row, features within a shard."""

    total: int = 0  # cells
    tempered: bool = False  # whether each token's temperature is recorded
    prompts: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # cell, segment, first feature
    inputs: list[ModelInput] = dataclasses.field(default_factory=list)  # of each prompt
    responses: list[tuple[int, int, int, int, int]] = dataclasses.field(default_factory=list)
    # cell, segment, branch, column of the token that predicts the first one, rotary position of the first one
    samples: list[Sample] = dataclasses.field(default_factory=list)  # of each response
    weights: list[float] = dataclasses.field(default_factory=list)  # of each response
    # versions of the weights: the step that trains each response
    versions: list[int] = dataclasses.field(default_factory=list)
    temperatures: list[float] = dataclasses.field(default_factory=list)  # of each response, if recorded

    def place(self, row: Row, cell: int, groups: Sequence[TrainGroup], features: dict[int, int], share: bool) -> None:
        """Appends the spans of a row whose first cell is `cell`."""
        column = 0
        for segment, piece in enumerate(row, 1):
            group = groups[piece.item]
            prompt = group.inputs.laid_out()
            self.prompts.append((cell + column, segment, features.get(piece.item, 0)))
            self.inputs.append(prompt)
            column += len(prompt)
            last = column - 1
            for branch, k in enumerate(piece.responses, 1):
                sample = group.samples[k]
                branch = branch if share else 0
                self.responses.append((cell + column, segment, branch, last, prompt.next_position))
                self.samples.append(sample)
                self.weights.append(group.weights[k])
                self.versions.append(group.version)
                if self.tempered:
                    self.temperatures.append(sample.response.temperature or group.temperature or 1.0)
                column += sample.response.num_tokens

    def keys(self) -> tuple[tuple[int, int], ...]:
        """Returns the (draw, sample) of each response."""
        return tuple((sample.response.draw, sample.response.sample) for sample in self.samples)

    def response_lengths(self) -> np.ndarray:
        return np.array([sample.response.num_tokens for sample in self.samples], np.int64)

    def response_cells(self) -> np.ndarray:
        """Returns the cells of all response tokens, response after response."""
        return span_cells(np.array([span[0] for span in self.responses], np.int64), self.response_lengths())[0]


@dataclasses.dataclass(frozen=True)
class SizedRows:
    """A microbatch of packed rows, in buffers of given sizes."""

    micro: PackedRows
    filled: Filled
    groups: Sequence[TrainGroup]  # its items
    coming: Sizes | None = None  # those that it would have had, if they were compiled

    @property
    def program(self) -> tuple[object, ...]:
        """A key that is equal for microbatches that the same compiled program computes."""
        micro = self.micro
        return (len(micro.shards), micro.rows, micro.tokens, micro.patches, micro.frame)


def lay_out_rows(
    plan: Sequence[PackedRows],
    groups: Sequence[TrainGroup],
    share_prompts: bool,
    vision: VisionConfig | None,
    tempered: bool = False,
) -> Composition:
    """Returns the microbatches of `plan`, whose items are `groups`. Without `share_prompts` every piece has one
    response. With `tempered`, they record the temperature at which each token was sampled."""
    batches: list[TrainBatch] = []
    keys: list[tuple[int, int]] = []
    cells: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    first = 0
    for micro in plan:
        spans, buffers = Spans(len(micro.shards) * micro.rows * micro.tokens, tempered), list[VisionInput]()
        for shard, rows in enumerate(micro.shards):
            features: dict[int, int] = {}
            if vision is not None:
                buffer, features = _media(rows, groups, micro.patches, vision)
                buffers.append(buffer)
            for row, pieces in enumerate(rows):
                spans.place(pieces, (shard * micro.rows + row) * micro.tokens, groups, features, share_prompts)
        batches.append(
            _train_batch(_arrays(spans, micro.tokens), side_by_side(buffers, micro.frame) if buffers else None)
        )
        keys += spans.keys()
        cells.append(first + spans.response_cells())
        lengths.append(spans.response_lengths())
        first += spans.total
    microbatches = tuple(map(Microbatch, batches))
    return Composition(microbatches, tuple(keys), np.concatenate(cells), np.concatenate(lengths))


def lay_out_parts(parts: Sequence[SizedPart], share_prompts: bool, local_devices: range | None = None) -> Composition:
    """Returns a microbatch for each part. Parts that all devices compute together stand first; with `local_devices`
    they have only the rows of these devices."""
    microbatches: list[Microbatch] = []
    keys: list[tuple[int, int]] = []
    none = np.zeros(0, np.int64)
    cells, counts = [none], [none]
    first = 0
    for sized in parts:
        part, layout = sized.part, sized.layout
        devices = local_devices if local_devices is not None and part.owner is None else range(part.plan.num_devices)
        tempered = any(group.temperature is not None for group in part.groups)
        spans = Spans(sum(part.plan.lengths), tempered)
        spans.place(part.pieces, 0, part.groups, part.media.first_feature if part.media else {}, share_prompts)
        microbatches.append(Microbatch(_lay_out_part(sized, spans, devices), part.owner, part.work, layout))
        keys += spans.keys()
        at = layout.cells[spans.response_cells()] - devices.start * layout.columns
        here = (at >= 0) & (at < len(devices) * layout.columns)
        cells.append(first + at[here])
        lengths = spans.response_lengths()
        counts.append(np.add.reduceat(here, np.cumsum(lengths) - lengths, dtype=np.int64))
        first += len(devices) * layout.columns
    return Composition(tuple(microbatches), tuple(keys), np.concatenate(cells), np.concatenate(counts))


def _lay_out_part(sized: SizedPart, spans: Spans, devices: range) -> TrainBatch:
    line = {name: array.reshape(*array.shape[:-2], -1) for name, array in _arrays(spans, spans.total).items()}
    media, device = sized.part.media, sized.layout.device
    line["predecessor"], spread = sized.layout.spread(line["predecessor"])
    vision = None
    if media is not None:
        line["feature_index"], vision = media.buffers(line["feature_index"], device, sized.sizes, devices)
    return _train_batch(_onto_rows(line, sized.layout, devices), vision, rows_of(spread, devices))


_PADDING = {"feature_index": -1, "lags": -1, "temperatures": 1.0}  # 0 elsewhere


def _onto_rows(line: dict[str, np.ndarray], layout: SizedLayout, devices: range) -> dict[str, np.ndarray]:
    """Moves the tokens of one long row to the rows of `devices`: `[..., tokens]` -> `[..., devices, columns]`."""
    size = len(devices) * layout.columns
    at = layout.cells - devices.start * layout.columns
    here = (at >= 0) & (at < size)
    rows = {}
    for name, values in line.items():
        flat = np.full((*values.shape[:-1], size), _PADDING.get(name, 0), values.dtype)
        flat[..., at[here]] = values[..., here]
        rows[name] = flat.reshape(*values.shape[:-1], len(devices), layout.columns)
    return rows


def span_cells(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all cells of all spans, one span after the other, and the index of each cell within its span."""
    ends = np.cumsum(lengths)
    within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + within, within


def _arrays(spans: Spans, tokens_per_row: int) -> dict[str, np.ndarray]:
    """Returns the arrays of all microbatches as one tall stack of rows `[rows, T]` (positions `[3, rows, T]`)."""
    total = spans.total
    arrays: dict[str, Any] = {name: np.zeros(total, np.int32) for name in ("tokens", "segments", "branches")}
    arrays |= {name: np.zeros(total, np.float32) for name in ("loss_weights", "advantages", "behaviour")}
    arrays |= {name: np.zeros(total, np.float32) for name in ("reference", "response_log_ratios")}
    arrays |= {name: np.full(total, -1, np.int32) for name in ("feature_index", "lags")}
    arrays["positions"] = np.zeros((3, total), np.int32)
    if spans.tempered:
        arrays["temperatures"] = np.ones(total, np.float32)
    column = np.arange(total, dtype=np.int32) % tokens_per_row
    arrays["predecessor"] = np.maximum(column - 1, 0)

    if not spans.prompts:  # the devices of this process have no rows in this microbatch
        return _rows(arrays, tokens_per_row)
    starts, segments, features = np.array(spans.prompts).T
    lengths = np.array([len(prompt) for prompt in spans.inputs])
    cells, _ = span_cells(starts, lengths)
    arrays["tokens"][cells] = np.concatenate([prompt.token_ids_T for prompt in spans.inputs])
    arrays["positions"][:, cells] = np.concatenate([prompt.positions_3T for prompt in spans.inputs], axis=1)
    index = np.concatenate([prompt.feature_index_T for prompt in spans.inputs])
    arrays["feature_index"][cells] = np.where(index >= 0, index + np.repeat(features, lengths), -1)
    arrays["segments"][cells] = np.repeat(segments, lengths)
    arrays["predecessor"][starts] = column[starts]  # no token predicts a first token; stay within the segment

    starts, segments, branches, last, position = np.array(spans.responses).T
    lengths = spans.response_lengths()
    cells, within = span_cells(starts, lengths)
    responses = [sample.response for sample in spans.samples]
    numbers = zip(*(response.arrays for response in responses), strict=True)
    for name, parts in zip(("tokens", "behaviour", "lags"), numbers, strict=True):
        arrays[name][cells] = np.concatenate(parts)
    versions = arrays["lags"][cells]
    arrays["lags"][cells] = np.where(versions < 0, -1, np.repeat(spans.versions, lengths) - versions)
    for name, values in (
        ("segments", segments),
        ("branches", branches),
        ("loss_weights", spans.weights),
        ("advantages", [sample.advantage for sample in spans.samples]),
        *([("temperatures", spans.temperatures)] if spans.tempered else ()),
    ):
        arrays[name][cells] = np.repeat(np.asarray(values, arrays[name].dtype), lengths)
    arrays["positions"][:, cells] = np.repeat(position, lengths) + within
    arrays["predecessor"][starts] = last
    return _rows(arrays, tokens_per_row)


def _rows(arrays: dict[str, np.ndarray], tokens: int) -> dict[str, np.ndarray]:
    return {name: array.reshape(*array.shape[:-1], -1, tokens) for name, array in arrays.items()}


def _train_batch(arrays: dict[str, np.ndarray], vision: VisionInput | None, spread: Spread | None = None) -> TrainBatch:
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
    rows: Iterable[Row], groups: Sequence[TrainGroup], num_patches: int, vision: VisionConfig
) -> tuple[VisionInput, dict[int, int]]:
    """Returns a shard's vision buffer, with the media of its groups once each, and the first merged feature of each
    group."""
    first: dict[int, int] = {}
    parts: list[VisionInput] = []
    used = 0
    for item in sorted({piece.item for row in rows for piece in row}):
        part = groups[item].inputs.laid_out().vision
        if part is not None:
            first[item] = used // vision.merge_unit
            parts.append(part)
            used += part.num_patches
    return concatenate([*parts, blank(num_patches - used, vision.patch_values)]), first
