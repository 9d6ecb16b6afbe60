"""Checksums of weights, one a tensor, as servers must answer them after an update.

`rollout.serve` has the tensors of the checkpoint. SGLang joins some (queries, keys and values; gate and up), fills the
vocabulary up, divides them over its ranks, and hashes what each rank holds: by SHA-256 on CPUs, by a hash of its own on
GPUs. Seen to agree with SGLang 0.5.23 on CPUs, with one rank and with two (sizes that do not divide into 32s are padded
there, and refused here); its GPU hash in Triton's interpreter.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from safetensors import safe_open

VOCABULARY_MULTIPLE = 64  # rows of embedding and head in SGLang; what is missing is zeros
_VOCABULARY = re.compile(r"(embed_tokens|lm_head)\.weight$")
_JOINED = (
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.mlp\.(gate|up)_proj\."), ".mlp.gate_up_proj."),
)
_ORDER = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}  # of the parts of a joined one
_MOVED = (("model.language_model.", "model."), ("model.visual.", "visual."), (".attn.qkv.", ".attn.qkv_proj."))
_KEYS_VALUES = re.compile(r"\.self_attn\.[kv]_proj\.")
_BY_ROWS = re.compile(r"\.(q|gate|up)_proj\.|merger\.mlp\.0\.")  # of the tensor: each rank has some outputs
_BY_COLUMNS = re.compile(r"\.(o_proj|down_proj|attn\.proj|mlp\.2)\.weight$")  # some inputs
_WEIGHTS = (".weight", ".bias")  # ends of the names that are weights; servers hash buffers, too
Hash = Callable[[Sequence[np.ndarray]], str]


class WeightsMismatch(RuntimeError):
    """A server does not hold what was sent to it. It must not generate."""


class Checksums:
    """The checksums of the tensors of a safetensors file. Computed when first asked for, from any thread."""

    def __init__(self, file: pathlib.Path, kv_heads: int) -> None:
        self._file, self._kv_heads = file, kv_heads
        with safe_open(file, framework="numpy") as tensors:
            self._names = sorted(tensors.keys())
        self._expected = functools.cache(self._compute)

    def check(self, ranks: Sequence[Mapping[str, str]], server: str) -> None:
        """Compares the checksums with those of what each rank of a server holds, under either kind of names. Raises
        WeightsMismatch, which names server and tensor."""
        as_served = len(ranks) > 1 or not set(self._names) <= ranks[0].keys()
        for rank, held in enumerate(ranks):
            options = [self._expected(as_served, len(ranks), rank, sha256)]
            if as_served and not any(held.get(name) == value for name, value in options[0].items()):
                from .gpu_hash import gpu_hash

                options.append(self._expected(True, len(ranks), rank, gpu_hash))
            where = f"{server}, rank {rank}" if len(ranks) > 1 else server
            wanted = min(options, key=lambda wanted: _differ(wanted, held))
            if len(wanted) > 1 and _differ(wanted, held) == len(wanted):
                raise WeightsMismatch(
                    f"{where}: after the update of its weights, none of its tensors has the checksum of what was sent: "
                    "the update did nothing, or the server computes in another dtype than model.compute_dtype (--dtype)"
                )
            _compare(wanted, held, where)

    def _compute(self, as_served: bool, size: int, rank: int, hashed: Hash) -> dict[str, str]:
        parts: dict[str, list[str]] = {}
        for name in sorted(self._names, key=_part):
            parts.setdefault(sglang_name(name) if as_served else name, []).append(name)

        def checksum(names: Sequence[str]) -> str:
            with safe_open(self._file, framework="numpy") as tensors:
                whole = [tensors.get_tensor(name) for name in names]
            if as_served:
                whole = [self._shard(name, tensor, size, rank) for name, tensor in zip(names, whole, strict=True)]
            return hashed(whole)

        with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="checksums") as threads:
            return dict(zip(parts, threads.map(checksum, parts.values()), strict=True))

    def _shard(self, name: str, tensor: np.ndarray, size: int, rank: int) -> np.ndarray:
        """The part of a tensor that a rank of SGLang holds."""
        if _VOCABULARY.search(name):
            missing = -len(tensor) % VOCABULARY_MULTIPLE
            tensor = np.concatenate([tensor, np.zeros((missing, *tensor.shape[1:]), tensor.dtype)])
            return _cut(name, tensor, size, 0)[rank]
        if ".attn.qkv." in name:
            return np.concatenate([_cut(name, part, size, 0)[rank] for part in np.split(tensor, 3)])
        if _KEYS_VALUES.search(name):  # a head may be on several ranks
            shards = min(size, self._kv_heads)
            return _cut(name, tensor, shards, 0)[rank * shards // size]
        if _BY_ROWS.search(name):
            return _cut(name, tensor, size, 0)[rank]
        return _cut(name, tensor, size, 1)[rank] if _BY_COLUMNS.search(name) else tensor


def _cut(name: str, tensor: np.ndarray, size: int, axis: int) -> list[np.ndarray]:
    if tensor.shape[axis] % size:
        raise WeightsMismatch(f"{name} of shape {tensor.shape} does not divide over {size} ranks, as SGLang would")
    return np.split(tensor, size, axis)


def _compare(wanted: Mapping[str, str], held: Mapping[str, str], server: str) -> None:
    for name, checksum in wanted.items():
        if held.get(name) != checksum:
            state = "is missing" if name not in held else f"has the checksum {held[name]}, not {checksum}"
            raise WeightsMismatch(f"{server}: after the update of its weights, {name} {state}")
    for name in held:
        if name not in wanted and name.endswith(_WEIGHTS):
            raise WeightsMismatch(f"{server}: holds a tensor {name}, which was not sent")


def _differ(wanted: Mapping[str, str], held: Mapping[str, str]) -> int:
    return sum(held.get(name) != checksum for name, checksum in wanted.items())


def sha256(parts: Sequence[np.ndarray]) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
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
