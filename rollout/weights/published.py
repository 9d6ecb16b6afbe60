"""A version of the weights as servers of this host read it: a checkpoint folder in shared memory, and the checksums
with which servers must answer after an update.

`rollout.serve` has the checkpoint's tensors. SGLang joins some tensors (queries, keys, values; gate, up; the input
projections of linear attention), pads the vocabulary, and divides tensors over its ranks. Each rank hashes its parts,
by SHA-256 on CPUs, by a hash of SGLang's own on GPUs. The checksums here agree with SGLang 0.5.23 on CPUs, and with its
GPU hash in Triton's interpreter. Sizes that do not divide over the ranks are refused.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, UInt32
from safetensors import safe_open

import models
from models.config import DecoderConfig
from models.folder import write_json
from models.hf import SINGLE, disk_tensors, stored, write_weights
from models.registry import write_config

from ..engine import WeightsMismatch
from ..engine_weights import by_name, check_shapes, served

SHARED_MEMORY = pathlib.Path("/dev/shm")
PREFIX = "fluxjax-weights-"
VOCABULARY_MULTIPLE = 64  # SGLang adds rows of zeros to embeddings and head, up to a multiple of this number
_VOCABULARY = re.compile(r"(embed_tokens|lm_head|pos_embed)\.weight$")
_JOINED = (
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.mlp\.(gate|up)_proj\."), ".mlp.gate_up_proj."),
    (re.compile(r"\.in_proj_(qkv|z)\."), ".in_proj_qkvz."),
    (re.compile(r"\.in_proj_[ab]\."), ".in_proj_ba."),
)
# The order of the parts in a joined tensor; parts with other names are in the order of their names.
_ORDER = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1, "in_proj_b": 0, "in_proj_a": 1}
_MOVED = (("model.language_model.", "model."), ("model.visual.", "visual."), (".attn.qkv.", ".attn.qkv_proj."))
_KEYS_VALUES = re.compile(r"\.self_attn\.[kv]_proj\.")
# Tensors cut by rows (a rank has some outputs), or by columns (a rank has some inputs)
_BY_ROWS = re.compile(r"\.((q|gate|up)_proj|in_proj_[abz]|linear_fc1|A_log|dt_bias)(\.|$)|merger\.mlp\.0\.")
_BY_COLUMNS = re.compile(r"\.(o_proj|out_proj|down_proj|attn\.proj|mlp\.2|linear_fc2)\.weight$")
_LINEAR_ATTENTION = re.compile(r"^(.*\.linear_attn\.)(in_proj_qkv|conv1d)\.")  # rows: queries, keys, values
_WEIGHTS = (".weight", ".bias")  # endings of the names of weights; servers hash buffers, too
Hash = Callable[[Sequence[np.ndarray]], str]

# Constants of SGLang's hash of a tensor on a GPU.
TILE = 8192  # words of a tile
TILES = 64  # tiles of a call, 2 MiB: one program serves tensors of all sizes
SEEDS = np.array([0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF], np.uint32)
PLACES = np.array([0x27D4EB2D, 0x165667B1], np.uint32)
TURNS = np.array([15, 13], np.uint32)
MIX = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
ALL = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Published:
    version: int
    folder: pathlib.Path
    checksums: "Checksums"
    bytes: int


class SharedFolders:
    """Writes each version once into shared memory (a temporary folder if a host has none). Any thread may use it.
    Weights are cast to `dtype`, in which servers compute. `close` removes all versions."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike) -> None:
        self._config, self._dtype = served(config), np.dtype(dtype)
        where = scratch_folder()
        sweep(where, PREFIX)
        self._root = pathlib.Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
        weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)  # at the latest when Python ends
        self._written: list[tuple[Published, list[weakref.ref[Any]]]] = []  # versions, each with its arrays
        self._count = 0
        self._lock = threading.Lock()

    def write(self, version: int, params: Mapping[str, Any]) -> Published:
        """Writes a version tensor by tensor, unless these very arrays were written as this version before. Blocks.
        Raises EngineError for weights of another model, and OSError if there is no room; then leaves no files."""
        with self._lock:
            arrays = jax.tree.leaves(params)
            for published, seen in self._written:
                if published.version == version and [id(ref()) for ref in seen] == list(map(id, arrays)):
                    return published
            self._count += 1
            published = self._write(self._root / f"v{version}-{self._count}", version, params)
            self._written.append((published, list(map(weakref.ref, arrays))))
            return published

    def _write(self, folder: pathlib.Path, version: int, params: Mapping[str, Any]) -> Published:
        check_shapes(by_name(models.split(models.abstract(self._config))[1]), by_name(dict(params)))
        contents = stored(self._config, dict(params), self._dtype)
        size = sum(tensor.nbytes for tensor in contents)
        free = shutil.disk_usage(self._root).free
        if size > free:
            raise OSError(
                f"{folder}: version {version} needs {size / 2**20:.0f} MiB of shared memory, {free / 2**20:.0f} are "
                "free; up to three versions are there at a time: raise the limit of /dev/shm (docker: --shm-size)"
            )
        tensors = (value.astype(self._dtype, copy=False) for _, value in disk_tensors(self._config, dict(params)))
        folder.mkdir(exist_ok=True)
        try:
            write_weights(folder / SINGLE, contents, tensors)
            write_json(folder / "config.json", write_config(self._config))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return Published(version, folder, Checksums(folder / SINGLE, self._config.text.num_kv_heads), size)

    def keep(self, wanted: Sequence[Published]) -> None:
        """Removes all versions but `wanted` and the newest other version, which a starting server may be reading."""
        with self._lock:
            unwanted = [published for published, _ in self._written if published not in wanted]
            for published in unwanted[:-1]:
                shutil.rmtree(published.folder, ignore_errors=True)
            self._written = [entry for entry in self._written if entry[0] not in unwanted[:-1]]

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def scratch_folder() -> pathlib.Path:
    """The folder in which a host puts weights for its servers: in shared memory, if the host has that."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else pathlib.Path(tempfile.gettempdir())


def sweep(where: pathlib.Path, prefix: str) -> None:
    """Removes the folders of killed runs, each as large as the model. A name begins with `prefix` and a process id."""
    for folder in where.glob(f"{prefix}*"):
        owner, _, rest = folder.name.removeprefix(prefix).partition("-")
        if "-" in rest:  # the prefix may end with a host's name; this folder is that of a host with a longer name
            continue
        if owner.isdecimal() and not pathlib.Path("/proc", owner).exists() and pathlib.Path("/proc").is_dir():
            shutil.rmtree(folder, ignore_errors=True)


# --- checksums, one a tensor ----------------------------------------------------------------------


class Checksums:
    """The checksums of the tensors of a safetensors file, computed when first needed. Any thread may use them."""

    def __init__(self, file: pathlib.Path, kv_heads: int) -> None:
        self._file, self._kv_heads = file, kv_heads
        with safe_open(file, framework="numpy") as tensors:
            self._names = sorted(tensors.keys())
        self._hybrid = any(".linear_attn." in name for name in self._names)  # Qwen3.5
        self._expected = functools.cache(self._compute)

    def check(self, ranks: Sequence[Mapping[str, str]], server: str) -> None:
        """Raises WeightsMismatch, which names the server and, unless all tensors differ, a tensor, if a rank of a
        server has another checksum, under the checkpoint's names or SGLang's."""
        for rank, held in enumerate(ranks):
            wanted = self._wanted(ranks, rank)
            where = f"{server}, rank {rank}" if len(ranks) > 1 else server
            wrong = _differing(wanted, held)
            if len(wanted) > 1 and len(wrong) == len(wanted):
                raise WeightsMismatch(
                    f"{where}: after the update of its weights, none of its tensors has the checksum of what was sent: "
                    "the update did nothing, or the server computes in another dtype than model.compute_dtype (--dtype)"
                )
            for name in wrong:
                has = f"has the checksum {held[name]}, not {wanted[name]}" if name in held else "is missing"
                raise WeightsMismatch(f"{where}: after the update of its weights, {name} {has}")
            for name in held:
                if name not in wanted and name.endswith(_WEIGHTS):
                    raise WeightsMismatch(f"{where}: holds a tensor {name}, which was not sent")

    def differing(self, ranks: Sequence[Mapping[str, str]]) -> tuple[list[str], int]:
        """Returns (names that some rank lacks or has with another checksum, number of all tensors of a rank)."""
        wanted = [self._wanted(ranks, rank) for rank in range(len(ranks))]
        names = itertools.chain.from_iterable(map(_differing, wanted, ranks))
        return [*dict.fromkeys(names)], len(wanted[0])

    def _wanted(self, ranks: Sequence[Mapping[str, str]], rank: int) -> Mapping[str, str]:
        """The checksums that a rank should have, for the names and the hash that the server uses."""
        as_served = len(ranks) > 1 or not set(self._names) <= ranks[0].keys()
        options = [self._expected(as_served, len(ranks), rank, sha256)]
        if as_served and not any(ranks[rank].get(name) == value for name, value in options[0].items()):
            options.append(self._expected(True, len(ranks), rank, gpu_hash))
        return min(options, key=lambda wanted: len(_differing(wanted, ranks[rank])))

    def _compute(self, as_served: bool, size: int, rank: int, hashed: Hash) -> dict[str, str]:
        parts: dict[str, list[str]] = {}
        for name in sorted(self._names, key=_part):
            parts.setdefault(self._served_name(name) if as_served else name, []).append(name)

        def checksum(names: Sequence[str]) -> str:
            with safe_open(self._file, framework="numpy") as tensors:
                whole = [tensors.get_tensor(name) for name in names]
            if as_served:
                whole = [self._shard(name, tensor, size, rank) for name, tensor in zip(names, whole, strict=True)]
            return hashed(whole)

        with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="checksums") as threads:
            return dict(zip(parts, threads.map(checksum, parts.values()), strict=True))

    def _served_name(self, name: str) -> str:
        return sglang_name(name).replace(".self_attn.", "." if self._hybrid else ".self_attn.")

    def _shard(self, name: str, tensor: np.ndarray, size: int, rank: int) -> np.ndarray:
        """The part of a tensor that a rank of SGLang holds."""
        if name.endswith(".A_log"):
            tensor = tensor.astype(np.float32)  # as in SGLang, whatever the dtype of other tensors
        if _VOCABULARY.search(name):
            missing = -len(tensor) % VOCABULARY_MULTIPLE
            tensor = np.concatenate([tensor, np.zeros((missing, *tensor.shape[1:]), tensor.dtype)])
            return _cut(name, tensor, size, 0)[rank]
        if ".attn.qkv." in name:
            return np.concatenate([_cut(name, part, size, 0)[rank] for part in np.split(tensor, 3)])
        if found := _LINEAR_ATTENTION.match(name):
            with safe_open(self._file, framework="numpy") as tensors:
                values = tensors.get_slice(f"{found[1]}in_proj_z.weight").get_shape()[0]
            keys = (len(tensor) - values) // 2
            parts = np.split(tensor, [keys, 2 * keys])
            return np.concatenate([_cut(name, part, size, 0)[rank] for part in parts])
        if _KEYS_VALUES.search(name):  # a head may be on several ranks
            shards = min(size, self._kv_heads)
            return _cut(name, tensor, shards, 0)[rank * shards // size]
        if _BY_ROWS.search(name):
            return _cut(name, tensor, size, 0)[rank]
        return _cut(name, tensor, size, 1)[rank] if _BY_COLUMNS.search(name) else tensor


def _cut(name: str, tensor: np.ndarray, size: int, axis: int) -> list[np.ndarray]:
    if tensor.shape[axis] % size:
        raise WeightsMismatch(f"{name} of shape {tensor.shape} can't be divided over {size} ranks as SGLang divides it")
    return np.split(tensor, size, axis)


def _differing(wanted: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    return [name for name, checksum in wanted.items() if held.get(name) != checksum]


def as_bytes(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def sha256(parts: Sequence[np.ndarray]) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(as_bytes(part).data)
    return hashed.hexdigest()[:16]


def _part(name: str) -> tuple[str, int]:
    """The key that sorts the parts of a joined tensor as SGLang does."""
    module = name.rsplit(".", 2)[-2]
    return sglang_name(name), _ORDER.get(module, 0)


def sglang_name(name: str) -> str:
    """The parameter of SGLang's Qwen models that a tensor of a checkpoint becomes, or becomes a part of."""
    for old, new in _MOVED:
        name = name.replace(old, new)
    for pattern, new in _JOINED:
        name = pattern.sub(new, name)
    return name


def gpu_hash(parts: Sequence[np.ndarray]) -> str:
    """SGLang's hash (`sglang.kernels.ops.memory.gpu_tensor_hash`, 0.5.23) of a tensor on a GPU, given as `parts` one
    behind the other: sixteen hexadecimal digits. 32-bit words are mixed with their index and added up by tiles of
    8,192; the tiles' 64-bit hashes are added up."""
    data = b"".join(as_bytes(part).data for part in parts)
    words = np.frombuffer(data + bytes(-len(data) % 4), np.uint32)
    total = 0
    for start in range(0, len(words), TILE * TILES):
        block = np.zeros(TILE * TILES, np.uint32)
        piece = words[start : start + TILE * TILES]
        block[: len(piece)] = piece
        tiles = -(-len(piece) // TILE)
        high, low = np.asarray(_tiles(block.reshape(TILES, TILE), np.uint32(start), np.uint32(len(words))), np.uint64)[
            :, :tiles
        ]
        total += int(np.sum((high << np.uint64(32)) | low, dtype=np.uint64))
    return f"{_spread(total & ALL):016x}"


@jax.jit
def _tiles(words_KT: UInt32[Array, "K T"], first: UInt32[Array, ""], count: UInt32[Array, ""]) -> UInt32[Array, "2 K"]:
    """The halves of each tile's hash, high first. The block begins with word `first` of `count`."""
    index_KT = first + jnp.arange(words_KT.size, dtype=jnp.uint32).reshape(words_KT.shape)
    halves = []
    for seed, place, turn in zip(SEEDS, PLACES, TURNS, strict=True):
        turned_KT = (index_KT << turn) | (index_KT >> (np.uint32(32) - turn))
        mixed_KT = _mixed(words_KT ^ ((index_KT * place + seed) ^ turned_KT))
        sums_K = jnp.where(index_KT < count, mixed_KT, np.uint32(0)).sum(axis=1, dtype=jnp.uint32)
        halves.append(_mixed(sums_K ^ (count * np.uint32(4))))
    return jnp.stack(halves)


def _mixed(x: Array) -> Array:
    for constant, shift in zip(MIX, (16, 13), strict=True):
        x = (x ^ (x >> np.uint32(shift))) * constant
    return x ^ (x >> np.uint32(16))


def _spread(x: int) -> int:
    """The last step: SplitMix64's finaliser."""
    for shift, constant in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * constant) & ALL
    return x ^ (x >> 31)
