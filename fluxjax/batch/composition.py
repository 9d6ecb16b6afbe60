"""The data of the composer: its input, and what it hands to the learner.

Its input are groups, and the pieces of groups that are computed as one sequence each: sizes and order only. Its output
are a step's microbatches, and where each response lies in them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from models.inputs import PromptInput
from sharding.planner.plan import ShardPlan
from sharding.spread.buffers import SizedLayout

from ..base.types import Columns, Sample, TrainBatch
from ..config import ConfigError


class Item(NamedTuple):
    """The sizes of a group, for packing: tokens of its prompt and of each of its responses (all positive), and
    patches."""

    name: str  # of the prompt, for error messages
    prompt: int
    responses: tuple[int, ...]
    patches: int = 0


class Piece(NamedTuple):
    """Responses of one item (indices, ascending) in one row, behind one copy of the prompt."""

    item: int
    responses: tuple[int, ...]


Row = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """`shards[s][r]` is row `r` of shard `s`; each shard is padded to `rows` rows of `tokens` tokens and `patches`
    patches, and no frame pair has more than `frame` of these (0: the text model has none)."""

    rows: int
    tokens: int
    patches: int
    shards: tuple[tuple[Row, ...], ...]
    frame: int = 0


@dataclasses.dataclass(frozen=True)
class TrainGroup:
    """A group to lay out: its prompt, its non-empty samples in order, and for each the loss weight of a token."""

    name: str  # of the prompt, for error messages
    inputs: PromptInput
    samples: tuple[Sample, ...]
    weights: np.ndarray
    version: int = 0  # of the weights that are trained
    temperature: float | None = None  # of samples that do not say theirs; None: no token's temperature is written down

    @functools.cached_property
    def columns(self) -> Columns:
        return Columns.of(self.samples)

    @functools.cached_property
    def item(self) -> Item:
        return self._sized(tuple(sample.response.num_tokens for sample in self.samples))

    def known(self, columns: Columns, lengths: Sequence[int]) -> TrainGroup:
        """Stores the columns and the lengths of the samples, which need not be read again, and returns the group
        itself."""
        vars(self).update(columns=columns, item=self._sized(tuple(lengths)))
        return self

    def _sized(self, lengths: tuple[int, ...]) -> Item:
        patches_PX = self.inputs.patches_PX
        return Item(self.name, len(self.inputs), lengths, 0 if patches_PX is None else len(patches_PX))

    def only(self, responses: Sequence[int]) -> TrainGroup:
        """Returns the group with only these of its samples, in order."""
        if len(responses) == len(self.samples):
            return self
        some = list(responses)
        samples = tuple(self.samples[k] for k in some)
        group = dataclasses.replace(self, samples=samples, weights=self.weights[some])
        if "columns" in vars(self):
            draw, numbers_G3, advantages_G, data = self.columns
            columns = Columns(draw, numbers_G3[some], advantages_G[some], tuple(data[k] for k in some))
            vars(group)["columns"] = columns
        return group


def tokens_of(items: Sequence[Item], piece: Piece) -> int:
    """Returns the number of tokens of a piece, its copy of the prompt included."""
    item, responses = items[piece.item], piece.responses
    if len(responses) == len(item.responses):
        return item.prompt + sum(item.responses)
    return item.prompt + sum(map(item.responses.__getitem__, responses))


def squares_of(items: Sequence[Item], piece: Piece) -> float:
    """Returns twice the number of (query, key) pairs that attention looks at: `length**2` for a prompt with one
    response."""
    item = items[piece.item]
    return float(item.prompt**2) + sum(r**2 + 2 * item.prompt * r for r in (item.responses[k] for k in piece.responses))


def check(
    items: Sequence[Item],
    tokens: int,
    patches: int,
    row: str = "packing.tokens_per_row",
    media: str = "packing.patches_per_device",
) -> None:
    """Raises ConfigError for a prompt that with one response exceeds `tokens`, or whose media exceed `patches`; `row`
    and `media` name the fields that set these bounds."""
    for item in items:
        longest = item.prompt + max(item.responses)
        if longest > tokens:
            raise ConfigError(
                f"prompt {item.name}: {item.prompt} prompt tokens and a response of {max(item.responses)} make "
                f"{longest}, more than {row} = {tokens}"
            )
        if item.patches > patches:
            raise ConfigError(
                f"prompt {item.name}: its media have {item.patches} patches, more than {media} = {patches}"
            )


PerToken: TypeAlias = Sequence[jax.Array | np.ndarray]  # an array `[B, T]` for each microbatch


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """A batch of rows that is computed at once.

    `owner` is the device that computes the batch alone, at its own pace; None: all devices compute it together. `work`
    is the predicted cost of the batch for each of them (the busiest one), in any unit; None under strategies that need
    no prediction. `layout` is that of its shard plan, None where sequences are packed without one.
    """

    batch: TrainBatch
    owner: int | None = None
    work: float | None = None
    layout: SizedLayout | None = None


@dataclasses.dataclass(frozen=True)
class Filled:
    """The use of a microbatch's buffers, over all devices: its tokens and the cells of its token buffers, its patches
    and the cells of its patch buffers."""

    tokens: int
    token_cells: int
    patches: int
    patch_cells: int


@runtime_checkable
class Outline(Protocol):
    """A microbatch before its arrays are written: `program` is equal for microbatches that the same compiled program
    computes."""

    @property
    def program(self) -> tuple[object, ...]: ...

    @property
    def filled(self) -> Filled: ...


@dataclasses.dataclass(frozen=True)
class Composition:
    """The microbatches of one step, in the order of their computation, and where each response lies in them.

    `keys[i]` is the (draw, sample) of response `i`, which has `lengths[i]` tokens here. `cells` says where these are,
    response after response: indices into the token buffers of all microbatches, flattened, one after the other.

    In a run of several processes, these are the rows of one of them: a response may have none of its tokens here, or
    some. `elsewhere` has the microbatches that devices of other processes compute alone, with shapes instead of arrays.
    `coming` has some of the same microbatches in new sizes, for which programs are to be compiled.
    """

    microbatches: tuple[Microbatch, ...]
    keys: tuple[tuple[int, int], ...]
    cells: np.ndarray
    lengths: np.ndarray
    coming: tuple[TrainBatch, ...] = ()
    filled: tuple[Filled, ...] = ()  # of each microbatch, over all devices
    elsewhere: tuple[Microbatch, ...] = ()

    @property
    def everywhere(self) -> tuple[Microbatch, ...]:
        """The microbatches of all processes; those of this one come first."""
        return (*self.microbatches, *self.elsewhere)

    @property
    def batches(self) -> tuple[TrainBatch, ...]:
        return tuple(microbatch.batch for microbatch in self.microbatches)

    def fill(self) -> tuple[float, float]:
        """Returns the used share of the token buffers and of the patch buffers, between 0 and 1; 0 patches for text
        models."""
        counts = [dataclasses.astuple(filled) for filled in self.filled]
        tokens, token_cells, patches, patch_cells = np.sum(counts, axis=0)
        return float(tokens / token_cells), float(patches / patch_cells) if patch_cells else 0.0

    def of_responses(self, arrays_BT: PerToken, dtype: type | None = None) -> np.ndarray:
        """Returns per-token values of all responses, response after response."""
        flat = [np.asarray(array, dtype).reshape(-1) for array in arrays_BT]
        return np.concatenate(flat)[self.cells] if flat else np.zeros(0, dtype)

    def summed(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum over the tokens of each response, of one value a token, response after response."""
        responses = np.repeat(np.arange(len(self.keys)), self.lengths)
        return np.bincount(responses, values, minlength=len(self.keys))

    def scattered(self, values: np.ndarray) -> list[np.ndarray]:
        """Returns an array `[B, T]` for each microbatch, from one value a token, response after response; 0
        elsewhere."""
        shapes_BT = [batch.loss_weights_BT.shape for batch in self.batches]
        sizes = [math.prod(shape) for shape in shapes_BT]
        flat = np.zeros(sum(sizes), np.float32)
        flat[self.cells] = values
        parts = np.split(flat, np.cumsum(sizes, dtype=np.int64))[:-1]
        return [part.reshape(shape) for part, shape in zip(parts, shapes_BT, strict=True)]

    def replaced(self, arrays: Mapping[str, PerToken]) -> Composition:
        """Returns the composition with other arrays, by the field of `TrainBatch`, one for each microbatch here; those
        of other processes get the shapes."""

        def with_fields(microbatch: Microbatch, fields: Mapping[str, Any]) -> Microbatch:
            return dataclasses.replace(microbatch, batch=dataclasses.replace(microbatch.batch, **fields))

        microbatches = tuple(
            with_fields(microbatch, {name: array[i] for name, array in arrays.items()})
            for i, microbatch in enumerate(self.microbatches)
        )
        elsewhere = tuple(with_fields(m, dict.fromkeys(arrays, m.batch.loss_weights_BT)) for m in self.elsewhere)
        return dataclasses.replace(self, microbatches=microbatches, elsewhere=elsewhere)


def unpack(composition: Composition, arrays_BT: PerToken) -> dict[tuple[int, int], np.ndarray]:
    """Returns per-token results of each response by (draw, sample), from one array `[B, T]` for each microbatch."""
    shapes_BT = [batch.loss_weights_BT.shape for batch in composition.batches]
    if [np.shape(array) for array in arrays_BT] != shapes_BT:
        raise ValueError(f"arrays of shapes {[np.shape(a) for a in arrays_BT]} for batches of {shapes_BT}")
    parts = np.split(composition.of_responses(arrays_BT), np.cumsum(composition.lengths))[:-1]
    return dict(zip(composition.keys, parts, strict=True))


def together(compositions: Sequence[Composition]) -> Composition:
    """Joins compositions into one of all microbatches, to measure how full and how even they are; returns a single one
    itself."""
    if len(compositions) == 1:
        return compositions[0]
    return Composition(
        microbatches=tuple(m for composition in compositions for m in composition.microbatches),
        keys=tuple(key for composition in compositions for key in composition.keys),
        cells=np.zeros(0, np.int64),  # they would have to be counted anew
        lengths=np.concatenate([composition.lengths for composition in compositions]),
        filled=tuple(filled for composition in compositions for filled in composition.filled),
        elsewhere=tuple(m for composition in compositions for m in composition.elsewhere),
    )


def plan_metrics(composition: Composition, num_devices: int) -> dict[str, float]:
    """Returns what the strategy's plans say of a step; nothing where sequences are packed without one."""
    microbatches = composition.everywhere
    if any(microbatch.layout is None for microbatch in microbatches):
        return {}
    own_pace = microbatches[0].work is not None
    return decoupled_metrics(composition, num_devices) if own_pace else spread_metrics(composition)


def decoupled_metrics(composition: Composition, num_devices: int) -> dict[str, float]:
    """Measures how evenly a step's work is dealt to devices that keep their own pace.

    The share of all devices' time in which they are predicted to wait: at its end, and in collective microbatches for
    the busiest device; the most and fewest microbatches of a device, those included that it computes with all others;
    how many these are; the share of tokens in sequences on more than one device; padding of the rows.
    """
    layouts, loads, counts = _layouts(composition), np.zeros(num_devices), np.zeros(num_devices, int)
    busy = together = 0.0  # of collective microbatches, over all devices and of the busiest one
    for microbatch, layout in zip(composition.everywhere, layouts, strict=True):
        work = microbatch.work or 0.0
        if microbatch.owner is None:
            together += work
            busy += work * num_devices / layout.plan.balance
        else:
            loads[microbatch.owner] += work
            counts[microbatch.owner] += 1
    collective = len(layouts) - counts.sum()
    counts += collective
    return {
        "sharding/bubble": float(1 - (loads.sum() + busy) / (num_devices * (together + loads.max()))),
        "sharding/microbatches_max": float(counts.max()),
        "sharding/microbatches_min": float(counts.min()),
        "sharding/collective": float(collective),
        "sharding/sharded_tokens": _sharded([layout.plan for layout in layouts]),
        "sharding/mlp_padding": float(np.mean([layout.padding()["mlp"] for layout in layouts])),
    }


def spread_metrics(composition: Composition) -> dict[str, float]:
    """Measures how evenly plans spread a step's sequences: largest over mean attention work and tokens of a device, the
    share of tokens in sequences on more than one device, padding of the rows and of what all-to-alls send."""
    layouts = _layouts(composition)
    plans, padding = [layout.plan for layout in layouts], [layout.padding() for layout in layouts]
    return {
        "sharding/balance": max(plan.balance for plan in plans),
        "sharding/memory": max(plan.memory_ratio for plan in plans),
        "sharding/sharded_tokens": _sharded(plans),
        "sharding/mlp_padding": float(np.mean([share["mlp"] for share in padding])),
        "sharding/all_to_all_padding": float(np.mean([share["all_to_all"] for share in padding])),
    }


def _layouts(composition: Composition) -> list[SizedLayout]:
    return [microbatch.layout for microbatch in composition.everywhere if microbatch.layout is not None]


def _sharded(plans: Sequence[ShardPlan]) -> float:
    """Returns the share of tokens in sequences on more than one device."""
    degrees = [(n, degree) for plan in plans for n, degree in zip(plan.lengths, plan.degrees, strict=True)]
    return sum(n for n, degree in degrees if degree > 1) / sum(n for n, _ in degrees)
