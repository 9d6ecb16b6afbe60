"""The walk over a model's layers, which every strategy shares, and the types of losses and results.

A strategy decides where weights come from and what the backward pass keeps while a stack of layers is walked. A
model never asks on how many devices it runs. It calls `walk.use(module)` before it reads a module's weights and
`walk.scan(...)` over its stacked layers; FSDP gathers there, a single device does nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from .low_rank import Weight, beside, is_adapter
from .weights import WeightSpec

Gather = Callable[[WeightSpec, jax.Array], jax.Array]
Merge = Callable[[Weight, Weight, Weight], jax.Array]
Module = TypeVar("Module", bound=nnx.Module)
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def _all_but_gathered(primitive: jax.extend.core.Primitive, *_: object, **__: object) -> bool:
    """A rematerialisation policy: the backward pass keeps all values except the results of all-gathers."""
    return not primitive.name.startswith("all_gather")


HOST_MEMORY = "pinned_host"  # JAX's name; GPUs read and write this memory by themselves
_LAYER_INPUT = "layer input"
REMAT: dict[str, Callable[..., Any] | None] = {  # values of a layer, beside its input, that the backward pass keeps
    "none": _all_but_gathered,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with weights; attention runs again
    "layer": None,  # none
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(  # none, and the input goes to the host
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_LAYER_INPUT],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    ),
}


@dataclasses.dataclass(frozen=True)
class Walk:
    """The single-device walk, and the base of all others.

    `gather(spec, local)` turns the local shard of an (unstacked) weight into the complete weight, in the compute dtype.
    `remat` says what the backward pass computes again of each layer (`REMAT`). With `none` all is kept except gathered
    weights. These are gathered again: otherwise every device would hold the complete model between forward and backward
    pass. `merge(weight, a, b)` gathers a weight with adapters and adds their product (`lora`).
    """

    gather: Gather | None = None
    merge: Merge | None = None
    remat: str = "none"
    # With remat `none`, the loop over at most so many layers is written out: kept values need no copy into stacks.
    unroll: int = 8

    def use(self, module: Module) -> Module:
        """The module with its complete weights. Call it where they are needed, so that they live briefly."""
        if self.gather is None:
            return module
        graphdef, state = nnx.split(module)
        weights = dict(nnx.to_flat_state(state))

        def declared(path: tuple) -> Weight:
            return weights[path].get_metadata("spec"), weights[path][...]

        whole: dict[tuple, nnx.Variable] = {}
        for path, variable in weights.items():
            spec, local = declared(path)
            if is_adapter(path):  # adapters are merged into their weight, and nothing else reads them
                whole[path] = variable
            elif spec.lora and self.merge is not None:
                whole[path] = variable.replace(self.merge((spec, local), *map(declared, beside(path))))
            else:
                whole[path] = variable.replace(self.gather(spec, local))
        return nnx.merge(graphdef, nnx.from_flat_state(whole))

    def scan(
        self, layers: Module, carry: Carry, step: Callable[[Module, Carry, X], tuple[Carry, Y]], xs: PyTree = None
    ) -> tuple[Carry, PyTree]:
        """Runs `carry, y = step(layer, carry, x)` over the stack; returns the last carry and the stacked `y`.

        `layers` holds weights with a leading layer axis; `xs` is None or a pytree with the same leading axis.
        """
        graphdef, stacked = nnx.split(layers)

        def body(carry: Carry, inputs: tuple[nnx.State, X]) -> tuple[Carry, Y]:
            state, x = inputs
            if self.remat == "offload":
                carry = jax.tree.map(lambda array: checkpoint_name(array, _LAYER_INPUT), carry)
            return step(self.use(nnx.merge(graphdef, state)), carry, x)

        length = jax.tree.leaves(stacked)[0].shape[0]
        written_out = length <= self.unroll and self.remat == "none"
        if self.remat != "none" or self.gather is not None:
            # Values that are computed again must not be merged with the first ones; within a scan they can't be.
            body = jax.checkpoint(body, prevent_cse=written_out, policy=REMAT[self.remat])
        return jax.lax.scan(body, carry, (stacked, xs), unroll=written_out)

    def loop(
        self,
        layers: Iterable[Module],
        carry: Carry,
        step: Callable[[Module, Carry, X], tuple[Carry, Y]],
        xs: Iterable[X],
    ) -> tuple[Carry, list[Y]]:
        """As `scan`, over layers that are separate modules: returns the last carry and the list of `y`.

        The loop is written out, so that nothing is copied out of a stack, which would cost a decoding engine time at
        every token.
        """
        ys = []
        for layer, x in zip(layers, xs, strict=True):
            carry, y = step(self.use(layer), carry, x)
            ys.append(y)
        return carry, ys


Params: TypeAlias = dict[str, Any]  # nested, one leaf for each weight; stacked layers have a leading axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """The quantities that a microbatch contributes to a step, by name. Every entry is a float32 scalar."""

    sums: dict[str, Any]  # added up over rows, devices and microbatches; leaves may be arrays or their shardings
    maxima: dict[str, Any]  # the largest over rows, devices and microbatches

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: jnp.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )


# Both run on one device's share of the rows; the walk gives them the model's weights.
Forward: TypeAlias = Callable[[nnx.Module, PyTree, Walk], PyTree]  # (model, inputs, walk) -> arrays with rows first
Loss: TypeAlias = Callable[[nnx.Module, PyTree, Walk], tuple[Array, Tally]]  # (model, batch, walk) -> sum over rows
