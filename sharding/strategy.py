"""The types that all ways of spreading training over a mesh share: parameters, functions to run, and their tallies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from .walk import Walk

Params: TypeAlias = dict[str, Any]  # nested, one leaf a weight; stacked layers have a leading axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """The quantities that a microbatch contributes to a step, by name. Every entry is a float32 scalar."""

    sums: dict[str, Any]  # added up over rows, devices and microbatches; leaves may be arrays or their shardings
    maxima: dict[str, Any]  # the largest over the same

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: jnp.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )


# Both run on one device's share of the rows, with the model's weights behind the walk.
Forward: TypeAlias = Callable[[nnx.Module, PyTree, Walk], PyTree]  # (model, inputs, walk) -> arrays with rows first
Loss: TypeAlias = Callable[[nnx.Module, PyTree, Walk], tuple[Array, Tally]]  # (model, batch, walk) -> sum over rows
