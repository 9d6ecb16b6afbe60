"""What every way of spreading training over a mesh offers. All of them share one parameter layout."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from .walk import Walk

Params: TypeAlias = dict[str, Any]  # nested, one leaf a weight; stacked layers have a leading axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """What a microbatch contributes to a step, by name. Every entry is a float32 scalar."""

    sums: dict[str, Any]  # they add over rows, devices and microbatches
    maxima: dict[str, Any]  # the largest counts

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: jnp.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )


# Both run on one device's share of the rows, with the model's weights behind the walk.
Forward: TypeAlias = Callable[[nnx.Module, Any, Walk], Any]  # (model, inputs, walk) -> arrays with rows first
Loss: TypeAlias = Callable[[nnx.Module, Any, Walk], tuple[jax.Array, Tally]]  # (model, batch, walk) -> sum over rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which sequences each shard computes: `microbatches[m][shard]` are indices into the lengths planned for."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]


class Strategy(Protocol):
    """Same loss and gradients from every strategy on the same batch, to float tolerance.

    `loss_and_grad` and `logprobs` are pure and meant to be traced: the caller compiles them.
    """

    mesh: Mesh

    def plan(self, lengths: Sequence[int], budget: int) -> Plan:
        """Deals sequences of these lengths out to shards, at most `budget` tokens a shard and microbatch."""
        ...

    def shard(self, params: Params) -> Params:
        """The parameters as they lie on the mesh."""
        ...

    def place(self, batch: Any) -> Any:
        """Host arrays of a batch (or its inputs) as they lie on the mesh."""
        ...

    def loss_and_grad(self, params: Params, batch: Any, plan: Plan | None = None) -> tuple[jax.Array, Tally, Params]:
        """(loss, tally, gradients): loss and tally summed over all devices, gradients laid out like `params`."""
        ...

    def logprobs(self, params: Params, inputs: Any, plan: Plan | None = None) -> Any:
        """What `forward` returns, rows spread over the devices."""
        ...


def deal(lengths: Sequence[int], budget: int, num_shards: int) -> Plan:
    """Longest first onto the least loaded shard, in the smallest number of microbatches for which that fits.

    Deterministic: ties go to the lower index. Raises ValueError if a sequence alone exceeds the budget.
    """
    too_long = [index for index, length in enumerate(lengths) if length > budget]
    if too_long:
        raise ValueError(f"sequence {too_long[0]} has {lengths[too_long[0]]} tokens, more than a budget of {budget}")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    microbatches = max(-(-sum(lengths) // (budget * num_shards)), 1) if lengths else 0
    while True:
        bins: list[list[int]] = [[] for _ in range(microbatches * num_shards)]
        loads = [(0, index) for index in range(len(bins))]  # a heap: least loaded first
        for index in order:
            load, target = heapq.heappop(loads)
            bins[target].append(index)
            heapq.heappush(loads, (load + lengths[index], target))
        if all(load <= budget for load, _ in loads):
            break
        microbatches += 1
    rows = [tuple(sorted(indices)) for indices in bins]
    return Plan(tuple(tuple(rows[m * num_shards : (m + 1) * num_shards]) for m in range(microbatches)))
