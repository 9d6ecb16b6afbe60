"""One device's way through its microbatches: it fetches the weights of the next layers, computes one, pushes gradients.

Programs are dispatched without waiting for them; what bounds how far dispatch runs ahead, and so how many layers'
weights a device holds, is `Window`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..strategy import Tally
from .gradients import Device, Gradients, Key
from .programs import Microbatch, pull_back

Row = tuple[jax.Array, ...]  # one unit's rows, of each of its owners, on the worker's device


class Fetcher:
    """Brings rows to `device`, from wherever their owners are: from one device to another, not through the host."""

    def __init__(
        self, device: Device, owners: Sequence[Device], rows: Sequence[Sequence[dict[Device, jax.Array]]]
    ) -> None:
        self._device, self._owners, self._rows = device, owners, rows

    def fetch(self, key: Key) -> Row:
        """Starts the transfers; the rows need not have arrived."""
        unit, layer = key
        shards = self._rows[unit][layer]
        return tuple(jax.device_put([shards[owner] for owner in self._owners], self._device))


class Window:
    """The weights that a device holds while it takes its steps: at most those of `live` steps that follow each other.

    `needs` are the keys of each step. Of `live` 3 or more, one step is dispatched while the one before is computed.
    """

    def __init__(self, fetch: Callable[[Key], Row], needs: Sequence[Sequence[Key]], live: int) -> None:
        self._fetch, self._needs = fetch, needs
        self._lag = 1 if live > 2 else 0
        self._ahead = live - 1 - self._lag
        self._held: dict[Key, Row] = {}
        self._results: list[Any] = []  # of the steps taken

    def step(self, number: int) -> list[Row]:
        """The rows for this step, and on their way those of the next; steps are taken in order."""
        done = number - 1 - self._lag
        if done >= 0:
            jax.block_until_ready(self._results[done])
            self._results[done] = None
        wanted = {key for needs in self._needs[number : number + 1 + self._ahead] for key in needs}
        self._held = {key: rows for key, rows in self._held.items() if key in wanted}
        for needs in self._needs[number : number + 1 + self._ahead]:
            for key in needs:
                if key not in self._held:
                    self._held[key] = self._fetch(key)
        return [self._held[key] for key in self._needs[number]]

    def dispatched(self, result: jax.Array) -> None:
        """`result` is any output of the step's program."""
        self._results.append(result)

    def finish(self) -> None:
        jax.block_until_ready([result for result in self._results if result is not None])
        self._held = {}


class Worker:
    """Device `number`'s part of a minibatch: the microbatches `own`, indices of `batches`, one after the other.

    `place` says what it is at, `tally` is the sum of its results, `results` those of `score` by index.
    """

    def __init__(
        self,
        number: int,
        device: Device,
        fetch: Callable[[Key], Row],
        batches: Sequence[Any],
        own: Sequence[int],
        live: int,
        check: Callable[[], None],
    ) -> None:
        self.number, self.device = number, device
        self.place = "before its first microbatch"
        self.results: dict[int, Any] = {}
        self.tally: Any = None  # like the results of a training program
        self.seconds = 0.0
        self._fetch, self._batches, self._own, self._live, self._check = fetch, batches, own, live, check

    def train(self, microbatches: Sequence[Microbatch], gradients: Gradients, owners: Sequence[Device]) -> None:
        """Forward and backward through each microbatch; `microbatches[i]` runs batch `i`."""
        needs = [keys for i in self._own for keys in (*microbatches[i].keys, *reversed(microbatches[i].keys))]
        window = Window(self._fetch, needs, self._live)
        at = 0
        for number, index in enumerate(self._own):
            one = microbatches[index]
            values = self._values(one, index)
            saved: list[Any] = []
            for step in one.steps:
                rows = self._arrive(window, at, f"{number + 1} of {len(self._own)}, {step.name}")
                outputs, pull = one.forward(step)(rows, [values[slot] for slot in step.reads], np.int32(step.layer))
                values |= dict(zip(step.writes, outputs, strict=True))
                saved.append((pull, [(out.shape, out.dtype) for out in outputs]))
                window.dispatched(outputs[0])
                at += 1
                for slot in step.last:
                    values.pop(slot, None)
            self._add_tally(one, values)
            loss: Any = one.program.outputs[0]
            cotangents: dict[int, Any] = {loss: np.ones((), np.float32)}
            del values
            for k in reversed(range(len(one.steps))):
                step, keys = one.steps[k], one.keys[k]
                rows = self._arrive(window, at, f"{number + 1} of {len(self._own)}, {step.name} backward")
                pull, shapes = saved.pop()
                pairs = zip(step.writes, shapes, step.stage.active_out, strict=True)
                given = [
                    cotangents.pop(s, None) if s in cotangents else np.zeros(*shape) for s, shape, on in pairs if on
                ]
                gradient_rows, back = pull_back(pull, rows, given)
                window.dispatched(gradient_rows[0][0] if gradient_rows else back[0])
                at += 1
                active = [slot for slot, on in zip(step.reads, step.stage.active_in, strict=True) if on]
                for slot, gradient in zip(active, back, strict=True):
                    cotangents[slot] = _plus(cotangents[slot], gradient) if slot in cotangents else gradient
                for key, own_rows in zip(keys, gradient_rows, strict=True):
                    for owner, row in zip(owners, own_rows, strict=True):
                        gradients.push(owner, key, (self.number, number), row)
        window.finish()

    def score(self, microbatches: Sequence[Microbatch]) -> None:
        """Forward only."""
        needs = [keys for i in self._own for keys in microbatches[i].keys]
        window = Window(self._fetch, needs, self._live)
        at = 0
        for number, index in enumerate(self._own):
            one = microbatches[index]
            values = self._values(one, index)
            for step in one.steps:
                rows = self._arrive(window, at, f"{number + 1} of {len(self._own)}, {step.name}")
                outputs = one.infer(step)(rows, [values[slot] for slot in step.reads], np.int32(step.layer))
                values |= dict(zip(step.writes, outputs, strict=True))
                window.dispatched(outputs[0])
                at += 1
                for slot in step.last:
                    values.pop(slot, None)
            self.results[index] = jax.tree.unflatten(one.program.tree, self._outputs(one, values))
        window.finish()

    def _values(self, one: Microbatch, index: int) -> dict[int, jax.Array]:
        leaves = jax.device_put(jax.tree.leaves(self._batches[index]), self.device)
        return dict(zip(one.program.inputs, leaves, strict=True))

    def _arrive(self, window: Window, at: int, place: str) -> list[Row]:
        self.place = f"microbatch {place}"
        self._check()
        return window.step(at)

    def _outputs(self, one: Microbatch, values: dict[int, jax.Array]) -> list[Any]:
        return [values[o] if isinstance(o, int) else jax.device_put(o, self.device) for o in one.program.outputs]

    def _add_tally(self, one: Microbatch, values: dict[int, jax.Array]) -> None:
        more = jax.tree.unflatten(one.program.tree, self._outputs(one, values))
        self.tally = more if self.tally is None else _joined(self.tally, more)


@jax.jit
def _joined(one: tuple[jax.Array, Tally], other: tuple[jax.Array, Tally]) -> tuple[jax.Array, Tally]:
    return one[0] + other[0], one[1] + other[1]


@jax.jit
def _plus(one: jax.Array, other: jax.Array) -> jax.Array:
    return one + other
