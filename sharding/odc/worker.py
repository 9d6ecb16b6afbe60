"""Walks a device through its microbatches: fetches the weights of the next layers, computes one, pushes gradients.

Programs are dispatched without waiting for their results; the window bounds how far dispatch runs ahead.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from ..links import Device
from ..walk import Tally
from .pushed_gradients import Key
from .stage_programs import StagedMicrobatch
from .stages import Step
from .traffic import Itinerary, Row, Window


@dataclasses.dataclass(frozen=True)
class Task:
    """A device's part of a minibatch: the batches `batches[i]` for `i` in `indices`, each run as `microbatches[i]`."""

    indices: tuple[int, ...]
    batches: Sequence[PyTree]
    microbatches: Sequence[StagedMicrobatch]

    def training(self, live: int) -> Itinerary:
        needs: list[tuple[Key, ...]] = []
        for microbatch in (self.microbatches[i] for i in self.indices):
            needs += [*microbatch.keys, *(microbatch.keys[k] for k in microbatch.back)]
        return Itinerary(tuple(needs), live)

    def scoring(self, live: int) -> Itinerary:
        return Itinerary(tuple(keys for i in self.indices for keys in self.microbatches[i].keys), live)

    def pushes(self) -> list[tuple[int, Key]]:
        """The pushes of training, in order, as (number of the device's microbatch, key)."""
        return [(number, key) for number, i in enumerate(self.indices) for key in self.microbatches[i].pushes]


class Worker:
    """Runs the task of device `number`.

    `place` describes the present step, `tally` is the sum of the results, `results` are those of `score` by index.
    """

    def __init__(
        self,
        number: int,
        device: Device,
        task: Task,
        check: Callable[[], None],
        read: Callable[[PyTree], PyTree] = lambda batch: batch,
    ) -> None:
        """`read` returns the host arrays of a batch."""
        self._read = read
        self.number, self.device, self.task = number, device, task
        self.place = "its first microbatch"
        self.results: dict[int, PyTree] = {}
        self.tally: tuple[jax.Array, Tally] | None = None  # like the results of a training program
        self.seconds = 0.0
        self._check = check

    def train(self, window: Window, push: Callable[[Key, int, Sequence[jax.Array]], None]) -> None:
        """Goes forward and backward through each microbatch. `push(key, microbatch's number, rows)` sends gradients.

        Gradients are pushed only when they are computed: otherwise the owner, which works in order, would wait.
        """
        ready = collections.deque[tuple[int, Key, int, Sequence[jax.Array]]]()

        def push_done(steps: int) -> None:
            while ready and ready[0][0] < steps:
                _, key, number, rows = ready.popleft()
                push(key, number, rows)

        steps = 0
        for number, index in enumerate(self.task.indices):
            microbatch = self.task.microbatches[index]
            values = self._values(microbatch, index)
            saved: dict[int, tuple[PyTree, list[tuple[tuple[int, ...], np.dtype]]]] = {}
            for k, step in enumerate(microbatch.steps):
                rows = self._next(window, number, step.name)
                inputs = [values[slot] for slot in step.reads]
                outputs, pull = microbatch.forward(step)(rows, inputs, np.int32(step.layer))
                del rows, inputs  # frees them before the next step fetches its own
                window.dispatched(outputs[0])
                steps += 1
                push_done(window.done)
                saved[k] = pull, [(out.shape, out.dtype) for out in outputs]
                _hand_on(values, step, outputs)
            results = self._outputs(microbatch, values)
            self.tally = results if self.tally is None else _joined(self.tally, results)
            loss = microbatch.program.outputs[0]
            assert isinstance(loss, int)  # a constant loss has no backward pass
            del values
            cotangents: dict[int, jax.Array | np.ndarray] = {loss: np.ones((), np.float32)}
            for k in microbatch.back:
                step = microbatch.steps[k]
                rows = self._next(window, number, f"{step.name} backward")
                pull, shapes = saved.pop(k)
                given = [
                    cotangents.pop(slot) if slot in cotangents else np.zeros(*shape)
                    for slot, shape, active in zip(step.writes, shapes, step.stage.active_out, strict=True)
                    if active
                ]
                gradient_rows, back = microbatch.backward(step)(pull, rows, given)
                del rows, pull
                window.dispatched(gradient_rows[0][0] if gradient_rows else back[0])
                active = [slot for slot, on in zip(step.reads, step.stage.active_in, strict=True) if on]
                for slot, gradient in zip(active, back, strict=True):
                    cotangents[slot] = _plus(cotangents[slot], gradient) if slot in cotangents else gradient
                keys = microbatch.keys[k]
                ready.extend((steps, key, number, row) for key, row in zip(keys, gradient_rows, strict=True))
                steps += 1
                push_done(window.done)
        window.finish()
        push_done(steps)

    def score(self, window: Window) -> None:
        """Goes forward only."""
        for number, index in enumerate(self.task.indices):
            microbatch = self.task.microbatches[index]
            values = self._values(microbatch, index)
            for step in microbatch.steps:
                rows = self._next(window, number, step.name)
                outputs = microbatch.infer(step)(rows, [values[slot] for slot in step.reads], np.int32(step.layer))
                del rows
                window.dispatched(outputs[0])
                _hand_on(values, step, outputs)
            self.results[index] = self._outputs(microbatch, values)
        window.finish()

    def _values(self, microbatch: StagedMicrobatch, index: int) -> dict[int, jax.Array]:
        leaves = jax.device_put(jax.tree.leaves(self._read(self.task.batches[index])), self.device)
        return dict(zip(microbatch.program.inputs, leaves, strict=True))

    def _next(self, window: Window, number: int, place: str) -> list[Row]:
        self.place = f"microbatch {number + 1} of {len(self.task.indices)}, {place}"
        self._check()
        return window.next()

    def _outputs(self, microbatch: StagedMicrobatch, values: dict[int, jax.Array]) -> PyTree:
        program = microbatch.program
        outputs = [values[o] if isinstance(o, int) else jax.device_put(o, self.device) for o in program.outputs]
        return jax.tree.unflatten(program.tree, outputs)


def _hand_on(values: dict[int, jax.Array], step: Step, outputs: Sequence[jax.Array]) -> None:
    values.update(zip(step.writes, outputs, strict=True))
    for slot in step.last:
        values.pop(slot, None)


@jax.jit
def _joined(before: tuple[jax.Array, Tally], more: tuple[jax.Array, Tally]) -> tuple[jax.Array, Tally]:
    return before[0] + more[0], before[1] + more[1]


@jax.jit
def _plus(before: jax.Array, more: jax.Array) -> jax.Array:
    return before + more
