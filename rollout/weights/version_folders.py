"""Versions of the weights on a file system that hosts share: written by the trainer, pulled by hosts of servers.

`SOURCE/weight_v000007` is the delta from the version before or, after `FULL_EVERY` deltas and if no delta is smaller, a
whole version (an Orbax item with the model's configuration). A folder appears under its name when it is complete.
`docs/servers.md` has the format of a delta.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import stat
import threading
import uuid
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import xxhash
import zstandard
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.folder import read_json, write_json
from models.hf import DTYPES as NAMES
from models.hf import INDEX, SINGLE, StoredTensor, write_weights

from .published import Published, as_bytes, sweep

DTYPES = {name: jnp.dtype(dtype) for dtype, name in NAMES.items()}
ITEM = "params"  # name of the Orbax item in the folder of a whole version
SUMS = "checksums.json"  # checksums of a whole version's tensors and configuration
FULL_EVERY = 32  # deltas after a whole version, at most; a late host applies all of these deltas
AT_ONCE = 4  # threads that apply deltas, each to one tensor
PLACE = "fluxjax-pulled-"  # begins the name of a host's folder of copies; the source's name follows
SOURCE = "source.txt"  # holds the path of the source
KEPT = 2  # versions on a host: the last pulled, and the one before, which a server may still be reading

FILE, CONFIG = "model-00001-of-00001.safetensors", "config.json"  # a delta's tensors; a checkpoint's configuration
FORMAT = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "xxh3-128"}
LEVEL = 1  # level of zstd: the words of a small step are mostly zeros, and higher levels save little more


class PullError(RuntimeError):
    """A version can't be pulled. The message names the folder."""


class DeltaError(RuntimeError):
    """A version is damaged, or a delta does not fit the weights that it is applied to. The message names the folder."""


class VersionFolders:
    """Writes versions into its own folders below `shared`; `close` removes these folders. Thread-safe."""

    def __init__(self, shared: pathlib.Path, *, delta: bool = True) -> None:
        self._shared, self._delta = shared, delta
        self._prefix = f"fluxjax-{_machine()}-"
        sweep(shared, self._prefix)
        self.last: Published | None = None  # the base of the next delta
        self._since_full = 0
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self.source = self._shared / f"{self._prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.source.mkdir(parents=True)
        self._end = weakref.finalize(self, shutil.rmtree, self.source, ignore_errors=True)
        self.last = None

    def publish(self, published: Published) -> None:
        """Writes a version, unless it is the one written most recently. Raises OSError if there is no room. Blocks."""
        with self._lock:
            if published is self.last:
                return
            if self.last is not None and published.version <= self.last.version:  # an older version
                self._end()
                self._begin()
            last = self.last if self._delta and self._since_full < FULL_EVERY else None
            with _appearing(self.folder(published)) as part:
                new = published.folder / SINGLE
                if last is not None and write_delta(part, last.folder / SINGLE, new, last.version, published.version):
                    self._since_full += 1
                else:
                    self._write_whole(part, published)
            self.last = published

    def folder(self, published: Published) -> pathlib.Path:
        return self.source / folder_name(published.version)

    def _write_whole(self, folder: pathlib.Path, published: Published) -> None:
        folder.mkdir()
        tensors = dict(tensors_of(published.folder))
        with ocp.PyTreeCheckpointer() as writer:
            try:
                writer.save((folder / ITEM).absolute(), tensors)
            except ValueError as error:  # Orbax raises ValueError for a full disk
                raise OSError(f"{folder}: {error}") from error
        shutil.copy(published.folder / CONFIG, folder / CONFIG)
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        write_json(folder / SUMS, sums | {CONFIG: checksum(np.fromfile(folder / CONFIG, np.uint8))})
        metadata = {"version": f"{published.version:06d}", "checksum_format": FORMAT["checksum_format"]}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": {}})
        self._since_full = 0

    def keep(self, wanted: Sequence[Published]) -> None:
        """Removes the versions that neither `wanted` nor the last version needs."""
        with self._lock:
            there = _versions(self.source)
            versions = {published.version for published in (*wanted, *filter(None, [self.last]))} & there.keys()
            chains = [_chain(self.source, version, {}) for version in versions]
            needed = {folder for seed, deltas in chains for folder in (seed, *(delta.folder for delta in deltas))}
            for folder in set(there.values()) - needed:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._end()


def pull(local: pathlib.Path, source: pathlib.Path, version: int) -> pathlib.Path:
    """Returns a checkpoint folder of a version, below `local`, made by deltas from a version there if possible. Several
    processes of a host may pull at once. Raises PullError, DeltaError and OSError; versions in `local` then stay."""
    if not (source / folder_name(version)).is_dir():  # checked before any folder of this host changes
        raise _missing(source, version)
    place = pulled(local, source)
    us = {os.geteuid()}
    for folder, owners in ((local, us | {0}), (place, us)):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if why := _not_of(owners, folder):
            raise PullError(f"{folder}: {why}; other users of this host may be able to write there: remove it")
    place.chmod(0o700)  # `mkdir` leaves the permissions of an existing folder as they are
    with FileLock(place / "lock"):
        (place / SOURCE).write_text(str(source.absolute()))
        for note in local.glob(f"{PLACE}*/{SOURCE}"):
            if not _not_of(us, note.parent) and not pathlib.Path(note.read_text()).exists():  # its run has ended
                shutil.rmtree(note.parent, ignore_errors=True)
        for part in place.glob("part-*"):  # left by killed processes
            shutil.rmtree(part, ignore_errors=True)
        here = {there: folder for there, folder in _versions(place).items() if there <= version}
        target = place / folder_name(version)
        if version not in here:
            try:
                with _appearing(target) as part:
                    _write(part, *_chain(source, version, here))
            except (DeltaError, OSError):
                if not here:
                    raise
                with _appearing(target) as part:  # perhaps only this host's copy is damaged
                    _write(part, *_chain(source, version, {}))
        os.utime(target)
        for old in sorted(_versions(place).values(), key=lambda folder: folder.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return target


def pulled(local: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    """The folder of a host's copies of a source; no other kind of folder is written or removed below `local`."""
    return local / f"{PLACE}{source.name}"


def _not_of(owners: Container[int], folder: pathlib.Path) -> str:
    """Says why a folder of shared memory, where all users can write, is none of `owners`; empty if it is."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is a link or a file"
    return "" if status.st_uid in owners else f"it belongs to user {status.st_uid}"


def _missing(source: pathlib.Path, version: int) -> PullError:
    there = sorted(_versions(source)) or "none"
    return PullError(f"{source / folder_name(version)}: no such version; there are {there}")


def _chain(source: pathlib.Path, version: int, here: Mapping[int, pathlib.Path]) -> tuple[pathlib.Path, list[Delta]]:
    """Returns (a folder of `here` or of a whole version, the deltas that lead from this folder to the version)."""
    deltas: list[Delta] = []
    while version not in here:
        folder = source / folder_name(version)
        if not folder.is_dir():
            raise _missing(source, version)
        if (delta := read_delta(folder)) is None:
            return folder, deltas
        deltas.insert(0, delta)
        version = delta.base
    return here[version], deltas


@contextlib.contextmanager
def _appearing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a folder to write, which gets its name at the end of the block, and is removed by an error."""
    part = folder.with_name(f"part-{folder.name}")
    try:
        yield part
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write(folder: pathlib.Path, seed: pathlib.Path, deltas: Sequence[Delta]) -> None:
    """Writes a checkpoint: the weights of `seed`, a whole version or a checkpoint, with the deltas applied."""
    if (seed / ITEM).is_dir():
        whole = _restored(seed)
        entries = [StoredTensor(name, tensor.shape, tensor.dtype) for name, tensor in whole.items()]
        tensors = iter(whole.items())
    else:
        entries, tensors = contents(seed), tensors_of(seed)
    room = sum(tensor.nbytes for tensor in entries)
    if room > (free := shutil.disk_usage(folder.parent).free):
        raise OSError(f"{folder}: {room / 2**20:.0f} MiB are needed, {free / 2**20:.0f} are free")
    folder.mkdir()
    write_weights(folder / SINGLE, entries, _after(tensors, deltas))
    shutil.copy(seed / CONFIG, folder / CONFIG)
    for delta in deltas[-1:]:
        delta.apply(CONFIG, np.fromfile(folder / CONFIG, np.uint8))


def _after(tensors: Iterator[tuple[str, np.ndarray]], deltas: Sequence[Delta]) -> Iterator[np.ndarray]:
    """The tensors with the deltas applied in order. Threads apply the deltas to some tensors at the same time."""

    def updated(named: tuple[str, np.ndarray]) -> np.ndarray:
        name, tensor = named
        for delta in deltas:
            tensor = delta.apply(name, tensor)
        return tensor

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pull") as threads:
        waiting: list[concurrent.futures.Future[np.ndarray]] = []
        for named in tensors:
            waiting.append(threads.submit(updated, named))
            if len(waiting) > AT_ONCE:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _restored(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a whole version, in the order in which they were written."""
    item, sums = (folder / ITEM).absolute(), read_json(folder / SUMS, needed=True)
    with ocp.PyTreeCheckpointer() as reader:
        try:
            tree = reader.metadata(item).item_metadata.tree
            how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            tensors = reader.restore(item, restore_args=how)
        except (ValueError, KeyError, AttributeError) as error:
            raise PullError(f"{item}: can't be read: {error}") from error
    tensors[CONFIG] = np.fromfile(folder / CONFIG, np.uint8)
    for name in sorted(sums.keys() | tensors.keys()):
        has = checksum(tensors[name]) if name in tensors else "none"
        if has != sums.get(name):
            raise DeltaError(f"{folder}: {name} has the checksum {has}, not {sums.get(name)}: it is damaged")
    return {name: tensors[name] for name in sums if name != CONFIG}


def contents(folder: pathlib.Path) -> list[StoredTensor]:
    """The tensors of a checkpoint folder with one file, in the file's order, without their values."""
    with open_weights(folder) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
    return [StoredTensor(name, tuple(s.get_shape()), DTYPES[s.get_dtype()]) for name, s in slices.items()]


def _versions(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    found = {there.name.removeprefix("weight_v"): there for there in folder.glob("weight_v*")}
    return {int(number): there for number, there in found.items() if number.isdecimal()}


def _machine() -> str:
    """A name of this host, its boot and its container. Processes with equal names see the same process ids."""
    parts = [socket.gethostname().replace("-", "_")]
    for read in (lambda: pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()[:8],
                 lambda: "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))):  # fmt: skip
        with contextlib.suppress(OSError):
            parts.append(read())
    return "_".join(parts)


# --- deltas ---------------------------------------------------------------------------------------


def folder_name(version: int) -> str:
    return f"weight_v{version:06d}"


def checksum(tensor: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(as_bytes(tensor).data)


def write_delta(folder: pathlib.Path, old: pathlib.Path, new: pathlib.Path, base: int, version: int) -> int | None:
    """Writes the delta from one safetensors file to another, and returns its size in bytes, or None if it would be no
    smaller than the tensors. Raises OSError if the disk is full, and DeltaError for tensors of another shape or
    dtype."""
    with safe_open(new, framework="numpy") as tensors:
        names = sorted(tensors.keys())
    changed: dict[str, np.ndarray] = {}
    sums: dict[str, str] = {}
    whole = written = 0
    with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="delta") as threads:
        for name, (size, words, hashed) in zip(names, threads.map(lambda n: _changed(old, new, n), names), strict=True):
            whole += size
            sums[name] = hashed
            if words is not None:
                written += len(words)
                changed[name] = np.frombuffer(words, np.uint8)
    if written >= whole:
        return None
    if (config := new.with_name(CONFIG)).exists():
        sums[CONFIG] = checksum(np.fromfile(config, np.uint8))
    folder.mkdir()
    try:
        save_file(changed, folder / FILE, sums or None)  # {} would give a broken header
    except SafetensorError as error:  # the library raises this error for a full disk
        raise OSError(f"{folder}: {error}") from error
    metadata = {"version": f"{version:06d}", "base_version": f"{base:06d}", **FORMAT}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict.fromkeys(changed, FILE)})
    return sum(file.stat().st_size for file in folder.iterdir())


def _changed(old: pathlib.Path, new: pathlib.Path, name: str) -> tuple[int, bytes | None, str]:
    """Returns (bytes of the tensor, its compressed XOR or None if nothing changed, its checksum)."""
    with safe_open(old, framework="numpy") as before, safe_open(new, framework="numpy") as after:
        was, now = before.get_tensor(name), after.get_tensor(name)
    if (was.shape, was.dtype) != (now.shape, now.dtype):
        raise DeltaError(f"{name} is {now.dtype} of shape {now.shape} in {new}, but {was.dtype} {was.shape} in {old}")
    words = as_bytes(was) ^ as_bytes(now)
    if not words.any():
        return now.nbytes, None, checksum(now)
    return now.nbytes, zstandard.ZstdCompressor(LEVEL).compress(words.data), checksum(now)


@dataclasses.dataclass(frozen=True)
class Delta:
    """A complete delta folder."""

    folder: pathlib.Path
    base: int

    def apply(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """The tensor of the folder's version, or the bytes of its configuration, made from `tensor` of `base`. Raises
        DeltaError if the result's checksum is not the delta's, or the delta can't be read."""
        try:
            with safe_open(self.folder / FILE, framework="numpy") as changes:
                words = changes.get_tensor(name) if name in set(changes.keys()) else None
                wanted = (changes.metadata() or {}).get(name)
            after = tensor if words is None else _undone(tensor, words)
        except (OSError, SafetensorError, zstandard.ZstdError, ValueError) as error:
            raise DeltaError(f"{self.folder}: {name}: {error}") from None
        if checksum(after) != wanted:
            raise DeltaError(
                f"{self.folder}: {name} has the checksum {checksum(after)} after the delta, not {wanted}: the delta is "
                f"damaged, or was not applied to version {self.base}"
            )
        return after


def _undone(tensor: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns the tensor with its XOR undone. Raises ValueError or ZstdError for damaged words."""
    # `decompress` would allocate whatever size the frame declares.
    came = zstandard.ZstdDecompressor().stream_reader(words.data).read(tensor.nbytes + 1)
    if len(came) != tensor.nbytes:
        raise ValueError(f"the delta does not have {tensor.nbytes} bytes")
    return (as_bytes(tensor) ^ np.frombuffer(came, np.uint8)).view(tensor.dtype).reshape(tensor.shape)


def read_delta(folder: pathlib.Path) -> Delta | None:
    """The delta in a version folder; None for a whole version. Raises DeltaError for a delta of another format."""
    metadata = read_json(folder / INDEX).get("metadata", {})
    if "base_version" not in metadata:
        return None
    if unknown := {key: metadata.get(key) for key, value in FORMAT.items() if metadata.get(key) != value}:
        raise DeltaError(f"{folder}: the delta has {json.dumps(unknown)}; this release reads {json.dumps(FORMAT)}")
    version, base = int(metadata["version"]), int(metadata["base_version"])
    if base >= version or folder.name != folder_name(version):
        raise DeltaError(f"{folder}: a delta from version {base} to version {version} can't be in this folder")
    return Delta(folder, base)


def tensors_of(folder: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, tensor) for each tensor of a checkpoint folder with one file, in the file's order."""
    with open_weights(folder) as tensors:
        for name in tensors.offset_keys():
            yield name, tensors.get_tensor(name)


def open_weights(folder: pathlib.Path) -> safe_open:
    """Opens the file of a checkpoint folder with one file. Raises DeltaError if it is damaged or missing."""
    try:
        return safe_open(folder / SINGLE, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise DeltaError(f"{folder / SINGLE}: {error}") from None
