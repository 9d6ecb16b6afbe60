"""Runs a minibatch: one thread a device, each through its own microbatches, and one barrier at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..fsdp import Fsdp
from ..links import Device, LinkError, Links
from ..strategy import Params, Tally
from .flat import Rows
from .pushed_gradients import Key, PushedGradients, Turn
from .remote import Remote, taken
from .stage_programs import StagedMicrobatch, StagePrograms
from .traffic import Traffic
from .window import Itinerary
from .worker import Task, Worker

_numbers = itertools.count(1)  # of minibatches of this process: all processes run the same ones in the same order


class OdcError(RuntimeError):
    """A device failed within a minibatch, or a process was lost. The message says which, where and why.

    Parameters are as they were. In one process the next minibatch may be tried; of several, all have to end.
    """


class _Failure:
    """The first thing that went wrong on any thread; all others, also of other processes, stop at their next step."""

    def __init__(self, links: Links | None) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._error: OdcError | None = None

    @contextlib.contextmanager
    def noting(self, what: Callable[[], str]) -> Iterator[None]:
        """Keeps whatever is raised inside: the other threads must not wait for this one."""
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
class _Plan:
    """`indices[d]` are the indices of the microbatches of device `d`, in order; `work[i]` is that of microbatch `i`."""

    indices: tuple[tuple[int, ...], ...]
    work: tuple[float, ...]

    @staticmethod
    def of(count: int, devices: Sequence[int], work: Sequence[float], num_devices: int) -> _Plan:
        if not count or len(devices) != count or (work and len(work) != count):
            raise ValueError(f"{count} microbatches, {len(devices)} devices, {len(work)} amounts of work; as many each")
        if not set(devices) <= set(range(num_devices)):
            raise ValueError(f"microbatches for devices {sorted(set(devices))}, but the mesh has {num_devices}")
        indices = tuple(tuple(i for i in range(count) if devices[i] == d) for d in range(num_devices))
        return _Plan(indices, tuple(work) or (1.0,) * count)

    def by_finish(self, devices: Sequence[int]) -> list[tuple[Turn, int]]:
        """All microbatches of these devices as (turn, index), by when they are expected to end."""
        found = []
        for device in devices:
            ends = np.cumsum([self.work[i] for i in self.indices[device]])
            found += [(end, device, number) for number, end in enumerate(ends)]
        return [((device, number), self.indices[device][number]) for _, device, number in sorted(found)]


class Odc:
    """The weights of `strategy`, walked on demand.

    Parameters and gradients are laid out as by `strategy`, which may also be used between two minibatches. A device
    holds the whole weights of at most `live_layers` steps at once (a layer, or what stands between two stacks of
    layers): the one that is computed, those fetched ahead and one not yet done. `deterministic` adds gradients in an
    order that depends on nothing but the minibatch and the predicted work. `group` neighbouring devices (0: all) hold
    all parameters and gradients together (hybrid sharding). `links` are those of this process to the others, where
    there are others. While a minibatch runs, there is a copy of the parameters in the compute dtype, each device's part
    on the device. `last_seconds` says for each local device how long it took for its part of
    the last minibatch, `idle` how many seconds one then waited for the others, on average.
    """

    last_seconds: dict[int, float]
    idle: float

    def __init__(
        self,
        strategy: Fsdp,
        *,
        live_layers: int = 3,
        deterministic: bool = False,
        group: int = 0,
        links: Links | None = None,
    ) -> None:
        if live_layers < 2:
            raise ValueError(f"live_layers is {live_layers}; one is fetched while another is computed, so at least 2")
        self.mesh = strategy.mesh
        self._live_layers, self._deterministic = live_layers, deterministic
        self._devices: list[Device] = list(self.mesh.devices.flat)
        self._local = [d for d, device in enumerate(self._devices) if device.process_index == jax.process_index()]
        self._rows = Rows(strategy, group)
        self._links = links
        if links is None and any(set(self._rows.members(d)) - set(self._local) for d in self._local):
            raise ValueError("devices of other processes hold rows of this one's: Odc needs links to them")
        self._programs = StagePrograms(self._rows, strategy)
        self._combine = jax.jit(_combined, static_argnums=1, out_shardings=NamedSharding(self.mesh, P()))
        self.last_seconds, self.idle = {}, 0.0

    def loss_and_grad(
        self, params: Params, batches: Sequence[PyTree], devices: Sequence[int], work: Sequence[float] = ()
    ) -> tuple[jax.Array, Tally, Params]:
        """Returns (loss, tally, gradients) summed over the microbatches `batches`; `devices[i]` computes the `i`-th.

        Every process has all batches, as arrays on the host. `work` is the predicted work of each, in any unit: the
        deterministic order follows it. Raises OdcError, on all processes, if a device or a process fails.
        """
        plan = _Plan.of(len(batches), devices, work, len(self._devices))
        microbatches = [self._programs.training(batch) for batch in batches]
        tasks = [Task(indices, batches, microbatches) for indices in plan.indices]
        failure, number = _Failure(self._links), next(_numbers)
        orders = self._orders(plan, microbatches) if self._deterministic else None
        owners = [self._devices[d] for d in self._local]
        gradients = PushedGradients(owners, orders, 2 * self._live_layers, failure.check)
        trips = [task.training(self._live_layers) for task in tasks]
        traffic = self._traffic(number, params, trips, failure)
        workers = [Worker(d, self._devices[d], tasks[d], failure.check) for d in self._local]
        jobs = [self._training(worker, traffic, trips[worker.number], gradients) for worker in workers]
        servers = [(c, functools.partial(traffic.serve, c, tasks[c].pushes(), gradients)) for c in traffic.clients]
        self._run(number, workers, jobs, failure, servers)
        del traffic, jobs, servers  # and with them the rows that were published
        grads = self._rows.collect(self._gathered(gradients))
        loss, tally = self._tally(workers, microbatches[0])
        return loss, tally, grads

    def logprobs(self, params: Params, inputs: Sequence[PyTree], devices: Sequence[int]) -> list[PyTree]:
        """Returns what `forward` does for each of `inputs`, on the device that computed it; None where that is a device
        of another process."""
        plan = _Plan.of(len(inputs), devices, (), len(self._devices))
        microbatches = [self._programs.scoring(batch) for batch in inputs]
        tasks = [Task(indices, inputs, microbatches) for indices in plan.indices]
        failure, number = _Failure(self._links), next(_numbers)
        trips = [task.scoring(self._live_layers) for task in tasks]
        traffic = self._traffic(number, params, trips, failure)
        workers = [Worker(d, self._devices[d], tasks[d], failure.check) for d in self._local]
        jobs = [functools.partial(w.score, traffic.window(w.number, trips[w.number])) for w in workers]
        self._run(number, workers, jobs, failure, [])
        found = {i: result for worker in workers for i, result in worker.results.items()}
        return [found.get(i) for i in range(len(inputs))]

    def _traffic(self, number: int, params: Params, trips: Sequence[Itinerary], failure: _Failure) -> Traffic:
        remote = None
        if self._links is not None:
            remote = Remote(self._links, number, self._devices, 2 * self._live_layers)
        traffic = Traffic(self._rows, self._rows.publish(params), self._devices, self._local, remote)
        with failure.noting(lambda: "offering weights to the other processes failed"):
            traffic.offer(trips)
        failure.check()
        return traffic

    def _training(
        self, worker: Worker, traffic: Traffic, trip: Itinerary, gradients: PushedGradients
    ) -> Callable[[], None]:
        push = traffic.pusher(worker.number, gradients)
        return lambda: worker.train(traffic.window(worker.number, trip), push)

    def _run(
        self,
        number: int,
        workers: Sequence[Worker],
        jobs: Sequence[Callable[[], None]],
        failure: _Failure,
        servers: Sequence[tuple[int, Callable[[], None]]],
    ) -> None:
        """Runs all jobs, each on a thread of its own, to the end of the minibatch."""
        began = time.perf_counter()

        def work(worker: Worker, job: Callable[[], None]) -> None:
            with failure.noting(lambda: f"{worker.device} failed in {worker.place}"):
                job()
            worker.seconds = time.perf_counter() - began

        def serve(client: int, job: Callable[[], None]) -> None:
            with failure.noting(lambda: f"taking the gradients of {self._devices[client]} failed"):
                job()

        threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in zip(workers, jobs, strict=True)]
        threads += [threading.Thread(target=serve, args=pair, daemon=True) for pair in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failure.check()
        if self._links is not None:
            with failure.noting(lambda: "the end of the minibatch was not reached by all"):
                self._links.barrier("end of a minibatch")
                self._links.forget(taken(number))
            failure.check()
        self.last_seconds = {worker.number: worker.seconds for worker in workers}
        self.idle = time.perf_counter() - began - sum(self.last_seconds.values()) / len(workers)

    def _orders(self, plan: _Plan, microbatches: Sequence[StagedMicrobatch]) -> dict[Device, dict[Key, list[Turn]]]:
        """Returns, for each owner in this process, the order of the pushes of each key; a group has the same order."""
        orders: dict[range, dict[Key, list[Turn]]] = {}
        for group in {self._rows.members(d) for d in self._local}:
            orders[group] = {}
            for turn, index in plan.by_finish(group):
                for key in microbatches[index].pushes:
                    orders[group].setdefault(key, []).append(turn)
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
        """Sums loss and tally over all devices, from one small array of each."""
        tree = microbatch.program.tree
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


@jax.jit
def _flat(values: list[jax.Array]) -> jax.Array:
    return jnp.stack(values)[None]


def _combined(table: jax.Array, maxima: int) -> list[jax.Array]:
    """Combines `[devices, values]`, of which the last `maxima` values are maxima, over all devices."""
    sums, largest = jnp.sum(table, axis=0), jnp.max(table, axis=0)
    count = table.shape[1]
    return [sums[i] if i < count - maxima else largest[i] for i in range(count)]
