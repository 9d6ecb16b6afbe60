"""One device's way through its microbatches: it fetches the weights of the next layers, computes one, pushes gradients.

Programs are dispatched without waiting for them; what bounds how far dispatch runs ahead is the window.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..strategy import Tally
from .gradients import Device, Key
from .stage_programs import Microbatch
from .stages import Step
from .window import Itinerary, Row, Window


@dataclasses.dataclass(frozen=True)
class Task:
    """A device's part of a minibatch: the batches `own` (indices of `batches`), each as `microbatches` runs it."""

    own: tuple[int, ...]
    batches: Sequence[Any]
    microbatches: Sequence[Microbatch]

    def training(self, live: int) -> Itinerary:
        ways = [self.microbatches[i] for i in self.own]
        return Itinerary(tuple(keys for one in ways for keys in (*one.keys, *(one.keys[k] for k in one.back))), live)

    def scoring(self, live: int) -> Itinerary:
        return Itinerary(tuple(keys for i in self.own for keys in self.microbatches[i].keys), live)

    def pushes(self) -> list[tuple[int, Key]]:
        """(own microbatch, key) of each push of training, in order."""
        return [(number, key) for number, i in enumerate(self.own) for key in self.microbatches[i].pushes]


class Worker:
    """Device `number` at work on its task.

    `place` says what it is at, `tally` is the sum of its results, `results` those of `score` by index.
    """

    def __init__(self, number: int, device: Device, task: Task, check: Callable[[], None]) -> None:
        self.number, self.device, self.task = number, device, task
        self.place = "its first microbatch"
        self.results: dict[int, Any] = {}
        self.tally: Any = None  # like the results of a training program
        self.seconds = 0.0
        self._check = check

    def train(self, window: Window, push: Callable[[Key, int, Sequence[jax.Array]], None]) -> None:
        """Forward and backward through each microbatch; `push(key, own microbatch, rows)` takes gradients away.

        What is not computed yet is not pushed: its owner's device, which works in order, would wait for it.
        """
        ready = collections.deque[tuple[int, Key, int, Sequence[jax.Array]]]()

        def push_done(steps: int) -> None:
            while ready and ready[0][0] < steps:
                _, key, number, rows = ready.popleft()
                push(key, number, rows)

        steps = 0
        for number, index in enumerate(self.task.own):
            one = self.task.microbatches[index]
            values = self._values(one, index)
            saved: list[Any] = []
            for step in one.steps:
                rows = self._next(window, number, step.name)
                outputs, pull = one.forward(step)(rows, [values[slot] for slot in step.reads], np.int32(step.layer))
                del rows  # the next step fetches before it has others to put in their place
                window.dispatched(outputs[0])
                steps += 1
                push_done(window.done)
                saved.append((pull, [(out.shape, out.dtype) for out in outputs]))
                _hand_on(values, step, outputs)
            results = self._outputs(one, values)
            self.tally = results if self.tally is None else _joined(self.tally, results)
            loss: Any = one.program.outputs[0]
            del values
            cotangents: dict[int, Any] = {loss: np.ones((), np.float32)}
            for k in one.back:
                step = one.steps[k]
                rows = self._next(window, number, f"{step.name} backward")
                pull, shapes = saved[k]
                saved[k] = None
                given = [
                    cotangents.pop(slot) if slot in cotangents else np.zeros(*shape)
                    for slot, shape, active in zip(step.writes, shapes, step.stage.active_out, strict=True)
                    if active
                ]
                gradient_rows, back = one.backward(step)(pull, rows, given)
                del rows, pull
                window.dispatched(gradient_rows[0][0] if gradient_rows else back[0])
                active = [slot for slot, on in zip(step.reads, step.stage.active_in, strict=True) if on]
                for slot, gradient in zip(active, back, strict=True):
                    cotangents[slot] = _plus(cotangents[slot], gradient) if slot in cotangents else gradient
                ready.extend((steps, key, number, own) for key, own in zip(one.keys[k], gradient_rows, strict=True))
                steps += 1
                push_done(window.done)
        window.finish()
        push_done(steps)

    def score(self, window: Window) -> None:
        """Forward only."""
        for number, index in enumerate(self.task.own):
            one = self.task.microbatches[index]
            values = self._values(one, index)
            for step in one.steps:
                rows = self._next(window, number, step.name)
                outputs = one.infer(step)(rows, [values[slot] for slot in step.reads], np.int32(step.layer))
                del rows
                window.dispatched(outputs[0])
                _hand_on(values, step, outputs)
            self.results[index] = self._outputs(one, values)
        window.finish()

    def _values(self, one: Microbatch, index: int) -> dict[int, jax.Array]:
        leaves = jax.device_put(jax.tree.leaves(self.task.batches[index]), self.device)
        return dict(zip(one.program.inputs, leaves, strict=True))

    def _next(self, window: Window, number: int, place: str) -> list[Row]:
        self.place = f"microbatch {number + 1} of {len(self.task.own)}, {place}"
        self._check()
        return window.next()

    def _outputs(self, one: Microbatch, values: dict[int, jax.Array]) -> Any:
        outputs = [values[o] if isinstance(o, int) else jax.device_put(o, self.device) for o in one.program.outputs]
        return jax.tree.unflatten(one.program.tree, outputs)


def _hand_on(values: dict[int, jax.Array], step: Step, outputs: Sequence[jax.Array]) -> None:
    values.update(zip(step.writes, outputs, strict=True))
    for slot in step.last:
        values.pop(slot, None)


@jax.jit
def _joined(one: tuple[jax.Array, Tally], other: tuple[jax.Array, Tally]) -> tuple[jax.Array, Tally]:
    return one[0] + other[0], one[1] + other[1]


@jax.jit
def _plus(one: jax.Array, other: jax.Array) -> jax.Array:
    return one + other
