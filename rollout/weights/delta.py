"""The changes between two versions of the weights, without loss: XOR of their words, compressed by zstd.

After a small step, most weights are the same in bfloat16: the XOR is zeros with a few bits between. A delta is a folder
`weight_v000007` in the layout of SGLang's `/pull_weights` (pull request 30367) and slime's disk deltas: an index like
that of a checkpoint, whose metadata name the version that the delta is of, and a safetensors file with the compressed
words of every tensor that changed, and the xxh3 of every tensor of the version and of its `config.json`: a name that is
damaged in the file would else leave its tensor as it was, and so would another base.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
from collections.abc import Iterator

import numpy as np
import xxhash
import zstandard
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.folder import read_json, write_json
from models.hf import INDEX, SINGLE

FILE, CONFIG = "model-00001-of-00001.safetensors", "config.json"
FORMAT = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "xxh3-128"}
LEVEL = 1  # of zstd: the words of a small step are mostly zeros, and higher levels find little more


class DeltaError(RuntimeError):
    """A delta does not fit the weights that it is applied to, or is damaged. The message names folder and tensor."""


def folder_name(version: int) -> str:
    return f"weight_v{version:06d}"


def checksum(tensor: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(as_bytes(tensor).data)


def file_checksum(file: pathlib.Path) -> str:
    return xxhash.xxh3_128_hexdigest(file.read_bytes())


def write_delta(folder: pathlib.Path, old: pathlib.Path, new: pathlib.Path, base: int, version: int) -> int | None:
    """Writes the way from one safetensors file to another of the same tensors. Returns the bytes of the delta; None,
    and writes nothing, where they are not fewer than those of the tensors. Raises OSError for a folder that is full."""
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
        sums[CONFIG] = file_checksum(config)
    folder.mkdir()
    try:
        save_file(changed, folder / FILE, sums or None)  # it writes a broken header for {}
    except SafetensorError as error:  # which is what it makes of a full disk
        raise OSError(f"{folder}: {error}") from error
    metadata = {"version": f"{version:06d}", "base_version": f"{base:06d}", **FORMAT}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict.fromkeys(changed, FILE)})
    return sum(file.stat().st_size for file in folder.iterdir())


def _changed(old: pathlib.Path, new: pathlib.Path, name: str) -> tuple[int, bytes | None, str]:
    """Returns (bytes of the tensor, its compressed XOR or None where nothing changed, its checksum)."""
    with safe_open(old, framework="numpy") as before, safe_open(new, framework="numpy") as after:
        was, now = before.get_tensor(name), after.get_tensor(name)
    if (was.shape, was.dtype) != (now.shape, now.dtype):
        raise DeltaError(f"{name} is {now.dtype} of shape {now.shape} in {new}, {was.dtype} of {was.shape} in {old}")
    words = as_bytes(was) ^ as_bytes(now)
    if not words.any():
        return now.nbytes, None, checksum(now)
    return now.nbytes, zstandard.ZstdCompressor(LEVEL).compress(words.data), checksum(now)


@dataclasses.dataclass(frozen=True)
class Delta:
    """A complete delta folder."""

    folder: pathlib.Path
    version: int
    base: int

    def config_checksum(self) -> str | None:
        """Returns the checksum of the version's configuration. Raises DeltaError for a file that can't be read."""
        try:
            with safe_open(self.folder / FILE, framework="numpy") as changes:
                return (changes.metadata() or {}).get(CONFIG)
        except (OSError, SafetensorError) as error:
            raise DeltaError(f"{self.folder}: {error}") from None

    def apply(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """The tensor of `version`, given that of `base`. Raises DeltaError where it is not what was written."""
        try:
            with safe_open(self.folder / FILE, framework="numpy") as changes:
                words = changes.get_tensor(name) if name in set(changes.keys()) else None
                wanted = (changes.metadata() or {}).get(name)
            after = tensor if words is None else _after(tensor, words)
        except (OSError, SafetensorError, zstandard.ZstdError, ValueError) as error:
            raise DeltaError(f"{self.folder}: {name}: {error}") from None
        if checksum(after) != wanted:
            raise DeltaError(
                f"{self.folder}: {name} has the checksum {checksum(after)} after the delta, not {wanted}: the delta is "
                f"damaged, or what it was applied to is not version {self.base}"
            )
        return after


def _after(tensor: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns the tensor with its XOR undone. Raises ValueError and ZstdError for words of another length."""
    # `decompress` would set aside whatever size the frame declares.
    came = zstandard.ZstdDecompressor().stream_reader(words.data).read(tensor.nbytes + 1)
    if len(came) != tensor.nbytes:
        raise ValueError(f"the delta is not one of {tensor.nbytes} bytes")
    return (as_bytes(tensor) ^ np.frombuffer(came, np.uint8)).view(tensor.dtype).reshape(tensor.shape)


def read_delta(folder: pathlib.Path) -> Delta | None:
    """The delta in a version folder; None for a full version. Raises DeltaError for one of another format."""
    metadata = read_json(folder / INDEX).get("metadata", {})
    if "base_version" not in metadata:
        return None
    if unknown := {key: metadata.get(key) for key, value in FORMAT.items() if metadata.get(key) != value}:
        raise DeltaError(f"{folder}: a delta with {json.dumps(unknown)}; known is {json.dumps(FORMAT)}")
    delta = Delta(folder, int(metadata["version"]), int(metadata["base_version"]))
    if delta.base >= delta.version or folder.name != folder_name(delta.version):
        raise DeltaError(f"{folder}: a delta from version {delta.base} to {delta.version}")
    return delta


def tensors_of(folder: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a checkpoint folder with one file, in its order."""
    with open_weights(folder) as tensors:
        for name in tensors.offset_keys():
            yield name, tensors.get_tensor(name)


def open_weights(folder: pathlib.Path) -> safe_open:
    """Opens the file of a checkpoint folder with one file. Raises DeltaError where it is damaged or not there."""
    try:
        return safe_open(folder / SINGLE, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise DeltaError(f"{folder / SINGLE}: {error}") from None


def as_bytes(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
