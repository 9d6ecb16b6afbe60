"""Walks a stack of layers as a strategy wants it: it decides where weights come from and what the backward pass keeps.

A model never asks on how many devices it runs. It calls `walk.use(module)` before it reads a module's weights
and `walk.scan(...)` over its stacked layers; FSDP gathers there, a single device does nothing.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

import jax
import jax.extend
from flax import nnx
from jaxtyping import PyTree

from .weights import WeightSpec

Gather = Callable[[WeightSpec, jax.Array], jax.Array]
Module = TypeVar("Module", bound=nnx.Module)
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def _all_but_gathered(primitive: jax.extend.core.Primitive, *_: object, **__: object) -> bool:
    """A rematerialisation policy: the backward pass keeps everything but what came out of an all-gather."""
    return not primitive.name.startswith("all_gather")


@dataclasses.dataclass(frozen=True)
class Walk:
    """The single-device walk, and the base of all others.

    `gather(spec, local)` turns the local shard of an (unstacked) weight into the whole weight, in the compute
    dtype. `remat` recomputes each layer in the backward pass; without it all is kept but gathered weights, which are
    gathered again, or else the whole model would lie on every device between forward and backward.
    """

    gather: Gather | None = None
    remat: bool = False
    unroll: int = 4  # without `remat`, stacks of at most so many layers are written out: tiny models on CPU gain 1/4

    def use(self, module: Module) -> Module:
        """The module with its whole weights; call it where they are needed, so that they live briefly."""
        if self.gather is None:
            return module
        gather = self.gather
        graphdef, state = nnx.split(module)

        def whole(variable: nnx.Variable) -> nnx.Variable:
            return variable.replace(gather(variable.get_metadata("spec"), variable[...]))

        return nnx.merge(graphdef, jax.tree.map(whole, state, is_leaf=lambda v: isinstance(v, nnx.Variable)))

    def scan(
        self, layers: Module, carry: Carry, step: Callable[[Module, Carry, X], tuple[Carry, Y]], xs: PyTree = None
    ) -> tuple[Carry, PyTree]:
        """Runs `carry, y = step(layer, carry, x)` over the stack; returns the last carry and the stacked `y`.

        `layers` holds weights with a leading layer axis; `xs` is None or a pytree with the same leading axis.
        """
        graphdef, stacked = nnx.split(layers)

        def body(carry: Carry, inputs: tuple[nnx.State, X]) -> tuple[Carry, Y]:
            state, x = inputs
            return step(self.use(nnx.merge(graphdef, state)), carry, x)

        length = jax.tree.leaves(stacked)[0].shape[0]
        written_out = length <= self.unroll and not self.remat
        # What is computed again must not be merged with the first time; within a scan it can't be.
        if self.remat:
            body = jax.checkpoint(body, prevent_cse=False)
        elif self.gather is not None:
            body = jax.checkpoint(body, prevent_cse=written_out, policy=_all_but_gathered)
        return jax.lax.scan(body, carry, (stacked, xs), unroll=written_out)

    def each(
        self,
        layers: Iterable[Module],
        carry: Carry,
        step: Callable[[Module, Carry, X], tuple[Carry, Y]],
        xs: Iterable[X],
    ) -> tuple[Carry, list[Y]]:
        """Does what `scan` does over layers that are separate modules: returns the last carry and the list of `y`.

        The loop is written out, and nothing is copied out of a stack: a decoding engine would pay for that at every
        token.
        """
        ys = []
        for layer, x in zip(layers, xs, strict=True):
            carry, y = step(self.use(layer), carry, x)
            ys.append(y)
        return carry, ys
