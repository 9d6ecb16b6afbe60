"""The compiled programs of a microbatch: those of each stage, for each shape of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from ..fsdp import Fsdp
from .flat import Rows
from .gradients import Key
from .stages import Stage, Step, backward, cut, forward, infer
from .trace import MarkingWalk


class Microbatch:
    """The steps of one shape of batch, and the compiled programs of each: see `stages`.

    `keys[i]` are the (unit, layer) of the weights of step `i`, `back` the steps of the backward pass in order, `pushes`
    the keys of all gradients, in the order in which they are pushed. A device compiles a program at its first use.
    """

    def __init__(self, rows: Rows, function: Callable[[Any, Any], Any], params: Any, batch: Any, remat: bool) -> None:
        self.program = cut(function, params, batch)
        self.steps = self.program.steps
        home = {piece.leaf: u for u, unit in enumerate(rows.units) for piece in unit.pieces}
        needed = {id(step.stage): sorted({home[leaf] for leaf in step.stage.weights}) for step in self.steps}
        self.keys = [tuple((u, step.layer) for u in needed[id(step.stage)]) for step in self.steps]
        self.back = [k for k in reversed(range(len(self.steps))) if self.steps[k].learns]
        self.pushes: list[Key] = [key for k in self.back for key in self.keys[k]]
        self._compiled: dict[tuple[int, str], Callable] = {}
        self._rows, self._needed, self._remat = rows, needed, remat

    def forward(self, step: Step) -> Callable[[Any, list, Any], tuple[list, Any]]:
        return self._jitted(step.stage, "forward")

    def backward(self, step: Step) -> Callable[[Any, Any, list], tuple[Any, list]]:
        return self._jitted(step.stage, "backward")

    def infer(self, step: Step) -> Callable[[Any, list, Any], list]:
        return self._jitted(step.stage, "infer")

    def _jitted(self, stage: Stage, kind: str) -> Callable:
        name = (id(stage), kind)
        if name not in self._compiled:
            units = self._needed[id(stage)]

            def whole(rows: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
                return self._rows.whole(units, rows, stage.weights)

            if kind == "forward":
                made: Callable = forward(stage, whole, self._remat)
            else:
                made = backward(whole) if kind == "backward" else infer(stage, whole)
            self._compiled.setdefault(name, _one_first(jax.jit(made)))  # all threads call the same one
        return self._compiled[name]


class StagePrograms:
    """Microbatches by their shapes."""

    def __init__(self, rows: Rows, strategy: Fsdp) -> None:
        self._rows, self._strategy = rows, strategy
        self._known: dict[tuple, Microbatch] = {}
        self._lock = threading.Lock()
        # As the rows are.
        self._params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, strategy.compute_dtype), strategy.abstract
        )
        self._walk = MarkingWalk()

    def training(self, batch: Any) -> Microbatch:
        """Results: (loss, tally)."""
        strategy = self._strategy
        return self._of("training", lambda model, batch: strategy.loss(model, batch, self._walk), batch)

    def scoring(self, inputs: Any) -> Microbatch:
        """Results: those of the strategy's `forward`."""
        strategy = self._strategy
        return self._of("scoring", lambda model, inputs: strategy.forward(model, inputs, self._walk), inputs)

    def _of(self, kind: str, function: Callable[[Any, Any], Any], batch: Any) -> Microbatch:
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
        leaves, tree = jax.tree.flatten(abstract)
        name = (kind, tree, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves))
        with self._lock:
            if name not in self._known:
                graphdef = self._strategy.graphdef

                def traced(params: Any, batch: Any) -> Any:
                    return function(nnx.merge(graphdef, params), batch)

                self._known[name] = Microbatch(self._rows, traced, self._params, abstract, self._strategy.remat)
            return self._known[name]


def _one_first(program: Callable) -> Callable:
    """`program`, first called by one thread alone if compiled programs are kept: others find there what it compiles.

    All devices come to a new program at about the same time; each would compile it for itself.
    """
    if not jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return program
    lock, called = threading.Lock(), threading.Event()

    def call(*args: Any) -> Any:
        if called.is_set():
            return program(*args)
        with lock:
            results = program(*args)
            called.set()
            return results

    return call
