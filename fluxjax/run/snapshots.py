"""Snapshots: the state of a run in the memory of its hosts, for when a process fails and the hosts live on.

Each process writes what is on its own devices, by itself: nothing is gathered, and no process waits for another. So a
snapshot serves as many processes and devices, in the same places, as it was taken of; checkpoints serve all others.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from sharding.mesh import Device

from ..config import CheckpointConfig
from ..hosts.gang import Gang
from ..hosts.orders import Offer, Restore, Save
from . import snapshot_folder
from .checkpoint import ResumeError

log = logging.getLogger(__name__)

_FORMAT = 1
_CHUNK = 2**24  # bytes that are read at a time to be checked
_CHECKSUM = 4  # bytes at the end of a file
_MARGIN = 2**20  # bytes beside the arrays


class Snapshots:
    """The snapshots of one process: of the newest two steps, since another process may have failed to write the newest.
    A file is a line of JSON, the shards of each array, and a checksum of all that."""

    def __init__(self, process: int = 0, processes: int = 1) -> None:
        self._process, self._processes = process, processes
        self._warned = False  # since a snapshot was written

    def write(self, folder: pathlib.Path, step: int, arrays: PyTree, state: Mapping[str, Any] | None = None) -> None:
        """Writes this process's part of `arrays`, and `state`, JSON values, in the place of the oldest snapshot. When
        it returns, the arrays may be donated. A snapshot that can't be written is no reason to end a run: that is
        logged."""
        try:
            self._write(folder, step, arrays, state)
            self._warned = False
        except OSError as error:
            if not self._warned:  # once is enough of what goes on
                log.warning("no snapshot of step %d in %s: %s; the run goes on", step, folder, error)
            self._warned = True

    def _write(self, folder: pathlib.Path, step: int, arrays: PyTree, state: Mapping[str, Any] | None) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        snapshot_folder.remove_others(folder)
        self._keep_newest(folder)
        shards = [data for leaf in jax.tree.leaves(arrays) for data in _own(leaf)]
        head = {"format": _FORMAT, "layout": _layout(arrays), "state": state}
        needed, free = sum(data.nbytes for data in shards) + _MARGIN, shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(f"{needed / 2**20:.0f} MiB are needed, {free / 2**20:.0f} are free")
        file = self._file(folder, step)
        partial = file.with_name(f"{file.name}.partial")
        try:
            with partial.open("wb") as stream:
                checksum = _put(stream, json.dumps(head).encode() + b"\n", 0)
                for data in shards:
                    checksum = _put(stream, _bytes(np.asarray(data)), checksum)
                stream.write(checksum.to_bytes(_CHECKSUM, "little"))
            partial.rename(file)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _keep_newest(self, folder: pathlib.Path) -> None:
        """Removes all files of this process but the newest. Every process has the step before in full, or this process
        would not have come to the next step."""
        steps = self._steps(folder)
        kept = self._file(folder, max(steps)) if steps else None
        for path in folder.glob(f"*.{self._process}-of-{self._processes}*"):
            if path != kept:
                path.unlink()

    def steps(self, folder: pathlib.Path, abstract: PyTree) -> list[int]:
        """Returns the steps whose part is here, is undamaged, and fits this process's devices; `abstract` as for
        `restore`. Logs why the part of another step is passed over."""
        layout, steps = _layout(abstract), []
        for step in sorted(self._steps(folder)):
            if reason := _damage(file := self._file(folder, step), layout):
                log.warning("the snapshot of step %d is passed over: %s %s", step, file, reason)
            else:
                steps.append(step)
        return steps

    def restore(
        self, folder: pathlib.Path, abstract: PyTree, step: int, make_room: Callable[[], None] = lambda: None
    ) -> PyTree:
        """Returns the arrays of one of `steps`. `abstract` is a pytree of `ShapeDtypeStruct` with shardings;
        `make_room` is called before any array is read. Raises ResumeError if an array can't be read."""
        leaves, tree = jax.tree.flatten(abstract)
        try:
            with self._file(folder, step).open("rb") as stream:
                stream.readline()
                make_room()
                arrays = [_read(stream, leaf) for leaf in leaves]
        except (OSError, ValueError) as error:
            raise ResumeError(f"the snapshot of step {step} in {folder} can't be read: {error}") from error
        return jax.tree.unflatten(tree, arrays)

    def state(self, folder: pathlib.Path, step: int) -> Any:
        """Returns the `state` that was written beside the arrays of one of `steps`."""
        with self._file(folder, step).open("rb") as stream:
            return json.loads(stream.readline())["state"]

    def _steps(self, folder: pathlib.Path) -> list[int]:
        there = snapshot_folder.found(folder, self._processes)
        return [step for step, processes in there.items() if self._process in processes]

    def _file(self, folder: pathlib.Path, step: int) -> pathlib.Path:
        return snapshot_folder.file_of(folder, step, self._process, self._processes)


class GangSnapshots:
    """Takes the snapshots of all processes, and restores them. Process 0 gives each order before it does its own part,
    and every process works alone. Nothing on disk is touched before the first method is called."""

    def __init__(self, settings: CheckpointConfig, run_dir: pathlib.Path, gang: Gang) -> None:
        self._every = settings.snapshot_every
        self._run_dir, self._gang = run_dir, gang
        self._folder = pathlib.Path()  # of this history of the run
        self._own = Snapshots(gang.process, gang.processes)

    def newest(self, abstract: PyTree) -> int:
        """Returns the newest step of which every process still has its part; -1: there is none, or snapshots are
        off."""
        folder = snapshot_folder.named(self._run_dir) if self._every else None
        if folder is None:
            return -1
        self._folder = folder
        self._gang.tell(Offer(str(folder)))
        there = self._gang.exchange(self._own.steps(folder, abstract))
        newest = max(set(there[0]).intersection(*there), default=-1)
        if newest < 0 or any(steps[-1] > newest for steps in there):
            log.warning("of snapshots in %s, step %d is the newest that all have (-1: none): %s", folder, newest, there)
        return newest

    def restore(self, abstract: PyTree, step: int, make_room: Callable[[], None]) -> tuple[int, PyTree, Any]:
        """Returns the step, the arrays and the state of the newest snapshot, as `Checkpoints.restore` does."""
        state = self._own.state(self._folder, step)
        self._gang.tell(Restore(step, str(self._folder), state["source"]))
        return step, self._own.restore(self._folder, abstract, step, make_room), state

    def begin(self) -> None:
        """Begins a history that does not start from a snapshot: removes the existing snapshots."""
        self.remove()
        if self._every:
            self._folder = snapshot_folder.begun(self._run_dir)

    def write(self, step: int, arrays: PyTree, state: Mapping[str, Any]) -> None:
        self._gang.tell(Save(step, str(self._folder)))
        self._own.write(self._folder, step, arrays, state)

    def remove(self) -> None:
        """Removes the snapshots of this host. The other processes remove theirs when the run is over."""
        snapshot_folder.remove(self._run_dir)


def _own(array: jax.Array) -> Iterator[jax.Array]:
    """Yields the shards of `array` on the devices of this process, each distinct shard once, in the order of
    `_places`."""
    held = {str(shard.index): shard.data for shard in array.addressable_shards}
    for index in _places(array):
        yield held[index]


def _places(array: jax.Array | jax.ShapeDtypeStruct) -> dict[str, list[Device]]:
    """Returns the devices of this process that hold each distinct shard of `array`, by the index of the shard."""
    places: dict[str, list[Device]] = {}
    for device, index in array.sharding.addressable_devices_indices_map(array.shape).items():
        places.setdefault(str(index), []).append(device)
    return places


def _layout(tree: PyTree) -> str:
    """Returns a digest that is equal where a process holds the same shards of the same arrays, on as many devices."""
    arrays = [
        (jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype), [(k, len(d)) for k, d in _places(leaf).items()])
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return hashlib.sha256(json.dumps([jax.device_count(), arrays]).encode()).hexdigest()


def _put(stream: io.BufferedWriter, data: bytes | memoryview, checksum: int) -> int:
    stream.write(data)
    return zlib.crc32(data, checksum)


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data  # of the array's own memory, or of a copy


def _read(stream: io.BufferedReader, like: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = like.sharding
    assert sharding is not None
    shape = sharding.shard_shape(like.shape)
    shards = []
    for devices in _places(like).values():
        data = np.empty(shape, like.dtype)
        if stream.readinto(_bytes(data)) != data.nbytes:
            raise ValueError("it ends early")
        where = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        shards += [jax.block_until_ready(jax.device_put(data, place, may_alias=False)) for place in where]
    return jax.make_array_from_single_device_arrays(like.shape, sharding, shards)


def _damage(file: pathlib.Path, layout: str) -> str:
    """Returns why a snapshot can't be restored; nothing if it can."""
    try:
        with file.open("rb") as stream:
            line = stream.readline()
            checksum, left = zlib.crc32(line), file.stat().st_size - len(line) - _CHECKSUM
            while left > 0 and (data := stream.read(min(left, _CHUNK))):
                checksum, left = zlib.crc32(data, checksum), left - len(data)
            if stream.read() != checksum.to_bytes(_CHECKSUM, "little"):
                return "has another checksum than what was written"
        head = json.loads(line)
        fits = head["format"] == _FORMAT and head["layout"] == layout
        return "" if fits else "is of other devices, of other arrays, or of another release"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"can't be read: {error}"
