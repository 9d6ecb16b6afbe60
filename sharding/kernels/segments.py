"""Exact attention within contiguous segments of a long packed axis, without a quadratic matrix.

Segments are runs of equal numbers; 0 is padding. When no run is longer than `bound`, the axis is cut into blocks of
`bound`, and a query finds its whole segment in its own block and the two beside it: cost grows as `3 * bound` a query
instead of the length of the axis. The backward pass computes the scores again, which on the CPU is also faster than
keeping them. Without a bound, or with a bound that saves nothing, every query looks at all keys (`attention` bounds the
memory of that). On NVIDIA GPUs the kernel finds the tiles of each segment without a bound.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import flash
from .attention import Mask, attention


def segment_attention(
    q: Float[Array, "P N H"],
    k: Float[Array, "P K H"],
    v: Float[Array, "P K H"],
    segments: Int[Array, " P"],
    bound: int = 0,
) -> Float[Array, "P N H"]:
    """Bidirectional attention within segments; `bound` is static: the longest segment, 0 if unknown.

    A `bound` smaller than a segment would cut it silently: it must come from the data (`inputs.frame_bound`) or
    from the architecture (the window size). Padding returns zeros.
    """
    if bound and 3 * bound < q.shape[0] and not flash.chosen(q, k, v):
        return jax.checkpoint(functools.partial(_blocked, block=bound))(q, k, v, segments)
    return attention(q[None], k[None], v[None], Mask(segments[None], causal=False))[0]


def _blocked(q: Array, k: Array, v: Array, segments: Array, *, block: int) -> Array:
    P = q.shape[0]
    q, k, v, query_segments = (_blocks(x, block) for x in (q, k, v, segments))
    k, v, key_segments = (_with_neighbours(x) for x in (k, v, query_segments))
    allowed = (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments != 0)[:, None, :]
    return attention(q, k, v, allowed).reshape(-1, *q.shape[2:])[:P]


def _blocks(x: Array, size: int) -> Array:
    """`[P, ...]` -> `[blocks, size, ...]`, the last one filled up with zeros (segment 0)."""
    count = -(-x.shape[0] // size)
    x = jnp.pad(x, [(0, count * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(count, size, *x.shape[1:])


def _with_neighbours(x: Array) -> Array:
    """`[blocks, size, ...]` -> `[blocks, 3 * size, ...]`: the block before, itself, the block after."""
    edge = jnp.zeros_like(x[:1])
    return jnp.concatenate([jnp.concatenate([edge, x[:-1]]), x, jnp.concatenate([x[1:], edge])], axis=1)
