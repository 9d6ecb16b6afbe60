"""The microbatches of a step, and the cells of their responses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from sharding.spread.buffers import SizedLayout

from ..base.types import TrainBatch
from .share import Filled

PerToken: TypeAlias = Sequence[jax.Array | np.ndarray]  # an array `[B, T]` for each microbatch


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """A batch of rows that is computed at once. `owner` is the device that computes the batch alone, or None if all
    devices compute the batch together. `work` is the predicted cost for its busiest device, in any unit, or None if the
    strategy predicts none. `layout` is that of the shard plan, if there is one."""

    batch: TrainBatch
    owner: int | None = None
    work: float | None = None
    layout: SizedLayout | None = None


@dataclasses.dataclass(frozen=True)
class Composition:
    """The microbatches of one minibatch of a step, and the cells of each response. Microbatches are in the order of
    their computation.

    `keys[i]` is the (draw, sample) of response `i`, and `lengths[i]` the number of its tokens in `cells`. `cells` has
    the indices of these tokens, response after response, in the flattened and concatenated rows of `microbatches`. An
    episode whose context was rewritten counts as several responses of one key, whose tokens follow each other in the
    order of `views`.

    In a run of several processes, `microbatches` have only the rows of this process, and `cells` only the tokens in
    these rows. `elsewhere` has the microbatches that devices of other processes compute alone, with shapes instead of
    arrays. `coming` has some of `microbatches` again, in buffers that fit better, whose programs are compiled ahead.
    """

    microbatches: tuple[Microbatch, ...]
    keys: tuple[tuple[int, int], ...]
    views: tuple[int, ...]
    cells: np.ndarray
    lengths: np.ndarray
    coming: tuple[TrainBatch, ...] = ()
    filled: tuple[Filled, ...] = ()  # the use of each microbatch's buffers, over all devices; only in process 0
    elsewhere: tuple[Microbatch, ...] = ()

    @property
    def everywhere(self) -> tuple[Microbatch, ...]:
        """The microbatches of all processes, first those of this process."""
        return (*self.microbatches, *self.elsewhere)

    @property
    def batches(self) -> tuple[TrainBatch, ...]:
        return tuple(microbatch.batch for microbatch in self.microbatches)

    def of_responses(self, arrays_BT: PerToken, dtype: type | None = None) -> np.ndarray:
        """Returns the values of all response tokens, response after response, from the arrays of all microbatches."""
        flat = [np.asarray(array, dtype).reshape(-1) for array in arrays_BT]
        return np.concatenate(flat)[self.cells] if flat else np.zeros(0, dtype)

    def summed(self, values: np.ndarray) -> np.ndarray:
        """Returns each response's sum of `values`, which has a value for each token, response after response."""
        responses = np.repeat(np.arange(len(self.keys)), self.lengths)
        return np.bincount(responses, values, minlength=len(self.keys))

    def scattered(self, values: np.ndarray) -> list[np.ndarray]:
        """Returns an array `[B, T]` for each microbatch, from a value for each response token in turn; else 0."""
        shapes_BT = [batch.loss_weights_BT.shape for batch in self.batches]
        sizes = [math.prod(shape) for shape in shapes_BT]
        flat = np.zeros(sum(sizes), np.float32)
        flat[self.cells] = values
        parts = np.split(flat, np.cumsum(sizes, dtype=np.int64))[:-1]
        return [part.reshape(shape) for part, shape in zip(parts, shapes_BT, strict=True)]

    def replaced(self, arrays: Mapping[str, PerToken]) -> Composition:
        """Returns the composition with `arrays` in its batches. `arrays` has, by field of `TrainBatch`, an array for
        each microbatch of this process. The microbatches of other processes get shapes instead of arrays."""

        def with_fields(microbatch: Microbatch, fields: Mapping[str, Any]) -> Microbatch:
            return dataclasses.replace(microbatch, batch=dataclasses.replace(microbatch.batch, **fields))

        microbatches = tuple(
            with_fields(microbatch, {name: array[i] for name, array in arrays.items()})
            for i, microbatch in enumerate(self.microbatches)
        )
        elsewhere = tuple(with_fields(m, dict.fromkeys(arrays, m.batch.loss_weights_BT)) for m in self.elsewhere)
        return dataclasses.replace(self, microbatches=microbatches, elsewhere=elsewhere)


def unpack(composition: Composition, arrays_BT: PerToken) -> dict[tuple[int, int], np.ndarray]:
    """Returns the values of each response's tokens by (draw, sample), from an array `[B, T]` for each microbatch.
    Raises ValueError for arrays of other shapes."""
    shapes_BT = [batch.loss_weights_BT.shape for batch in composition.batches]
    if [np.shape(array) for array in arrays_BT] != shapes_BT:
        raise ValueError(f"the arrays have the shapes {[np.shape(a) for a in arrays_BT]}, but the batches {shapes_BT}")
    parts = np.split(composition.of_responses(arrays_BT), np.cumsum(composition.lengths))[:-1]
    found: dict[tuple[int, int], list[np.ndarray]] = {}
    for i in sorted(range(len(parts)), key=composition.views.__getitem__):
        found.setdefault(composition.keys[i], []).append(parts[i])
    return {key: np.concatenate(found[key]) for key in composition.keys}


def packing_metrics(compositions: Sequence[Composition], num_devices: int) -> dict[str, float]:
    """Returns the number of microbatches, and the used shares (0 to 1) of the token buffers and of the patch buffers.
    The share of patch buffers is 0 for a text model.

    With plans, the result also has the share of tokens in sequences on more than one device, and the padded share of
    the rows. If devices keep their own pace, the result has the predicted share of device time that is lost by waiting
    for the busiest device. The result then also has the number of collective microbatches, and the most and fewest
    microbatches of a device, including collective ones. Under other strategies with plans, the result has the largest
    attention work of a device over the mean, the same ratio of tokens, and the padded share of the all-to-alls.
    """
    elsewhere = [microbatch for composition in compositions for microbatch in composition.elsewhere]
    microbatches = [microbatch for composition in compositions for microbatch in composition.microbatches] + elsewhere
    filled = np.concatenate([composition.filled for composition in compositions])
    tokens, token_cells, patches, patch_cells = filled.sum(axis=0)
    metrics = {
        "packing/microbatches": float(len(microbatches)),
        "packing/token_fill": float(tokens / token_cells),
        "packing/patch_fill": float(patches / patch_cells) if patch_cells else 0.0,
    }
    layouts = [microbatch.layout for microbatch in microbatches if microbatch.layout is not None]
    if len(layouts) < len(microbatches):
        return metrics
    plans, padding = [layout.plan for layout in layouts], [layout.padding() for layout in layouts]
    degrees = [(n, degree) for plan in plans for n, degree in zip(plan.lengths, plan.degrees, strict=True)]
    metrics |= {
        "sharding/sharded_tokens": sum(n for n, degree in degrees if degree > 1) / sum(n for n, _ in degrees),
        "sharding/mlp_padding": float(np.mean([share["mlp"] for share in padding])),
    }
    if microbatches[0].work is None:
        return metrics | {
            "sharding/balance": max(plan.balance for plan in plans),
            "sharding/memory": max(plan.memory_ratio for plan in plans),
            "sharding/all_to_all_padding": float(np.mean([share["all_to_all"] for share in padding])),
        }
    loads, counts = np.zeros(num_devices), np.zeros(num_devices, int)
    busy = together = 0.0  # work of collective microbatches: of all devices, and of the busiest device
    for microbatch, plan in zip(microbatches, plans, strict=True):
        work = microbatch.work or 0.0
        if microbatch.owner is None:
            together += work
            busy += work * num_devices / plan.balance
        else:
            loads[microbatch.owner] += work
            counts[microbatch.owner] += 1
    collective = len(layouts) - counts.sum()
    return metrics | {
        "sharding/bubble": float(1 - (loads.sum() + busy) / (num_devices * (together + loads.max()))),
        "sharding/microbatches_max": float(counts.max() + collective),
        "sharding/microbatches_min": float(counts.min() + collective),
        "sharding/collective": float(collective),
    }
