"""Cuts a model's loss into stages. Each layer, and each part between two stacks of layers, is a program.

The loss is traced once with complete weights (`Trace`). A `MarkingWalk` puts one equation into the trace for each stack
that the model walks with `Walk.scan`. The equations between two stacks form another stage. A primitive of this file
marks a stack, because the parameters of JAX's loops are private and change from release to release.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jax.extend.core import JaxprEqn, Var
from jax.extend.core import Literal as Constant
from jaxtyping import PyTree

from ..walk import Params, Stack, Walk

T = TypeVar("T")
Slots = Sequence[int]  # indices of values that stages pass to each other, each written once
Arrays = Sequence[jax.Array]
Layer = jax.Array | np.int32  # the index of a layer among the layers of its kind
Run = Callable[..., Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """`function(weights, inputs, layer)` computes a stage's outputs from complete weights (if `stacked`: of one layer).
    `weights` are the weights' indices among the leaves of the parameters. `active_in` and `active_out` are True for the
    inputs and outputs that pass gradients: floats that may depend on weights."""

    name: str
    function: Callable[[Arrays, Arrays, Layer], list[jax.Array]]
    weights: tuple[int, ...]
    stacked: bool
    active_in: tuple[bool, ...]
    active_out: tuple[bool, ...]


@dataclasses.dataclass(eq=False)
class Step:
    """One application of a stage, with the slots of the values that the step reads and writes. `layer` is the index
    among the layers of its kind, or 0 if the stage is not stacked."""

    stage: Stage
    layer: int
    reads: Slots
    writes: Slots
    last: Slots = ()  # values that no later step and no result needs

    @property
    def name(self) -> str:
        return f"{self.stage.name}[{self.layer}]" if self.stage.stacked else self.stage.name


class StageError(ValueError):
    """The traced function can't be cut into stages. The message names the obstacle."""


class Trace:
    """The equations of `function(*args)`, whose arguments may be abstract (`ShapeDtypeStruct`) or traced. `inputs` and
    `outputs` are the variables of the arguments' and results' leaves, `results` the results' shapes. `constants` has
    the values (arrays, or traced values from outside the function) of all other variables that the equations read."""

    def __init__(self, function: Callable[..., PyTree], *args: PyTree) -> None:
        closed, self.results = jax.make_jaxpr(function, return_shape=True)(*args)
        self._jaxpr: Any = getattr(closed, "jaxpr", closed)  # older JAX has two classes of jaxprs
        self.inputs: list[Var] = list(self._jaxpr.invars)
        self.outputs: list[Var | Constant] = list(self._jaxpr.outvars)
        self.equations: list[JaxprEqn] = list(self._jaxpr.eqns)
        self.constants: dict[Var, jax.Array] = dict(zip(self._jaxpr.constvars, closed.consts, strict=True))

    def run(self, inputs: Sequence[Var], equations: Sequence[JaxprEqn], outputs: Sequence[Var | Constant]) -> Run:
        """Returns the function that computes the variables `outputs` from the variables `inputs` by these equations."""
        part = self._jaxpr.replace(constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(equations))
        return core.jaxpr_as_fun(core.ClosedJaxpr(part, []))


def is_float(variable: Var) -> bool:
    """Says whether gradients can flow through a variable."""
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)  # pyright: ignore[reportAttributeAccessIssue]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerBody:
    """The program of a kind of layers. `layer(*captured, *carried, *parts)` returns the `carried` of the next layer."""

    layer: Run
    captured: int  # number of values that every layer reads unsliced
    parts: int  # number of values with a part for each layer of this kind


@dataclasses.dataclass(frozen=True, eq=False)
class MarkedStack:
    """The parameters of a stack's equation. The equation first reads the `carried` values of the first layer. For each
    kind of layers, it then reads the captured values, and the values with a part for each layer. The equation returns
    the carried values of the last layer, with the shapes of `results`. `order` has the kind of each layer."""

    bodies: Mapping[str, LayerBody]
    order: tuple[str, ...]
    carried: int
    results: tuple[object, ...]  # abstract values


_stack_of_layers = core.Primitive("stack_of_layers")
_stack_of_layers.multiple_results = True
_stack_of_layers.def_abstract_eval(lambda *_, stack: list(stack.results))


class MarkingWalk(Walk):
    """A walk with complete weights that puts one equation into the trace for each stack, and runs no stack."""

    def scan(
        self,
        stack: Stack,
        carry: PyTree,
        step: Callable[[Any, PyTree, PyTree], tuple[PyTree, PyTree]],
        xs: PyTree = None,
    ) -> tuple[PyTree, PyTree]:
        """Raises StageError if `step` returns outputs beside the carry, or a carry of other shapes."""
        given, start = jax.tree.flatten(carry)
        bodies: dict[str, LayerBody] = {}
        inputs: list[Any] = []
        results: tuple[object, ...] = ()
        rest: PyTree = None
        for kind, module in stack.modules.items():
            numbers = np.flatnonzero([name == kind for name in stack.order])
            graphdef, weights = nnx.split(module)
            xs_of_kind = xs if len(stack.modules) == 1 else jax.tree.map(lambda x, numbers=numbers: x[numbers], xs)
            stacked, tree = jax.tree.flatten((weights, xs_of_kind))
            trace = _one_layer(graphdef, tree, step, carry, stacked)
            carried, rest = trace.results
            if jax.tree.leaves(rest):
                raise StageError("a stack whose layers return outputs beside the carry can't be cut into stages")
            if _shapes(carried) != _shapes(carry):
                raise StageError(f"a layer of a stack gets {_shapes(carry)} and hands on {_shapes(carried)} instead")
            run = trace.run([*trace.constants, *trace.inputs], trace.equations, trace.outputs)
            bodies[kind] = LayerBody(run, len(trace.constants), len(stacked))
            inputs += [*trace.constants.values(), *stacked]
            results = tuple(output.aval for output in trace.outputs)
        marked = MarkedStack(bodies, stack.order, len(given), results)
        return jax.tree.unflatten(start, _stack_of_layers.bind(*given, *inputs, stack=marked)), rest


def _one_layer(graphdef: Any, tree: Any, step: Callable, carry: PyTree, stacked: Sequence[Any]) -> Trace:
    """Traces `step` with the shapes of one layer's part of the `stacked` values."""

    def one_layer(carry: PyTree, parts: list[jax.Array]) -> tuple[PyTree, PyTree]:
        state, x = jax.tree.unflatten(tree, parts)
        return step(nnx.merge(graphdef, state), carry, x)

    return Trace(one_layer, carry, jax.eval_shape(lambda leaves: [leaf[0] for leaf in leaves], stacked))


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}", tree)


class Program:
    """All steps of `function(params, batch)` in order; both arguments may be abstract. `inputs` are the slots of the
    batch's leaves, `outputs` those of the function's results, or constants, `tree` their structure. Raises StageError
    for a stack that starts from a constant or a weight, or whose layers all read one weight unsliced."""

    def __init__(self, function: Callable[[Params, PyTree], PyTree], params: Params, batch: PyTree) -> None:
        self._trace = trace = Trace(function, params, batch)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self._paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        self._leaf = {var: i for i, var in enumerate(trace.inputs[: len(leaves)])}
        self._consts = {var: np.asarray(value) for var, value in trace.constants.items()}
        self._slot: dict[Var, int] = {}
        self._fresh = functools.partial(next, itertools.count())
        self._active: set[Var] = set()
        self.steps: list[Step] = []
        self.inputs = [self._new(var) for var in trace.inputs[len(leaves) :]]
        begin = 0
        for at, eqn in enumerate(trace.equations):
            if any(var in self._leaf or var in self._active for var in _variables(eqn.invars)):
                self._active.update(filter(is_float, eqn.outvars))
            if eqn.primitive is _stack_of_layers:
                self._segment(begin, at)
                self._stack(eqn.params["stack"], eqn)
                begin = at + 1
        self._segment(begin, len(trace.equations))
        self.outputs = [self._output(var) for var in trace.outputs]
        self.tree: Any = jax.tree.structure(trace.results)  # a PyTreeDef, which type checkers do not know
        seen = {output for output in self.outputs if isinstance(output, int)}  # results are needed until the end
        for step in reversed(self.steps):
            step.last = [slot for slot in _ordered((*step.reads, *step.writes)) if slot not in seen]
            seen.update(step.last)

    def _segment(self, begin: int, end: int) -> None:
        eqns = self._trace.equations[begin:end]
        if not eqns:
            return
        written = {var for eqn in eqns for var in eqn.outvars}
        read = _ordered(var for eqn in eqns for var in _variables(eqn.invars) if var not in written)
        weights = tuple(var for var in read if var in self._leaf)
        values = tuple(var for var in read if var in self._slot)
        later = {var for eqn in self._trace.equations[end:] for var in _variables(eqn.invars)}
        later.update(_variables(self._trace.outputs))
        results = tuple(var for eqn in eqns for var in eqn.outvars if var in later)
        if not results:
            return
        consts = tuple(var for var in read if var in self._consts)
        known = [self._consts[var] for var in consts]
        run = self._trace.run([*weights, *values, *consts], eqns, results)

        def function(given: Arrays, inputs: Arrays, layer: Layer) -> list[jax.Array]:
            return list(run(*given, *inputs, *map(jnp.asarray, known)))

        leaves = tuple(self._leaf[var] for var in weights)
        stage = Stage(
            _segment_name([self._paths[i] for i in leaves]),
            function,
            leaves,
            stacked=False,
            active_in=tuple(var in self._active for var in values),
            active_out=tuple(var in self._active for var in results),
        )
        reads = [self._slot[var] for var in values]
        self.steps.append(Step(stage, 0, reads, [self._new(var) for var in results]))

    def _stack(self, stack: MarkedStack, eqn: JaxprEqn) -> None:
        given, rest = eqn.invars[: stack.carried], iter(eqn.invars[stack.carried :])
        carries = [var for var in _variables(given) if var in self._slot]
        if len(carries) < stack.carried:
            raise StageError("a stack of layers starts from a constant or a weight; it must start from computed values")
        stages = {
            kind: self._layer_stage(body, carries, list(itertools.islice(rest, body.captured + body.parts)))
            for kind, body in stack.bodies.items()
        }
        slots = [self._slot[var] for var in carries]
        done = dict.fromkeys(stack.bodies, 0)
        for kind in stack.order:
            stage, reads, carried = stages[kind]
            for at, slot in zip(carried, slots, strict=True):
                reads[at] = slot
            slots = [self._fresh() for _ in carries]
            self.steps.append(Step(stage, done[kind], list(reads), slots))
            done[kind] += 1
        for var, slot in zip(eqn.outvars, slots, strict=True):
            self._slot[var] = slot

    def _layer_stage(
        self, body: LayerBody, carries: Sequence[Var], rest: Sequence[Var | Constant]
    ) -> tuple[Stage, list[int], list[int]]:
        """Returns (the stage of a kind of layers, the slots of its inputs, the indices of carried values among these
        slots). `rest` has the variables that the body captures, and then the variables with a part for each layer."""
        shared = body.captured + len(carries)
        consts: list[np.ndarray] = []
        weights: list[int] = []
        values: list[Var] = []
        # For each argument of the body: its kind (0: a constant, 1: a weight, 2: a value), its index within the kind,
        # and whether the stage cuts out one layer's part. Weights are already those of one layer.
        sources: list[tuple[int, int, bool]] = []
        carried: list[int] = []  # indices of the `values` that one layer passes to the next
        for at, var in enumerate([*rest[: body.captured], *carries, *rest[body.captured :]]):
            if isinstance(var, Constant) or var in self._consts:
                sources.append((0, len(consts), at >= shared))
                consts.append(np.asarray(var.val) if isinstance(var, Constant) else self._consts[var])
            elif var in self._leaf:
                sources.append((1, len(weights), False))
                weights.append(self._leaf[var])
                if at < shared:
                    raise StageError(
                        f"every layer of a stack uses all of the weight {self._paths[weights[-1]]}; each layer must "
                        "have weights of its own"
                    )
            else:
                if body.captured <= at < shared:
                    carried.append(len(values))
                sources.append((2, len(values), at >= shared))
                values.append(var)

        def function(given: Arrays, inputs: Arrays, layer: Layer) -> list[jax.Array]:
            kinds = list(map(jnp.asarray, consts)), given, inputs
            arguments = [
                jax.lax.dynamic_index_in_dim(kinds[kind][k], layer, keepdims=False) if cut_out else kinds[kind][k]
                for kind, k, cut_out in sources
            ]
            return list(body.layer(*arguments))

        floats = set(filter(is_float, carries))
        stage = Stage(
            _stack_name([self._paths[i] for i in weights]),
            function,
            tuple(weights),
            stacked=True,
            active_in=tuple(var in self._active or var in floats for var in values),
            active_out=tuple(var in floats for var in carries),
        )
        return stage, [self._slot[var] for var in values], carried

    def _new(self, var: Var) -> int:
        self._slot[var] = self._fresh()
        return self._slot[var]

    def _output(self, var: Var | Constant) -> int | np.ndarray:
        if isinstance(var, Constant):
            return np.asarray(var.val)
        return self._slot[var] if var in self._slot else self._consts[var]


def _variables(atoms: Iterable[Var | Constant]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Constant)]


def _ordered(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))


def _stack_name(paths: Sequence[str]) -> str:
    """Returns the common part of the paths of a stack's weights, such as `visual.blocks`."""
    modules = [path.split(".")[:-1] for path in paths]
    levels = zip(*modules, strict=False)  # up to the level of the shallowest weight
    return ".".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))


def _segment_name(paths: Sequence[str]) -> str:
    """Returns the outermost modules of these weights, such as `embedding, visual.patch_embed`."""
    modules = _ordered(path.rpartition(".")[0] or path for path in paths)
    outer = [name for name in modules if not any(name.startswith(f"{module}.") for module in modules)]
    return ", ".join(outer) or "inputs"
