"""SGLang's hash of a tensor on a GPU (`sglang.kernels.ops.memory.gpu_tensor_hash`, 0.5.23), computed by JAX.

32-bit words are mixed with their place, added up by tiles of 8,192, and the tiles' 64-bit hashes added up. The test
compares with SGLang's own kernel in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

TILE = 8192  # words of a tile
TILES = 64  # of a call: 2 MiB; one program for tensors of all sizes
SEEDS = np.array([0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF], np.uint32)
PLACES = np.array([0x27D4EB2D, 0x165667B1], np.uint32)
TURNS = np.array([15, 13], np.uint32)
MIX = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
ALL = (1 << 64) - 1


def gpu_hash(parts: Sequence[np.ndarray]) -> str:
    """Sixteen hexadecimal digits, as `/weights_checker` says them, of arrays that follow each other in one tensor."""
    data = b"".join(np.ascontiguousarray(part).reshape(-1).view(np.uint8).tobytes() for part in parts)
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
