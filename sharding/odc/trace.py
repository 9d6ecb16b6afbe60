"""A function as equations, with every stack of layers as one of them, and some of these equations as a function again.

All that ODC asks of JAX's representation of programs stands here. Stacks are marked by an equation of our own, because
the parameters of JAX's own loops are private and change from release to release.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend import core

from ..walk import Module, Walk

Run = Callable[..., Sequence[jax.Array]]


class StageError(ValueError):
    """The traced function can't be cut. The message says what stands in the way."""


class Trace:
    """The equations of `function(*args)`, whose arguments may be abstract (`ShapeDtypeStruct`s) or traced themselves.

    `inputs` are the variables of the arguments' leaves, `outputs` those of the results' leaves (or literals), `results`
    the results' shapes, `constants` the values of variables that are no argument's: arrays, or traced if the function
    reads traced values from around it.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        closed, self.results = jax.make_jaxpr(function, return_shape=True)(*args)
        self._jaxpr: Any = getattr(closed, "jaxpr", closed)  # two classes at first, one in JAX 0.12
        self.inputs: list[Any] = list(self._jaxpr.invars)
        self.outputs: list[Any] = list(self._jaxpr.outvars)
        self.equations: list[Any] = list(self._jaxpr.eqns)
        self.constants: dict[Any, Any] = dict(zip(self._jaxpr.constvars, closed.consts, strict=True))

    def run(self, inputs: Sequence[Any], equations: Sequence[Any], outputs: Sequence[Any]) -> Run:
        """The function that computes the variables `outputs` from those of `inputs` by these equations."""
        part = self._jaxpr.replace(constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(equations))
        return core.jaxpr_as_fun(core.ClosedJaxpr(part, []))


def is_variable(atom: Any) -> bool:
    """Tells variables from literals, the only other things that an equation reads: these have their value in `val`."""
    return not isinstance(atom, core.Literal)


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """What the equation of a stack of layers says. It reads `captured` values that every layer reads whole, then the
    `carried` ones that the first layer starts from, then those that have one part for each of the `length` layers.

    `layer(*captured, *carried, *parts)` is what each layer hands to the next: `carried` values, like `results`.
    """

    layer: Run
    captured: int
    carried: int
    length: int
    results: tuple[Any, ...]


_stack_of_layers = core.Primitive("stack_of_layers")
_stack_of_layers.multiple_results = True
_stack_of_layers.def_abstract_eval(lambda *_, stack: list(stack.results))


def stack_of(equation: Any) -> Stack | None:
    """The stack of layers that an equation stands for, if it does."""
    return equation.params["stack"] if equation.primitive is _stack_of_layers else None


class MarkingWalk(Walk):
    """A walk that runs no stack but leaves one equation in the trace for each. Weights are whole."""

    def scan(
        self, layers: Module, carry: Any, step: Callable[[Module, Any, Any], tuple[Any, Any]], xs: Any = None
    ) -> tuple[Any, Any]:
        """As `Walk.scan`, inside a `Trace`. Raises StageError for a `step` that returns something for every layer."""
        graphdef, weights = nnx.split(layers)
        stacked, tree = jax.tree.flatten((weights, xs))
        first = jax.eval_shape(lambda leaves: [leaf[0] for leaf in leaves], stacked)

        def one_layer(carry: Any, parts: list[jax.Array]) -> tuple[Any, Any]:
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


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}", tree)
