"""Attention of decoding over pages, with a Triton kernel on NVIDIA GPUs and portable JAX elsewhere.

The kernel reads a sequence's pages in place, up to the last entry. It cuts a long sequence into parts that run side by
side, whose sums are combined at the end. The portable form gathers one block of pages of all sequences at a time, up to
the longest sequence. Every bit of an output depends on its own sequence alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..mesh import Tiling, launch, runs_triton

# Says, at tracing, whether the kernel can compute attention over these arrays (see `runs_triton`).
chosen = functools.partial(runs_triton, multiple=8, most=256)

BLOCK = 64  # entries of a sequence that the portable form reads at a time
PARTS = 16  # the kernel cuts a sequence into at most this many parts
LEAST_TILES = 4  # each part but the last has at least this many tiles: the sums of a part take memory traffic, too
MASKED = -1e30  # the score of an entry after the sequence's end


def paged_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "L C K S H"],
    v: Float[Array, "L C K S H"],
    pages: Int[Array, "B V"],
    length: Int[Array, " B"],
    layer: int,
) -> Float[Array, "B N H"]:
    """Computes grouped-query attention of one token of each sequence over the first `length` (at least 1) entries of
    its pages, which must all be finite. Later page numbers may be out of range. Scores and sums are float32."""
    return (_by_parts if chosen(q, k, v) else _by_blocks)(q, k, v, pages, length, layer)


def gathered(x: Float[Array, "L C K S H"], pages: Int[Array, "B V"], layer: int) -> Float[Array, "B K T H"]:
    """Returns the entries of these pages in one layer, `T = V S`. A page number out of range reads some other page."""
    (L, C, K, S, H), (B, V) = x.shape, pages.shape
    rows = x.reshape(L * C * K, S * H)  # CPUs gather plain rows fastest
    numbers_BKV = (jnp.minimum(pages, C - 1) + layer * C)[:, None] * K + jnp.arange(K)[None, :, None]
    return jnp.take(rows, numbers_BKV, axis=0, mode="clip").reshape(B, K, V * S, H)


def _by_blocks(q: Array, k: Array, v: Array, pages: Array, length: Array, layer: int) -> Array:
    """The running softmax (Milakov and Gimelshein, arXiv:1805.02867) over blocks of pages."""
    (B, N, H), (K, S) = q.shape, k.shape[2:4]
    width = min(max(BLOCK // S, 1), pages.shape[1])
    # A second block is added to a single one, whose scores XLA would take out of the loop below and compute twice.
    spare = -pages.shape[1] % width if pages.shape[1] > width else width
    pages = jnp.pad(pages, ((0, 0), (0, spare)))
    q = q.reshape(B, K, N // K, H)

    def attend(block: Array | int, sums: tuple[Array, Array, Array] | None = None) -> tuple[Array, Array, Array]:
        here = jax.lax.dynamic_slice_in_dim(pages, block * width, width, axis=1)
        keys, values = gathered(k, here, layer), gathered(v, here, layer)
        scores = jnp.einsum("BKGH,BKSH->BKGS", q, keys, preferred_element_type=jnp.float32) * H**-0.5
        real = block * width * S + jnp.arange(width * S)[None, :] < length[:, None]
        scores = jnp.where(real[:, None], scores.reshape(B, N, -1), MASKED)  # CPUs are slow at four axes
        peak = scores.max(axis=-1, keepdims=True)
        peak = peak if sums is None else jnp.maximum(peak, sums[2])
        weights = jnp.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        shares = weights.astype(v.dtype).reshape(B, K, N // K, -1)
        out = jnp.einsum("BKGS,BKSH->BKGH", shares, values, preferred_element_type=jnp.float32).reshape(B, N, H)
        if sums is None:
            return out, total, peak
        fade = jnp.exp(sums[2] - peak)
        return sums[0] * fade + out, sums[1] * fade + total, peak

    # The first block needs no loop, because most sequences on CPUs are short.
    out, total, _ = jax.lax.fori_loop(1, -(-jnp.max(length) // (width * S)), attend, attend(0))
    return (out / total).astype(v.dtype)


def tiling_of(dtype: Any, head: int) -> Tiling:
    """Returns the number of entries in a tile of the kernel, and the kernel's numbers of warps and stages. With five
    stages in bfloat16, the compiled kernel takes 72 KB of shared memory, and each GPU has at least 99 KB."""
    narrow = head <= 128
    if jnp.dtype(dtype).itemsize == 4:
        return Tiling((32 if narrow else 16,), 4, 3)
    return Tiling((64 if narrow else 32,), 4, 5)


def _by_parts(q: Array, k: Array, v: Array, pages: Array, length: Array, layer: int) -> Array:
    (B, N, H), (_, C, K, S, _) = q.shape, k.shape
    tiling = tiling_of(q.dtype, H)
    (keys,) = tiling.sizes
    parts = min(-(-pages.shape[1] * S // (LEAST_TILES * keys)), PARTS)
    tiles = -(-length // keys)
    part_tiles = jnp.maximum(-(-tiles // parts), LEAST_TILES)
    numbers = jax.ShapeDtypeStruct((B, parts, N), jnp.float32)
    sums, totals, peaks = launch(
        "paged_kernels",
        "attend",
        (q, k, v, pages, length, part_tiles, layer * C, C, pages.shape[1]),
        (jax.ShapeDtypeStruct((B, parts, N, H), jnp.float32), numbers, numbers),
        (K, parts, B),
        tiling,
        N=N,
        K=K,
        H=H,
        PAGE=S,
        WIDTH=max(1 << (H - 1).bit_length(), 16),
        HEADS=max(1 << (N // K - 1).bit_length(), 16),
        KEYS=keys,
        SCALE=H**-0.5,
    )
    real = (jnp.arange(parts)[None, :] * part_tiles[:, None] < tiles[:, None])[:, :, None]  # empty parts are unwritten
    peaks = jnp.where(real, peaks, MASKED)
    fades = jnp.where(real, jnp.exp2(peaks - peaks.max(axis=1, keepdims=True)), 0.0)
    total = jnp.where(real, totals * fades, 0.0).sum(axis=1)
    out = jnp.where(real[..., None], sums * fades[..., None], 0.0).sum(axis=1)
    return (out / total[..., None]).astype(v.dtype)
