"""The compiled programs of a microbatch: forward, backward and inference of each stage."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from ..walk import REMAT, Params
from .flat import ParameterRows
from .stages import Arrays, Layer, Program, Stage
from .traffic import Key, Row

T = TypeVar("T")
Whole = Callable[[Sequence[Row]], list[jax.Array]]  # rows of `ParameterRows` -> complete weights


class StagedMicrobatch(Program):
    """The steps of batches of one shape (`stages`), and the compiled programs of these steps. `keys[i]` are the keys
    (unit, layer) of the weights of step `i`. `back` has the numbers of the steps of the backward pass, in order.
    `pushes` has the keys of all gradients, in the order of their pushes.

    Each stage has three programs, compiled at their first use on each device: `forward[stage]`, `(rows, values, layer)
    -> (outputs, saved)`, where `saved` has the values that `remat` keeps (with `none`, every value), except complete
    weights; `backward[stage]`, `(saved, rows, active outputs' gradients) -> (gradient rows, active inputs' gradients)`;
    and `infer[stage]`, `(rows, values, layer) -> (outputs, None)`."""

    def __init__(
        self,
        rows: ParameterRows,
        function: Callable[[Params, PyTree], PyTree],
        params: Params,
        batch: PyTree,
        remat: str,
    ) -> None:
        super().__init__(function, params, batch)
        home = {piece.leaf: u for u, unit in enumerate(rows.units) for piece in unit.pieces}
        units = {step.stage: sorted({home[leaf] for leaf in step.stage.weights}) for step in self.steps}
        self.keys = [tuple((u, step.layer) for u in units[step.stage]) for step in self.steps]
        stages = list(enumerate(step.stage for step in self.steps))
        self.back = [k for k, stage in reversed(stages) if stage.weights or any(stage.active_in)]  # gradients flow
        self.pushes: list[Key] = [key for k in self.back for key in self.keys[k]]
        whole = {stage: functools.partial(rows.whole, units[stage], leaves=stage.weights) for stage in units}
        self.forward, self.backward, self.infer = (  # shared by all threads
            {stage: _one_first(jax.jit(build(stage, whole[stage], remat))) for stage in units}
            for build in (_forward, _backward, _infer)
        )


def _one_first(program: Callable) -> Callable:
    """Lets one thread call `program` first and alone if JAX caches compiled programs, so that all other threads read
    the cache. All devices reach a new program at about the same time, so each thread would else compile the program."""
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


@functools.partial(jax.tree_util.register_static)
@dataclasses.dataclass(frozen=True)
class _Dropped:
    """Replaces the complete weight `index` in saved values, because the weight is fetched again."""

    index: int


def _forward(stage: Stage, whole: Whole, remat: str) -> Callable:
    def run(rows: Sequence[Row], values: Arrays, layer: Layer) -> tuple[list[jax.Array], PyTree]:
        active, passive = _split(stage.active_in, values)
        weights = whole(rows)

        def body(weights: Arrays, active: Arrays, passive: Arrays, layer: Layer) -> list[jax.Array]:
            return stage.function(weights, _merge(stage.active_in, active, passive), layer)

        if remat != "none":  # nothing can be merged across the passes, which are separate programs
            body = jax.checkpoint(body, prevent_cse=False, policy=REMAT[remat])

        def active_part(weights: Arrays, active: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
            return _split(stage.active_out, body(weights, active, passive, layer))

        active_out, pull, passive_out = jax.vjp(active_part, weights, active, has_aux=True)
        position = {id(weight): k for k, weight in enumerate(weights)}
        leaves, tree = jax.tree.flatten(pull)
        kept = [_Dropped(position[id(leaf)]) if id(leaf) in position else leaf for leaf in leaves]
        return _merge(stage.active_out, active_out, passive_out), jax.tree.unflatten(tree, kept)

    return run


def _backward(stage: Stage, whole: Whole, remat: str) -> Callable:
    def run(
        pull: PyTree, rows: Sequence[Row], cotangents: Sequence[jax.Array | np.ndarray]
    ) -> tuple[list[Row], list[jax.Array]]:
        weights, to_rows = jax.vjp(whole, rows)
        leaves, tree = jax.tree.flatten(pull, is_leaf=lambda leaf: isinstance(leaf, _Dropped))
        filled = [weights[leaf.index] if isinstance(leaf, _Dropped) else leaf for leaf in leaves]
        gradients, back = jax.tree.unflatten(tree, filled)(cotangents)
        return to_rows(gradients)[0], back

    return run


def _infer(stage: Stage, whole: Whole, remat: str) -> Callable:
    return lambda rows, values, layer: (stage.function(whole(rows), values, layer), None)


def _split(active: Sequence[bool], values: Sequence[T]) -> tuple[list[T], list[T]]:
    pairs = list(zip(active, values, strict=True))
    return [value for on, value in pairs if on], [value for on, value in pairs if not on]


def _merge(active: Sequence[bool], first: Sequence[T], second: Sequence[T]) -> list[T]:
    sides = iter(first), iter(second)
    return [next(sides[not on]) for on in active]
