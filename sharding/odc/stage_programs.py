"""The compiled programs of a microbatch: those of each stage, for each shape of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jaxtyping import PyTree

from ..fsdp import Fsdp
from ..strategy import Params
from ..walk import Walk
from .flat import Rows
from .pushed_gradients import Key
from .stages import Backward, Forward, Infer, Step, Whole, backward, cut, forward, infer
from .trace import MarkingWalk
from .window import Row


class StagedMicrobatch:
    """The steps of one shape of batch, and the compiled programs of each: see `stages`.

    `keys[i]` are the (unit, layer) of the weights of step `i`, `back` the steps of the backward pass in order, `pushes`
    the keys of all gradients, in the order in which they are pushed. A device compiles a program at its first use.
    """

    def __init__(
        self, rows: Rows, function: Callable[[Params, PyTree], PyTree], params: Params, batch: PyTree, remat: bool
    ) -> None:
        self.program = cut(function, params, batch)
        self.steps = self.program.steps
        home = {piece.leaf: u for u, unit in enumerate(rows.units) for piece in unit.pieces}
        needed = {id(step.stage): sorted({home[leaf] for leaf in step.stage.weights}) for step in self.steps}
        self.keys = [tuple((u, step.layer) for u in needed[id(step.stage)]) for step in self.steps]
        self.back = [k for k in reversed(range(len(self.steps))) if self.steps[k].learns]
        self.pushes: list[Key] = [key for k in self.back for key in self.keys[k]]
        self._compiled: dict[tuple[int, str], Callable] = {}
        self._rows, self._needed, self._remat = rows, needed, remat

    def forward(self, step: Step) -> Forward:
        return self._jitted(step, "forward", lambda whole: forward(step.stage, whole, self._remat))

    def backward(self, step: Step) -> Backward:
        return self._jitted(step, "backward", backward)

    def infer(self, step: Step) -> Infer:
        return self._jitted(step, "infer", lambda whole: infer(step.stage, whole))

    def _jitted(self, step: Step, kind: str, build: Callable[[Whole], Callable]) -> Callable:
        name = (id(step.stage), kind)
        if name not in self._compiled:
            units, weights = self._needed[id(step.stage)], step.stage.weights

            def whole(rows: Sequence[Row]) -> list[jax.Array]:
                return self._rows.whole(units, rows, weights)

            self._compiled.setdefault(name, _one_first(jax.jit(build(whole))))  # all threads call the same one
        return self._compiled[name]


class StagePrograms:
    """The microbatches of a strategy, one for each shape of a batch."""

    def __init__(self, rows: Rows, strategy: Fsdp) -> None:
        self._rows, self._strategy = rows, strategy
        self._known: dict[tuple, StagedMicrobatch] = {}
        self._lock = threading.Lock()
        dtype = strategy.compute_dtype  # that of the rows
        self._params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), strategy.abstract)

    def training(self, batch: PyTree) -> StagedMicrobatch:
        """The microbatch whose results are (loss, tally)."""
        return self._of("training", self._strategy.loss, batch)

    def scoring(self, inputs: PyTree) -> StagedMicrobatch:
        """The microbatch whose results are those of the strategy's `forward`."""
        return self._of("scoring", self._strategy.forward, inputs)

    def _of(self, kind: str, function: Callable[[nnx.Module, PyTree, Walk], PyTree], batch: PyTree) -> StagedMicrobatch:
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
        leaves, tree = jax.tree.flatten(abstract)
        name = (kind, tree, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves))
        with self._lock:
            if name not in self._known:
                graphdef = self._strategy.graphdef

                def traced(params: Params, batch: PyTree) -> PyTree:
                    return function(nnx.merge(graphdef, params), batch, MarkingWalk())

                self._known[name] = StagedMicrobatch(self._rows, traced, self._params, abstract, self._strategy.remat)
            return self._known[name]


def _one_first(program: Callable) -> Callable:
    """Lets one thread call `program` first and alone if compiled programs are kept: others find there what it compiles.

    All devices come to a new program at about the same time; each would compile it for itself.
    """
    if not jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return program
    lock, called = threading.Lock(), threading.Event()

    def call(*args: PyTree) -> PyTree:
        if called.is_set():
            return program(*args)
        with lock:
            results = program(*args)
            called.set()
            return results

    return call
