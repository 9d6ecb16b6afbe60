"""What every way of spreading training over a mesh offers. All of them share one parameter layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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


class ShardingStrategy(Protocol):
    """Same loss and gradients from every strategy on the same batch, to float tolerance.

    Where each sequence is computed is decided by a planner (`sharding.planner`) and written into the batch that is
    composed after the plan, so a run may change planners between two steps. `loss_and_grad` and `logprobs` are pure and
    meant to be traced: the caller compiles them.
    """

    mesh: Mesh

    def shard(self, params: Params) -> Params:
        """The parameters as they lie on the mesh."""
        ...

    def place(self, batch: Any) -> Any:
        """Host arrays of a batch (or its inputs) as they lie on the mesh."""
        ...

    def loss_and_grad(self, params: Params, batch: Any) -> tuple[jax.Array, Tally, Params]:
        """(loss, tally, gradients): loss and tally summed over all devices, gradients laid out like `params`."""
        ...

    def logprobs(self, params: Params, inputs: Any) -> Any:
        """What `forward` returns, rows spread over the devices."""
        ...
