"""Traces a function to equations, with one equation for each stack of layers, and makes functions of such equations.

This file holds everything that ODC needs of JAX's representation of programs. Stacks are marked by an equation of our
own, because the parameters of JAX's own loops are private and change from release to release.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jax.extend.core import JaxprEqn, Literal, Var
from jaxtyping import PyTree

from ..walk import Module, Walk

Run = Callable[..., Sequence[jax.Array]]


class StageError(ValueError):
    """The traced function can't be cut. The message names the obstacle."""


class Trace:
    """The equations of `function(*args)`, whose arguments may be abstract (`ShapeDtypeStruct`s) or traced themselves.

    `inputs` are the variables of the arguments' leaves, `outputs` those of the results' leaves (or literals), `results`
    the results' shapes. `constants` are the values of all other variables that are read: arrays, or traced values if
    the function reads traced values from around it.
    """

    def __init__(self, function: Callable[..., PyTree], *args: PyTree) -> None:
        closed, self.results = jax.make_jaxpr(function, return_shape=True)(*args)
        self._jaxpr: Any = getattr(closed, "jaxpr", closed)  # older JAX has two classes, JAX 0.12 one
        self.inputs: list[Var] = list(self._jaxpr.invars)
        self.outputs: list[Var | Literal] = list(self._jaxpr.outvars)
        self.equations: list[JaxprEqn] = list(self._jaxpr.eqns)
        self.constants: dict[Var, jax.Array] = dict(zip(self._jaxpr.constvars, closed.consts, strict=True))

    def run(self, inputs: Sequence[Var], equations: Sequence[JaxprEqn], outputs: Sequence[Var | Literal]) -> Run:
        """Makes the function that computes the variables `outputs` from the variables `inputs` by these equations."""
        part = self._jaxpr.replace(constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(equations))
        return core.jaxpr_as_fun(core.ClosedJaxpr(part, []))


def is_float(variable: Var) -> bool:
    """Tells whether gradients can flow through a variable."""
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)  # pyright: ignore[reportAttributeAccessIssue]


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """The parameters of a stack's equation. The equation reads `captured` values, which every layer reads unsliced,
    then the `carried` values of the first layer, then values with one part for each of the `length` layers.

    `layer(*captured, *carried, *parts)` returns the `carried` values of the next layer, with the shapes of `results`.
    """

    layer: Run
    captured: int
    carried: int
    length: int
    results: tuple[object, ...]  # abstract values


_stack_of_layers = core.Primitive("stack_of_layers")
_stack_of_layers.multiple_results = True
_stack_of_layers.def_abstract_eval(lambda *_, stack: list(stack.results))


def stack_of(equation: JaxprEqn) -> Stack | None:
    """Returns the stack of layers that an equation stands for, or None."""
    return equation.params["stack"] if equation.primitive is _stack_of_layers else None


class MarkingWalk(Walk):
    """A walk that runs no stack, but leaves one equation for each stack in the trace. Weights are complete."""

    def scan(
        self,
        layers: Module,
        carry: PyTree,
        step: Callable[[Module, PyTree, PyTree], tuple[PyTree, PyTree]],
        xs: PyTree = None,
    ) -> tuple[PyTree, PyTree]:
        """Marks a stack in a `Trace`; `Walk.scan` would run it. Raises StageError for a `step` with results `y`."""
        graphdef, weights = nnx.split(layers)
        stacked, tree = jax.tree.flatten((weights, xs))
        first = jax.eval_shape(lambda leaves: [leaf[0] for leaf in leaves], stacked)

        def one_layer(carry: PyTree, parts: list[jax.Array]) -> tuple[PyTree, PyTree]:
            state, x = jax.tree.unflatten(tree, parts)
            return step(nnx.merge(graphdef, state), carry, x)

        trace = Trace(one_layer, carry, first)
        carried, rest = trace.results
        if jax.tree.leaves(rest):
            raise StageError("a stack of layers that returns something for every layer can't be cut")
        given, start = jax.tree.flatten(carry)
        if _shapes(carried) != _shapes(carry):
            raise StageError(
                f"a layer of a stack gets {_shapes(carry)} and hands on {_shapes(carried)}; they must be equal"
            )
        stack = Stack(
            trace.run([*trace.constants, *trace.inputs], trace.equations, trace.outputs),
            captured=len(trace.constants),
            carried=len(given),
            length=len(stacked[0]),
            results=tuple(output.aval for output in trace.outputs),
        )
        results = _stack_of_layers.bind(*trace.constants.values(), *given, *stacked, stack=stack)
        return jax.tree.unflatten(start, results), rest


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}", tree)
