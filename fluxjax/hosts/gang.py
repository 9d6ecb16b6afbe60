"""The processes of a run as each process sees them. Process 0 gives orders, and all processes carry them out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import pathlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.links import Links
from sharding.walk import Params

from ..algorithms import own_code
from ..base.process import resident_bytes
from ..base.statuses import HostStage, HostStatus
from ..base.timeline import activity
from ..base.types import TrainBatch
from ..batch.composer import Team
from ..batch.composition import Composition
from ..batch.share import Share
from ..config import Config, ConfigError, DistributedConfig, RolloutEngine
from ..config.run_folder import to_json
from .orders import End, Gather, Learn, Order, OrderError, PlaceOf, Status, Value, decode, encode, told
from .progress import Progress

log = logging.getLogger(__name__)

ROOT = pathlib.Path(__file__).resolve().parents[2]


class StepWatch:
    """Times the stages of this process's steps."""

    def __init__(self) -> None:
        self._stages: list[HostStage] = []
        self.agreed_at = 0.0  # time at which all processes agreed on the step's programs
        self.at = "its programs"  # what this process does: a stage, or this text between stages
        self._waited = 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start, before, self.at = time.perf_counter(), self.at, name
        yield
        self.at = before
        self._stages.append(HostStage(name, start, time.perf_counter()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        with activity(lambda: "waiting for the other processes"):
            yield
        self._waited += time.perf_counter() - start

    def status(self, process: int, step: int, idle: float | None) -> HostStatus:
        """Returns the measurements of the finished step, and begins to measure the next step."""
        now = time.perf_counter()
        waited, stages, self._waited, self._stages = self._waited, self._stages, 0.0, []
        devices = jax.local_devices()
        stats = [device.memory_stats() or {} for device in devices]
        return HostStatus(
            process=process,
            host=socket.gethostname(),
            devices=len(devices),
            memory_bytes=resident_bytes(),
            device_memory_bytes=max(stat.get("peak_bytes_in_use", 0) for stat in stats),
            step=step,
            stages=(*stages, HostStage("train", self.agreed_at, now)),
            wait_seconds=waited,
            idle=idle,
        )


class Gang(Team):
    """Several processes that train together. Process 0 carries out its own orders, too. One thread at a time gives
    orders, except for announcements of prompts, which may come from another thread."""

    def __init__(self, links: Links, progress_timeout: float = DistributedConfig().progress_timeout) -> None:
        """`progress_timeout` is that of `DistributedConfig`. Process 0 is timed only from sending rows until all
        processes agree, and while weights are gathered. In other collective work, a stuck process 0 also keeps the
        other processes waiting, whose time limits end the run."""
        self.links = self._links = links
        self._progress = Progress(links, progress_timeout)
        self.process, self.processes, self.rank_here = links.process, links.processes, links.rank_here
        self.watch = StepWatch()  # measures this process's steps
        self._number = 0  # the last step whose update was ordered
        self._at = 0  # the step whose rows this process has
        self._heard: collections.deque[Order] = collections.deque()  # orders received while a value was awaited
        self._stepped = 0  # the last step that this process has completed
        self._stepped_at = 0.0  # the end of that step by `time.perf_counter`
        self._statuses: dict[int, HostStatus] = {}  # the newest status of each process

    def tell(self, order: Order) -> None:
        data = encode(order)
        for process in range(1, self.processes):
            self.bytes_told += self._links.send(process, *data)

    def equip(self, config: Config, place_of: PlaceOf, expect: Callable[[Iterable[TrainBatch]], None] | None) -> None:
        super().equip(config, place_of, expect)
        self._config, self._place_of = config, place_of

    def stage(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.watch.stage(name)

    def hand_out(self, shares: Sequence[Sequence[Share]], size: int = 0, update: bool = True) -> None:
        self._at = self._number + 1
        self._number += update
        self._progress.begin(self._place)
        for process in range(1, self.processes):
            minibatches = [told(share, self._place_of) for share in shares[process]]
            responses = [data for _, every in minibatches for data in every]
            order = Learn(self._at, [rows for rows, _ in minibatches], responses, size, update)
            self.bytes_told += self._links.send(process, *encode(order))

    def _place(self) -> str:
        return f"step {self._at}, {self.watch.at}"

    def close(self) -> None:
        self._progress.close()

    def orders(self) -> Iterator[Order]:
        """Yields the orders of process 0 to this process, up to `End`. Raises LinkError if a process fails, and
        OrderError for anything that is not an order."""
        order: Order | None = None
        while not isinstance(order, End):
            with self.watch.waiting():
                order = self._heard.popleft() if self._heard else decode(self._links.receive(0))
            if isinstance(order, Value | Status):
                raise OrderError(f"process 0 sent an answer, {order.name}, where an order was due")
            place = functools.partial(str, order.name)
            if isinstance(order, Learn):
                self._at, place = order.number, self._place
                self._number = order.number if order.update else self._number
            with self._progress.of(place):
                yield order

    def agree(self, compositions: Sequence[Composition]) -> None:
        with self.watch.waiting():
            mine = fingerprint(self._config, compositions)
            if self.process:
                self._links.send(0, *encode(Value(mine)))
                self.watch.agreed_at = time.perf_counter()
                return
            for process in range(1, self.processes):
                if (theirs := self._value_of(process)) != mine:
                    self._links.fail(
                        f"process {process} would run another program than process 0 ({theirs} and {mine}): start all "
                        "processes with the same command, release, and versions of JAX"
                    )
                    self._links.check()
        self.watch.agreed_at = time.perf_counter()
        self._progress.end()

    def decided(self, value: Any, decide: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        with self.watch.waiting():
            if self.process:
                self._links.send(0, *encode(Value(value)))
                return self._value_of(0)
            parts = decide([value, *map(self._value_of, range(1, self.processes))])
        for process in range(1, self.processes):
            self._links.send(process, *encode(Value(parts[process])))
        return parts[0]

    def _value_of(self, process: int) -> Any:
        """Returns the next value that a process sends. Notes statuses, and queues orders, that arrive before the value.
        These orders are announcements of prompts by another thread."""
        while True:
            heard = decode(self._links.receive(process))
            if isinstance(heard, Value):
                return heard.value
            if isinstance(heard, Status):
                self._know(heard_status(heard, self._stepped_at))
            else:
                self._heard.append(heard)

    def stepped(self, idle: float | None = None) -> None:
        """Implements `Team.stepped`. Others send statuses, which process 0 reads in `agree`, `decided` and `whole`."""
        if self._stepped == self._number:
            return
        self._stepped, self._stepped_at = self._number, time.perf_counter()
        status = self.watch.status(self.process, self._number, idle)
        self._know(status)
        stages = ", ".join(f"{stage.name} {stage.end - stage.start:.3f} s" for stage in status.stages)
        memory = status.memory_bytes / 1e9
        log.info("step %d: %s, waited %.3f s, %.2f GB", status.step, stages, status.wait_seconds, memory)
        if self.process:
            self._links.send(0, *encode(told_status(status, self._stepped_at)))

    def statuses(self) -> list[HostStatus]:
        return [status for _, status in sorted(self._statuses.items())]

    def _know(self, status: HostStatus) -> None:
        self._statuses = self._statuses | {status.process: status}  # a new dictionary: threads may read the old one

    def _hear_statuses(self) -> None:
        """Reads the last step's statuses in process 0. The other processes sent theirs before they gathered weights."""
        for process in range(1, self.processes):
            known = self._statuses.get(process)
            if (known.step if known is not None else 0) < self._stepped:
                heard = decode(self._links.receive(process))
                assert isinstance(heard, Status)
                self._know(heard_status(heard, self._stepped_at))

    def whole(self, make: Callable[[], Params], mesh: Mesh, *, adapters: bool = False) -> Params:
        with self._progress.of(lambda: "the gathering of weights"):
            self.tell(Gather(adapters))
            weights = brought(make(), mesh, keep=True)
            self._hear_statuses()
        return weights


def shifted(status: HostStatus, seconds: float) -> HostStatus:
    """Returns the status with its times `seconds` later."""
    stages = tuple(HostStage(stage.name, stage.start + seconds, stage.end + seconds) for stage in status.stages)
    return dataclasses.replace(status, stages=stages)


def told_status(status: HostStatus, end: float) -> Status:
    """Returns the status as an answer to send. `end` is the end of the step on this process's clock."""
    return Status(dataclasses.asdict(shifted(status, -end)))


def heard_status(told: Status, end: float) -> HostStatus:
    """Returns the status in an answer of `told_status`. `end` is the end of the step on this process's clock."""
    stages = tuple(HostStage(**stage) for stage in told.fields["stages"])
    return shifted(HostStatus(**{**told.fields, "stages": stages}), end)


def brought(params: Params, mesh: Mesh, *, keep: bool) -> Params:
    """Gathers the weights one by one on every device. If `keep`, returns copies in the host's memory. Collective."""
    put_together = _on_every_device(mesh)

    def bring(weight: jax.Array) -> np.ndarray | None:
        whole = jax.block_until_ready(put_together(weight))  # no device holds two complete weights
        return np.asarray(whole.addressable_data(0)) if keep else None

    return jax.tree.map(bring, params)


@functools.cache  # a new function would be compiled again
def _on_every_device(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda weight: weight, out_shardings=NamedSharding(mesh, P()))


@functools.cache
def release(root: pathlib.Path = ROOT) -> str:
    """Returns a digest of the versions of JAX, and of all code of the packages that build programs."""
    sources = sorted(path for room in ("fluxjax", "models", "sharding") for path in (root / room).rglob("*.py"))
    digest = hashlib.sha256(f"{jax.__version__} {importlib.metadata.version('jaxlib')}".encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint(config: Config, compositions: Sequence[Composition]) -> str:
    """Returns a digest that is equal in processes that would run the same programs on their shares of minibatches."""
    shapes = [
        (
            micro.owner,
            str(jax.tree.structure(micro.batch)),
            [(x.shape, str(x.dtype)) for x in jax.tree.leaves(micro.batch)],
        )
        for composition in compositions
        for micro in sorted(composition.everywhere, key=lambda micro: -1 if micro.owner is None else micro.owner)
    ]
    rooms = "model", "sharding", "algorithm", "critic"
    settings = {name: value for name, value in to_json(config).items() if name in rooms}
    parts = [release(), settings, own_code(config.algorithm), shapes]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


# Settings that work only in a run of one process, each with its reason.
ALONE_ONLY = {
    "stream_trainer": "it computes gradients on the devices of some engines while other engines go on decoding: no "
    "program of several processes can leave out some of their devices",
    "parallelism.min_degree": "process 0 sees the embedded engines of other processes as servers, and can't give these "
    "engines other devices; set rollout.engine to serve",
}


def check_across_processes(config: Config) -> None:
    """Raises ConfigError, naming the settings, for settings that do not work over several processes."""
    embedded = config.rollout.engine is RolloutEngine.JAX
    used = {"stream_trainer": config.stream_trainer, "parallelism.min_degree": embedded and config.parallelism.enabled}
    for name, why in ALONE_ONLY.items():
        if used[name]:
            raise ConfigError(f"{name} does not work with several processes (distributed.processes), because {why}")
    if config.sharding.devices not in (0, jax.device_count()):
        raise ConfigError(
            f"sharding.devices is {config.sharding.devices}, but with several processes all {jax.device_count()} "
            "devices train; leave sharding.devices at 0"
        )
    if embedded and config.rollout.engines % jax.process_count():
        raise ConfigError(
            f"rollout.engines is {config.rollout.engines}; each of the {jax.process_count()} processes must have the "
            f"same number of engines: make rollout.engines 0 or a multiple of {jax.process_count()}"
        )
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ConfigError(f"all processes must have the same number of devices; they have {sorted(counts.values())}")
