"""The processes of a run, as each of them sees them: process 0 gives orders, the others carry them out."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.links import Links
from sharding.walk import Params

from ..algorithms import own_code
from ..base.host_status import HostStatus
from ..base.process import collector_paused
from ..base.types import Group, PreparedPrompt, TrainBatch
from ..batch.composer import Composer
from ..batch.composition import Composition
from ..config import Config, ConfigError, DistributedConfig, RolloutEngine
from ..config.run_folder import to_json
from .orders import UNKNOWN_PLACE, End, Gather, Learn, Order, PlaceOf, Told, decode, encode, told_all
from .progress import Progress
from .statuses import StepWatch, decode_status, encode_status, is_status, shifted, step_line

log = logging.getLogger(__name__)

T = TypeVar("T")
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Gang:
    """All processes that train together. A gang of one process is trivial: it sends no orders and gathers nothing.
    Orders are given from one thread at a time, and process 0 itself does what it orders, too."""

    def __init__(
        self, links: Links | None = None, progress_timeout: float = DistributedConfig().progress_timeout
    ) -> None:
        """`progress_timeout`: see `DistributedConfig`. Process 0 is timed from telling rows until all processes agree,
        and while weights are gathered: in collective work, the other processes are stuck where process 0 is."""
        self.links = links  # to the other processes; None for a process that is alone
        self._progress = Progress(links, progress_timeout) if links is not None else None
        self.process = links.process if links is not None else 0
        self.processes = links.processes if links is not None else 1
        self.bytes_told = 0  # by this process, to all others together
        self.watch = StepWatch()  # of this process
        self._number = 0  # of the last step
        self.complete = True  # all of its minibatches are told
        self._stepped = 0  # the last step that this process has made
        self._stepped_at = 0.0  # when, on `time.perf_counter`
        self._statuses: dict[int, HostStatus] = {}  # the newest, by process

    @property
    def alone(self) -> bool:
        return self.processes == 1

    @property
    def rank_here(self) -> int:
        """The number of processes with lower numbers that share this process's ports."""
        return self.links.rank_here if self.links is not None else 0

    def tell(self, order: Order) -> None:
        """Sends all other processes the same order. Raises LinkError if a process has failed."""
        data = encode(order)
        for process in range(1, self.processes):
            self._send(process, data)

    def tell_rows(self, rows: Sequence[Told], *, last: bool = True) -> None:
        """Sends every other process an order to learn from its own rows of a minibatch, `rows[process]`. The `last`
        minibatch of a training step is followed by the optimizer steps."""
        self._number += self.complete
        self.complete = last
        if self._progress is not None:
            self._progress.begin(self._place)
        for process in range(1, self.processes):
            self._send(process, encode(Learn(self._number, *rows[process], last)))

    def _place(self) -> str:
        return f"step {self._number}, {self.watch.at}"

    def close(self) -> None:
        """Ends the time limit on progress."""
        if self._progress is not None:
            self._progress.close()

    def _send(self, process: int, data: Sequence[bytes]) -> None:
        assert self.links is not None
        self.bytes_told += self.links.send(process, *data)

    def orders(self) -> Iterator[Order]:
        """Yields the orders of process 0 to this process, up to `End`. Raises LinkError if a process fails, OrderError
        for bytes that are no order."""
        assert self.links is not None
        order: Order | None = None
        while not isinstance(order, End):
            with self.watch.waiting():
                data = self.links.receive(0)
            order = decode(data)
            place = functools.partial(str, order.name)
            if isinstance(order, Learn):
                if order.number != self._number:
                    self.watch.begin()
                self._number, place = order.number, self._place
            assert self._progress is not None
            with self._progress.of(place):
                yield order

    def collect(self, value: T) -> list[T]:
        """Returns the `value` (JSON) of every process, by process, in process 0; in the others, their own value only.
        All processes must call it, and before a step."""
        if self.links is None:
            return [value]
        if self.process:
            self.links.send(0, json.dumps(value).encode())
            return [value]
        return [value, *(json.loads(self.links.receive(process)) for process in range(1, self.processes))]

    def exchange(self, value: T) -> list[T]:
        """Returns the `value` (JSON) of every process, by process, in all processes. All must call it, and before a
        step."""
        collected = self.collect(value)
        if self.links is None or self.alone:
            return collected
        if self.process:
            return json.loads(self.links.receive(0))
        for process in range(1, self.processes):
            self.links.send(process, json.dumps(collected).encode())
        return collected

    def agree(self, config: Config, composition: Composition) -> None:
        """Compares the program that this process is about to run, its settings and the shapes of its arrays, with those
        of all others. Raises LinkError, in all of them, where one differs: they would wait for one another for ever."""
        if self.links is None or self.alone:
            return
        mine = fingerprint(config, composition)
        if self.process:
            self.links.send(0, mine.encode())
            self.watch.agreed()
            return
        for process in range(1, self.processes):
            theirs = self._fingerprint_of(process)
            if theirs != mine:
                self.links.fail(
                    f"process {process} would run another program than process 0 ({theirs} and {mine}): start all with "
                    "the same command, release, and versions of JAX"
                )
                self.links.check()
        self.watch.agreed()
        assert self._progress is not None
        self._progress.end()

    def _fingerprint_of(self, process: int) -> str:
        assert self.links is not None
        while is_status(data := self.links.receive(process)):
            self._note(process, data)
        return data.decode()

    def stepped(self, idle: float | None = None) -> None:
        """Notes that this process has made the step whose rows were told last; a second call for the same step does
        nothing. Every other process sends process 0 its status of the step, which process 0 reads where it waits
        anyway: in `agree` and `whole`. `idle`: see `HostStatus`. Raises LinkError if a process has failed."""
        if self.alone or self._stepped == self._number:
            return
        self._stepped, self._stepped_at = self._number, time.perf_counter()
        status = self.watch.status(self.process, self._number, idle)
        self._know(status)
        log.info("%s", step_line(status))
        if self.process:
            assert self.links is not None
            self.links.send(0, encode_status(shifted(status, -self._stepped_at)))

    def statuses(self) -> list[HostStatus]:
        """Returns the newest known status of each process, by process: this one's and, in process 0, those of the
        others."""
        return [status for _, status in sorted(self._statuses.items())]

    def _note(self, process: int, data: bytes) -> None:
        self._know(shifted(decode_status(data, process), self._stepped_at))

    def _know(self, status: HostStatus) -> None:
        self._statuses = self._statuses | {status.process: status}  # another one: threads read it at any time

    def _hear_statuses(self) -> None:
        """Reads the statuses of the last step, in process 0: each other process sent its own before it took part in
        what followed."""
        assert self.links is not None
        for process in range(1, self.processes):
            known = self._statuses.get(process)
            if (known.step if known is not None else 0) < self._stepped:
                self._note(process, self.links.receive(process))

    def whole(self, make: Callable[[], Params], mesh: Mesh, *, adapters: bool = False) -> Params:
        """Returns the weights that `make` returns, of the model or its adapters, as process 0 can hand them on: whole
        arrays in its own memory. Tells the other processes to call `make` and take part in gathering. A process that is
        alone gets the weights as they are."""
        if self.alone:
            return make()
        assert self._progress is not None
        with self._progress.of(lambda: "the gathering of weights"):
            self.tell(Gather(adapters))
            weights = brought(make(), mesh, keep=True)
            self._hear_statuses()
        return weights


def brought(params: Params, mesh: Mesh, *, keep: bool) -> Params:
    """Gathers the weights one after the other on every device; if `keep`, returns copies in the host's memory.
    Collective."""
    put_together = _on_every_device(mesh)

    def bring(weight: jax.Array) -> np.ndarray | None:
        whole = jax.block_until_ready(put_together(weight))  # no device holds two of them
        return np.asarray(whole.addressable_data(0)) if keep else None

    return jax.tree.map(bring, params)


@functools.cache  # or each call would compile again
def _on_every_device(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda weight: weight, out_shardings=NamedSharding(mesh, P()))


@functools.cache
def release(root: pathlib.Path = ROOT) -> str:
    """Returns a digest of everything that determines the compiled programs: the versions of JAX, and every line of the
    packages that build them."""
    sources = sorted(path for room in ("fluxjax", "models", "sharding") for path in (root / room).rglob("*.py"))
    digest = hashlib.sha256(f"{jax.__version__} {importlib.metadata.version('jaxlib')}".encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint(config: Config, composition: Composition) -> str:
    """Returns a digest that is equal in processes that would run the same programs on a step's rows."""
    microbatches = sorted(composition.everywhere, key=lambda micro: -1 if micro.owner is None else micro.owner)
    shapes = [
        (
            micro.owner,
            str(jax.tree.structure(micro.batch)),
            [(x.shape, str(x.dtype)) for x in jax.tree.leaves(micro.batch)],
        )
        for micro in microbatches
    ]
    settings = {name: value for name, value in to_json(config).items() if name in ("model", "sharding", "algorithm")}
    parts = [release(), settings, own_code(config.algorithm), shapes]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class SharedComposer(Composer):
    """Plans a step in process 0, tells each process its rows, and lays out its own."""

    def __init__(
        self,
        gang: Gang,
        config: Config,
        *sizes: Any,
        place_of: PlaceOf = lambda ticket: UNKNOWN_PLACE,
        expect: Callable[[Sequence[TrainBatch]], None] = lambda batches: None,
    ) -> None:
        """`sizes` are the further arguments of `Composer`; `place_of` says which preprocessor holds the medium of a
        ticket; `expect` is told which batches this process will read, before the others agree."""
        super().__init__(config, *sizes)
        self._gang, self._place_of, self._expect, self._settings = gang, place_of, expect, config

    def compose(
        self,
        groups: Sequence[Group],
        prepared: Mapping[int, PreparedPrompt],
        *,
        skip_idle: bool = False,
        version: int | None = None,
        last: bool = True,
    ) -> Composition:
        """Returns this process's rows only. The other processes have been told theirs by then, so that the step must
        follow, or, if this is not its `last` minibatch, another minibatch; after an error nothing can follow."""
        watch = self._gang.watch
        if self._gang.complete:
            watch.begin()
        with collector_paused():  # it is made up for while the others lay their rows out
            with watch.stage("plan"):
                shards = local_shards(self._gang.processes)
                shares = self.shares(groups, prepared, shards, skip_idle=skip_idle, version=version)
                self._gang.tell_rows(told_all(shares, self._place_of), last=last)
            with watch.stage("layout"):  # as the others do now
                composition = self.lay_out(shares[0])
            self._expect(composition.batches)
        with watch.waiting():
            self._gang.agree(self._settings, composition)
        return composition


def local_shards(processes: int) -> list[range]:
    """Returns, for each process, the shards of the mesh that it has."""
    count = jax.device_count() // processes
    return [range(process * count, (process + 1) * count) for process in range(processes)]


def check_across_processes(config: Config) -> None:
    """Raises ConfigError, naming the settings, for settings that do not work over several processes."""
    refused = {
        "stream_trainer.enabled": config.stream_trainer.enabled,
        "speculative_sync.enabled": config.speculative_sync.enabled,
        "servers.colocated": config.servers.colocated,
        "algorithm.importance.normalize": config.algorithm.importance.normalize,
        "algorithm.kl_in_reward": config.algorithm.kl_in_reward,
        "sharding.compile_ahead": bool(config.sharding.compile_ahead),
    }
    if config.rollout.engine is RolloutEngine.JAX:
        refused["parallelism.enabled"] = config.parallelism.enabled
    if wrong := [name for name, used in refused.items() if used]:
        raise ConfigError(f"{', '.join(wrong)}: not over several processes (distributed.processes) yet; unset it")
    if config.sharding.devices not in (0, jax.device_count()):
        raise ConfigError(
            f"sharding.devices is {config.sharding.devices}, but over several processes all {jax.device_count()} "
            "train; leave it at 0"
        )
    if config.rollout.engine is RolloutEngine.JAX and config.policy.engines % jax.process_count():
        raise ConfigError(
            f"policy.engines is {config.policy.engines}; make it 0, or a multiple of the {jax.process_count()} "
            "processes, which have as many engines each"
        )
    counts = dict.fromkeys(range(jax.process_count()), 0)
    for device in jax.devices():
        counts[device.process_index] += 1
    if len(set(counts.values())) > 1:
        raise ConfigError(f"processes must have as many devices each; they have {sorted(counts.values())}")
