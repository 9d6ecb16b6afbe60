"""Runs a minibatch with a worker thread for each device. One barrier ends the minibatch.

A worker fetches the weights of the next step, computes a step, and pushes gradients. Programs are dispatched without
waiting for their results. The window bounds the number of steps that are dispatched ahead.
"""

import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..links import LinkError, Links
from ..mesh import Device
from ..walk import Forward, Fsdp, Loss, Params, Tally
from . import OdcError
from .flat import ParameterRows
from .stage_programs import StagedMicrobatch
from .stages import MarkingWalk, Stage
from .traffic import Itinerary, Key, PushedGradients, Row, Traffic, Turn, Window

Push = Callable[[Key, int, Sequence[jax.Array]], None] | None  # sends (key, number of the microbatch, rows)
_numbers = itertools.count(1)  # numbers of minibatches, which all processes run in the same order


class _Failure:
    """The first error of any thread. All other threads, also in other processes, stop at their next step."""

    def __init__(self, links: Links | None) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._error: OdcError | None = None

    @contextlib.contextmanager
    def noting(self, what: Callable[[], str]) -> Iterator[None]:
        """Records an error of the block, so that no other thread waits for this thread. `what` describes the work."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                if self._error is None:
                    ours = f"{what()}: {type(error).__name__}: {error}"
                    self._error = OdcError(str(error) if isinstance(error, LinkError) else ours)
                    self._error.__cause__ = error
                    if self._links is not None and not isinstance(error, LinkError):
                        self._links.fail(str(self._error))

    def check(self) -> None:
        if self._error is not None:
            raise self._error


@dataclasses.dataclass(frozen=True)
class Task:
    """A device's part of a minibatch: it runs the batches of these indices by the programs of `microbatches`."""

    indices: tuple[int, ...]
    batches: Sequence[PyTree]
    microbatches: Sequence[StagedMicrobatch]

    def itinerary(self, train: bool) -> Itinerary:
        """Returns the keys of the weights of each step, forward and, if `train`, backward through each microbatch."""
        needs: list[tuple[Key, ...]] = []
        for microbatch in (self.microbatches[i] for i in self.indices):
            needs += [*microbatch.keys, *(microbatch.keys[k] for k in microbatch.back if train)]
        return needs

    def pushes(self) -> list[tuple[int, Key]]:
        """Returns the pushes of training, in order, as (number of the device's microbatch, key)."""
        return [(number, key) for number, i in enumerate(self.indices) for key in self.microbatches[i].pushes]


class Worker:
    """Runs the task of device `number`. `read` returns the host arrays of a batch."""

    def __init__(
        self, number: int, device: Device, task: Task, check: Callable[[], None], read: Callable[[PyTree], PyTree]
    ) -> None:
        self.number, self.device, self.task = number, device, task
        self.place = "its first microbatch"  # describes the present step
        self.results: dict[int, PyTree] = {}  # of forward passes without training, by the index of the batch
        self.tally: tuple[jax.Array, Tally] | None = None  # (loss, tally) of all trained microbatches so far
        self.seconds = 0.0
        self._check, self._read = check, read
        self._steps = 0  # steps dispatched so far
        self._computing = collections.deque[tuple[int, Key, int, Sequence[jax.Array]]]()  # (step, push's arguments)

    def run(self, window: Window, push: Push) -> None:
        """Goes forward through each microbatch and, with a `push`, backward. Gradients are pushed only after they are
        computed. Otherwise the owner's device, which works in order, would wait for this device."""
        for number, index in enumerate(self.task.indices):
            microbatch = self.task.microbatches[index]
            if push is None:
                self.results[index], _ = self._forward(window, number, microbatch, microbatch.infer, push)
                continue
            results, saved = self._forward(window, number, microbatch, microbatch.forward, push)
            self.tally = results if self.tally is None else _joined(self.tally, results)
            loss = microbatch.outputs[0]
            assert isinstance(loss, int)  # a constant loss has no backward pass
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
                gradient_rows, back = microbatch.backward[step.stage](pull, rows, given)
                del rows, pull
                window.dispatched(gradient_rows[0][0] if gradient_rows else back[0])
                active = [slot for slot, on in zip(step.reads, step.stage.active_in, strict=True) if on]
                for slot, gradient in zip(active, back, strict=True):
                    cotangents[slot] = _plus(cotangents[slot], gradient) if slot in cotangents else gradient
                pushes = zip(microbatch.keys[k], gradient_rows, strict=True)
                self._computing.extend((self._steps, key, number, row) for key, row in pushes)
                self._steps += 1
                self._push(push, window.done)
        window.finish()
        self._push(push, self._steps)

    def _forward(
        self, window: Window, number: int, microbatch: StagedMicrobatch, programs: Mapping[Stage, Callable], push: Push
    ) -> tuple[PyTree, dict[int, tuple[PyTree, list[tuple[tuple[int, ...], np.dtype]]]]]:
        batch, saved = self.task.batches[self.task.indices[number]], {}
        leaves = jax.device_put(jax.tree.leaves(self._read(batch)), self.device)
        values: dict[int, jax.Array] = dict(zip(microbatch.inputs, leaves, strict=True))
        del leaves
        for k, step in enumerate(microbatch.steps):
            rows = self._next(window, number, step.name)
            inputs = [values[slot] for slot in step.reads]
            outputs, pull = programs[step.stage](rows, inputs, np.int32(step.layer))
            del rows, inputs  # frees the rows and inputs before the next step fetches rows
            window.dispatched(outputs[0])
            self._steps += 1
            self._push(push, window.done)
            saved[k] = pull, [(out.shape, out.dtype) for out in outputs]
            values.update(zip(step.writes, outputs, strict=True))
            for slot in step.last:
                values.pop(slot, None)
        results = [values[o] if isinstance(o, int) else jax.device_put(o, self.device) for o in microbatch.outputs]
        return jax.tree.unflatten(microbatch.tree, results), saved

    def _push(self, push: Push, done: int) -> None:
        while push is not None and self._computing and self._computing[0][0] < done:
            push(*self._computing.popleft()[1:])

    def _next(self, window: Window, number: int, place: str) -> list[Row]:
        self.place = f"microbatch {number + 1} of {len(self.task.indices)}, {place}"
        self._check()
        return window.next()


class Odc:
    """Computes the loss and the log-probs of `strategy` with weights that are fetched on demand. Parameters and
    gradients are laid out as under `strategy`, which may also be used between two minibatches. While a minibatch runs,
    a device holds the complete weights of at most three steps (layers, or parts between two stacks of layers), and its
    part of the parameters in the compute dtype."""

    def __init__(
        self,
        strategy: Fsdp,
        *,
        deterministic: bool = False,
        group: int = 0,
        links: Links | None = None,
        read: Callable[[PyTree], PyTree] = lambda batch: batch,
    ) -> None:
        """`deterministic` adds gradients in an order that depends only on the minibatch and the predicted work. `group`
        neighbouring devices (0: all) together hold all parameters and gradients (hybrid sharding). `links` connect this
        process with the other processes, if there are several. `read` returns the host arrays of a batch, and is called
        just before the arrays are needed."""
        self.mesh, self._strategy = strategy.mesh, strategy
        self._deterministic = deterministic
        self._devices: list[Device] = list(self.mesh.devices.flat)
        self._local = [d for d, device in enumerate(self._devices) if device.process_index == jax.process_index()]
        self._rows = ParameterRows(strategy, group)
        self._links, self._read = links, read
        self._staged: dict[tuple, StagedMicrobatch] = {}
        self._lock = threading.Lock()
        self._combine = jax.jit(_combined, static_argnums=1, out_shardings=NamedSharding(self.mesh, P()))
        self.last_seconds: dict[int, float] = {}  # by local device: seconds of its part of the last minibatch
        self.idle = 0.0  # mean seconds from the end of a local device's part to the end of the minibatch

    def loss_and_grad(
        self, params: Params, batches: Sequence[PyTree], devices: Sequence[int], work: Sequence[float] = ()
    ) -> tuple[jax.Array, Tally, Params]:
        """Returns (loss, tally, gradients), summed over all microbatches. `devices[i]` computes the `i`-th microbatch.
        Every process needs the batches of its own devices as arrays on the host, and at least the shapes of all other
        batches. `work` is the predicted work of each batch, in any unit, and decides the deterministic order. Raises
        OdcError in all processes if a device or a process fails."""
        tasks = self._tasks(self._strategy.loss, batches, devices)
        failure = _Failure(self._links)
        orders = self._orders(tasks, work or [1.0] * len(batches)) if self._deterministic else None
        owners = [self._devices[d] for d in self._local]
        gradients = PushedGradients(owners, orders, failure.check)
        workers = self._run(params, tasks, failure, gradients)
        grads = self._rows.collect(self._gathered(gradients))
        loss, tally = self._tally(workers, tasks[0].microbatches[0])
        return loss, tally, grads

    def logprobs(self, params: Params, inputs: Sequence[PyTree], devices: Sequence[int]) -> list[PyTree]:
        """The result of `forward` for each of `inputs` on its device; None for a device of another process."""
        tasks = self._tasks(self._strategy.forward, inputs, devices)
        workers = self._run(params, tasks, _Failure(self._links))
        found = {i: result for worker in workers for i, result in worker.results.items()}
        return [found.get(i) for i in range(len(inputs))]

    def _tasks(self, function: Loss | Forward, batches: Sequence[PyTree], devices: Sequence[int]) -> list[Task]:
        if not batches or len(devices) != len(batches):
            raise ValueError(
                f"there must be one device for each microbatch, not {len(devices)} for {len(batches)}, and at least "
                "one microbatch"
            )
        if not set(devices) <= set(range(len(self._devices))):
            raise ValueError(
                f"microbatches are dealt to devices {sorted(set(devices))}, but the mesh has only {len(self._devices)} "
                "devices"
            )
        microbatches = [self._staged_for(function, batch) for batch in batches]
        shares = [tuple(i for i, d in enumerate(devices) if d == device) for device in range(len(self._devices))]
        return [Task(indices, batches, microbatches) for indices in shares]

    def _staged_for(self, function: Loss | Forward, batch: PyTree) -> StagedMicrobatch:
        """Returns the programs of the strategy's `loss` or `forward` for batches of the shapes of `batch`."""
        strategy = self._strategy
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
        leaves, tree = jax.tree.flatten(abstract)
        name = (function, tree, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves))

        def traced(params: Params, batch: PyTree) -> PyTree:
            return function(nnx.merge(strategy.graphdef, params), batch, MarkingWalk())

        with self._lock:
            if name not in self._staged:
                dtype = strategy.compute_dtype  # the dtype of the rows
                params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), strategy.abstract)
                self._staged[name] = StagedMicrobatch(self._rows, traced, params, abstract, strategy.remat)
            return self._staged[name]

    def _run(
        self, params: Params, tasks: Sequence[Task], failure: _Failure, gradients: PushedGradients | None = None
    ) -> list[Worker]:
        """Runs the tasks of this process's devices, each on its own thread; without `gradients`, only forward."""
        published, number = self._rows.publish(params), next(_numbers)
        trips = [task.itinerary(gradients is not None) for task in tasks]
        traffic = Traffic(self._rows, published, self._devices, self._local, self._links, number)
        with failure.noting(lambda: "offering weights to the other processes failed"):
            traffic.offer(trips)
        failure.check()
        workers = [Worker(d, self._devices[d], tasks[d], failure.check, self._read) for d in self._local]
        began = time.perf_counter()

        def work(worker: Worker) -> None:
            with failure.noting(lambda: f"{worker.device} failed in {worker.place}"):
                window = traffic.window(worker.number, trips[worker.number])
                worker.run(window, None if gradients is None else traffic.pusher(worker.number, gradients))
            worker.seconds = time.perf_counter() - began

        def serve(client: int, gradients: PushedGradients) -> None:
            with failure.noting(lambda: f"taking the gradients of {self._devices[client]} failed"):
                traffic.serve(client, tasks[client].pushes(), gradients)

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
        if gradients is not None:
            pairs = [(client, gradients) for client in traffic.clients]
            threads += [threading.Thread(target=serve, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failure.check()
        with failure.noting(lambda: "not all processes reached the end of the minibatch"):
            traffic.end()
        failure.check()
        self.last_seconds = {worker.number: worker.seconds for worker in workers}
        self.idle = time.perf_counter() - began - sum(self.last_seconds.values()) / len(workers)
        return workers

    def _orders(self, tasks: Sequence[Task], work: Sequence[float]) -> dict[Device, dict[Key, list[Turn]]]:
        """Returns, for each owner in this process and each key, the order in which pushes are added: that of the
        expected ends of the microbatches, the same for all owners of a group."""
        orders: dict[range, dict[Key, list[Turn]]] = {}
        for group in {self._rows.members(d) for d in self._local}:
            orders[group] = {}
            ends = [
                (end, device, number)
                for device in group
                for number, end in enumerate(np.cumsum([work[i] for i in tasks[device].indices]))
            ]
            for _, device, number in sorted(ends):
                for key in tasks[device].microbatches[tasks[device].indices[number]].pushes:
                    orders[group].setdefault(key, []).append((device, number))
        return {self._devices[d]: orders[self._rows.members(d)] for d in self._local}

    def _gathered(self, gradients: PushedGradients) -> list[list[jax.Array]]:
        rows = []
        for u, unit in enumerate(self._rows.units):
            size = unit.size * self._rows.outer
            layers = []
            for layer in range(max(unit.layers, 1)):
                local = [gradients.of(self._devices[d], (u, layer), size) for d in self._local]
                layers.append(self._everywhere((size * len(self._devices),), local))
            rows.append(layers)
        return rows

    def _tally(self, workers: Sequence[Worker], microbatch: StagedMicrobatch) -> tuple[jax.Array, Tally]:
        tree = microbatch.tree
        example = jax.tree.unflatten(tree, range(tree.num_leaves))
        maxima = len(example[1].maxima)
        none = np.array([0.0] * (tree.num_leaves - maxima) + [-np.inf] * maxima, np.float32)
        local = [
            jax.device_put(none[None], w.device) if w.tally is None else _flat(jax.tree.leaves(w.tally))
            for w in workers
        ]
        values = self._combine(self._everywhere((len(self._devices), tree.num_leaves), local), maxima)
        return jax.tree.unflatten(tree, list(values))

    def _everywhere(self, shape: tuple[int, ...], local: list[jax.Array]) -> jax.Array:
        return jax.make_array_from_single_device_arrays(shape, self._rows.sharding, local)


_flat, _plus = jax.jit(lambda values: jnp.stack(values)[None]), jax.jit(jnp.add)


def _combined(table: jax.Array, maxima: int) -> list[jax.Array]:
    sums, largest = jnp.sum(table, axis=0), jnp.max(table, axis=0)
    count = table.shape[1]
    return [sums[i] if i < count - maxima else largest[i] for i in range(count)]


@jax.jit
def _joined(before: tuple[jax.Array, Tally], more: tuple[jax.Array, Tally]) -> tuple[jax.Array, Tally]:
    return before[0] + more[0], before[1] + more[1]
