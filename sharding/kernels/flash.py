"""Attention over packed rows on NVIDIA GPUs: launches the Triton kernels of `flash_kernels` through jax-triton.

Scores are cut into tiles. Lists say which tiles of keys each tile of queries visits, and the other way round for
gradients of keys and values; they are computed on the device, from least and largest segment and branch of each tile.
Neither padding nor foreign segments nor other branches cost anything, and memory is linear in the length.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..target import target
from . import triton_launch

MOST_HEAD_SIZE = 128


def chosen(*arrays: Array) -> bool:
    """Says, while a program is traced, whether attention over these queries, keys and values is this file's business.

    It is where a Triton kernel can be launched (`launch.possible`) and heads have at most 128 numbers, a multiple of 8.
    """
    head = arrays[0].shape[-1]
    return head % 8 == 0 and head <= MOST_HEAD_SIZE and triton_launch.possible(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    branches: Int[Array, "B T"] | None,
    causal: bool,
) -> Float[Array, "B T N H"]:
    """Grouped-query attention under `sharding.kernels.attention.Mask`; a query that reaches no key returns zeros.

    Scores, softmax and sums are float32. A product of float32 is made of three of TF32 or six of bfloat16, which is
    about as exact.
    """
    return forward(q, k, v, segments, branches, causal)[0]


def _keep(q: Array, k: Array, v: Array, segments: Array, branches: Array | None, causal: bool) -> tuple[Array, tuple]:
    out, lse = forward(q, k, v, segments, branches, causal)
    return out, (q, k, v, out, lse, segments, branches)


def _grads(causal: bool, kept: tuple, dout: Array) -> tuple[Array, Array, Array, None, None]:
    q, k, v, out, lse, segments, branches = kept
    return *backward(q, k, v, out, lse, dout, segments, branches, causal), None, None


flash_attention.defvjp(_keep, _grads)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's tiles and how it is compiled."""

    queries: int  # tokens of a tile
    keys: int
    warps: int
    stages: int  # of the software pipeline
    precision: str = "tf32x3"  # the products of which one of float32 is made; bfloat16 is multiplied as it is


def launch_of(kernel: str, dtype: Any, head: int, capability: int) -> Launch:
    """The settings of a kernel: the largest tiles that ptxas fits into registers. No GPU has timed them.

    Tensor cores of Hopper and of data centres' Blackwell read shared memory, of which there is also more (227 KiB; on
    the smallest of the others 99), and leave more registers to the rest.
    """
    wide = head > 64
    if jnp.dtype(dtype).itemsize == 4:
        return Launch(32, 16, 8, 2, "bf16x6") if kernel == "key_gradients" else Launch(16, 32, 4, 2)
    if not 90 <= capability < 120:
        if kernel == "key_gradients":
            return Launch(32, 64 if wide else 128, 8, 2)
        return Launch(64 if wide else 128, 64, 8, 2)
    if kernel == "forward":
        return Launch(128, 128, 8, 2) if wide and capability == 90 else Launch(128, 64, 8 if wide else 4, 3)
    if kernel == "query_gradients":
        return Launch(128, 64, 8, 2)
    if wide and capability == 90:
        return Launch(64, 128, 8, 2)
    return Launch(64, 64, 8, 2) if wide and capability >= 100 else Launch(32, 128, 8, 2)


def forward(
    q: Array, k: Array, v: Array, segments: Array, branches: Array | None, causal: bool
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """The outputs, and the log of the sum of exponentiated scores, float32: 0 where a query reaches no key."""
    B, T, N, _ = q.shape
    outs = (jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32))
    out, lse = _call("forward", (q, k, v), (), segments, branches, causal, outs)
    return out, lse


def backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Float[Array, "B N T"],
    dout: Array,
    segments: Array,
    branches: Array | None,
    causal: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Gradients of q, k and v, summed in float32 and handed back in the dtypes of q, k and v."""
    # No product of matrices: on a GPU that might be one in TF32.
    slope = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    arrays, like = (q, k, v), [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    (dq,) = _call("query_gradients", arrays, (dout, lse, slope), segments, branches, causal, like[:1])
    dk, dv = _call("key_gradients", arrays, (dout, lse, slope), segments, branches, causal, like[1:])
    return dq, dk, dv


def _call(
    kernel: str,
    qkv: tuple[Array, Array, Array],
    more: tuple[Array, ...],
    segments: Array,
    branches: Array | None,
    causal: bool,
    outs: Any,
) -> list[Array]:
    """Runs a kernel over all tiles of queries (of keys: `key_gradients`), all heads and rows."""
    (B, T, N, H), K = qkv[0].shape, qkv[1].shape[2]
    inputs = (*qkv, *more, segments)
    if not (B and T and N):
        return [jnp.zeros(out.shape, out.dtype) for out in outs]
    settings = launch_of(kernel, qkv[0].dtype, H, target().capability)
    filled = -(-T // (most := max(settings.queries, settings.keys))) * most
    branches = jnp.zeros_like(segments) if branches is None else branches
    segments, branches = (jnp.pad(x, ((0, 0), (0, filled - T))) for x in (segments, branches))
    active, whole = tile_table(segments, branches, settings.queries, settings.keys, causal)
    if kernel == "key_gradients":
        active, whole = active.mT, whole.mT
    visits, counts = tile_lists(active, whole)
    by_keys = kernel == "key_gradients"
    results = triton_launch.launch(
        "flash_kernels",
        kernel,
        (*qkv, *more, segments, branches, visits, counts, T, filled, visits.shape[2]),
        outs,
        (visits.shape[1], K if by_keys else N, B),
        warps=settings.warps,
        stages=settings.stages,
        N=N,
        K=K,
        H=H,
        WIDTH=max(1 << (H - 1).bit_length(), 16),
        QUERIES=settings.queries,
        KEYS=settings.keys,
        CAUSAL=causal,
        SCALE=H**-0.5,
        PRECISION=settings.precision,
    )
    zero = triton_launch.varying_zero(*inputs)
    return [x + zero.astype(x.dtype) for x in results]


def tile_table(
    segments: Int[Array, "B S"], branches: Int[Array, "B S"], queries: int, keys: int, causal: bool
) -> tuple[Bool[Array, "B Q K"], Bool[Array, "B Q K"]]:
    """The tiles in which any query may reach a key, and those of them in which every query reaches every key.

    S is a multiple of the tiles' sizes. The first table never lacks a tile. It has too many at borders of segments,
    where branches are not compared, and where segments are not numbered in the order in which they stand.
    """
    most = jnp.iinfo(jnp.int32).max

    def ends(x: Array, size: int) -> tuple[Array, Array, Array]:
        """The least and largest value of the tokens of each tile, an empty range if all are padding; `all real`."""
        real = (segments != 0).reshape(segments.shape[0], -1, size)
        x = x.astype(jnp.int32).reshape(real.shape)
        return jnp.where(real, x, most).min(axis=2), jnp.where(real, x, -1).max(axis=2), real.all(axis=2)

    q_low, q_high, q_real = (x[:, :, None] for x in ends(segments, queries))
    k_low, k_high, k_real = (x[:, None, :] for x in ends(segments, keys))
    q_low_branch, q_high_branch, _ = (x[:, :, None] for x in ends(branches, queries))
    k_low_branch, k_high_branch, _ = (x[:, None, :] for x in ends(branches, keys))

    active = (q_low <= k_high) & (k_low <= q_high)
    one_segment = (q_low == q_high) & (k_low == k_high)
    active &= ~one_segment | (k_low_branch == 0) | ((q_low_branch <= k_high_branch) & (k_low_branch <= q_high_branch))
    one_branch = (q_low_branch == q_high_branch) & (k_low_branch == k_high_branch) & (q_low_branch == k_low_branch)
    whole = active & one_segment & q_real & k_real & ((k_high_branch == 0) | one_branch)
    if causal:
        first_query = jnp.arange(segments.shape[1] // queries)[None, :, None] * queries
        first_key = jnp.arange(segments.shape[1] // keys)[None, None, :] * keys
        active &= first_query + queries > first_key
        whole &= first_query >= first_key + keys - 1
    return active, whole


def tile_lists(
    active: Bool[Array, "B Q K"], whole: Bool[Array, "B Q K"]
) -> tuple[Int[Array, "B Q K"], Int[Array, "B Q 2"]]:
    """Lists for each line of the tables the places of its active tiles, those first that are not whole; and counts how
    many are not, and how many there are. What stands in a list behind its end is never looked at."""
    masked = active & ~whole
    several = masked.sum(axis=2, dtype=jnp.int32)
    place = jnp.where(whole, several[:, :, None] + jnp.cumsum(whole, axis=2), jnp.cumsum(masked, axis=2)) - 1
    width = active.shape[2]
    line = jnp.arange(active.shape[1])[None, :, None]
    row = jnp.arange(active.shape[0])[:, None, None]
    tile = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), active.shape)
    lists = jnp.zeros(active.shape, jnp.int32)
    lists = lists.at[row, line, jnp.where(active, place, width)].set(tile, mode="drop")
    return lists, jnp.stack([several, active.sum(axis=2, dtype=jnp.int32)], axis=2)
