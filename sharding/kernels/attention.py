"""Attention over packed rows, with kernels (`flash`) on NVIDIA GPUs and portable JAX elsewhere.

`segment_attention` attends within contiguous segments of a long packed axis, without a quadratic matrix. Segments are
runs of equal numbers; 0 is padding. If no run is longer than `bound`, the axis is cut into blocks of `bound`. A query
then finds its complete segment in its own block and the two neighbouring blocks, at a cost of `3 * bound` keys. The
backward pass computes the scores again, which is faster on CPUs than storing them. Without a bound, or with a bound
that saves nothing, every query looks at all keys.

`packed_attention` computes short rows with all their scores, in a few large products. In long rows the mask excludes
most scores. Long rows therefore form one stream, of which only tiles with an allowed score are computed (`tiles`).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import flash
from .tiles import tile_attention, tile_list

Attention = Callable[[Array, Array, Array], Array]  # (q_BTNH, k_BTKH, v_BTKH) -> out_BTNH

LONG_ROW = 512  # tokens; rows of at least this length are cut into tiles
WHOLE_SCORES = 1 << 26  # the most scores that are computed at once (256 MiB in float32)


@dataclasses.dataclass(frozen=True)
class Mask:
    """The keys that a query reaches. A key must have the query's segment, which is not 0. With `branches`, the key must
    have branch 0 or the query's branch. If `causal`, the key must not be later in the row than the query. If a row has
    fewer queries than keys, the queries are the row's last tokens. `visits` are the lists of tiles for `flash`."""

    segments: Int[Array, "B S"]
    branches: Int[Array, "B S"] | None = None
    causal: bool = True
    visits: flash.Visits | None = None

    def dense(self) -> Bool[Array, "B S S"]:
        """Returns the mask as booleans, with a query for every key."""
        return self.of(*self.queries(self.segments.shape[1]))

    def queries(self, tokens: int) -> tuple[Array, Array | None, Array]:
        """The segments, branches and indices in the row, `[B, T]` each, of the last `tokens` tokens of each row."""
        before = self.segments.shape[1] - tokens
        segments, branches = jax.tree.map(lambda x: x[:, before:], (self.segments, self.branches))
        return segments, branches, jnp.broadcast_to(before + jnp.arange(tokens), segments.shape)

    def of(self, segments: Array, branches: Array | None, index: Array) -> Bool[Array, "B T S"]:
        """Returns the mask of the queries with these segments, branches and indices in the row, `[B, T]` each."""
        query, key = segments[:, :, None], self.segments[:, None, :]
        allowed = (query == key) & (key != 0)
        if branches is not None and self.branches is not None:
            branch = self.branches[:, None, :]
            allowed &= (branch == 0) | (branch == branches[:, :, None])
        if self.causal:
            allowed &= index[:, :, None] >= jnp.arange(self.segments.shape[1])[None, None, :]
        return allowed


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask | Bool[Array, "B T S"],
    *,
    whole_scores: int = WHOLE_SCORES,
) -> Float[Array, "B T N H"]:
    """Grouped-query attention. Scores and softmax are float32. A query that reaches no key (padding) returns zeros, and
    its gradient is zero. If there are more than `whole_scores` scores (rows x heads x queries x keys), one chunk of
    queries is computed at a time, and again in the backward pass. Memory is then linear in the length. If `mask` is a
    `Mask`, `flash` computes on NVIDIA GPUs, and holds no scores in memory."""
    if isinstance(mask, Mask) and flash.chosen(q, k, v):
        visits = mask.visits or flash.visits_of(mask.segments, mask.branches, mask.causal, q, k.shape[1] - q.shape[1])
        return flash.flash_attention(q, k, v, visits)
    B, T, N, _ = q.shape
    chunk = max(whole_scores // (B * N * k.shape[1]), 1)
    if chunk >= T:
        return _attend(q, k, v, mask.of(*mask.queries(T)) if isinstance(mask, Mask) else mask)
    chunks = -(-T // chunk)

    def split(x: Array) -> Array:
        """`[B, T, ...]` -> `[chunks, B, chunk, ...]`, filled up with zeros (queries of segment 0)."""
        x = jnp.pad(x, [(0, 0), (0, chunks * chunk - T)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, chunks, chunk, *x.shape[2:]), 1, 0)

    if isinstance(mask, Mask):
        masks, dense = jax.tree.map(split, mask.queries(T)), lambda part: mask.of(*part)
    else:
        masks, dense = split(mask), lambda part: part
    chunk_out = jax.checkpoint(lambda part: _attend(part[0], k, v, dense(part[1])))
    out = jax.lax.map(chunk_out, (split(q), masks))
    return jnp.moveaxis(out, 0, 1).reshape(B, chunks * chunk, *q.shape[2:])[:, :T]


def _attend(q: Array, k: Array, v: Array, allowed: Array) -> Array:
    """Heads are moved to the front first, and the division by the softmax's sum comes last. On CPUs this takes at most
    half the time of a plain einsum of two batched axes."""
    B, T, N, H = q.shape
    S, K = k.shape[1], k.shape[2]
    R = N // K  # query heads that read each KV head
    q = q.reshape(B, T, K, R, H).transpose(0, 2, 3, 1, 4).reshape(B, K, R * T, H)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("BKTH,BKSH->BKTS", q, k, preferred_element_type=jnp.float32) * H**-0.5
    scores = jnp.where(allowed[:, None, None], scores.reshape(B, K, R, T, S), -1e30)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights.astype(v.dtype).reshape(B, K, R * T, S)
    out = jnp.einsum("BKTS,BKSH->BKTH", weights, v, preferred_element_type=jnp.float32).reshape(B, K, R, T, H)
    reached = allowed.any(axis=-1)[:, None, None, :, None]
    out = jnp.where(reached, out / total, 0.0).astype(v.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def segment_attention(
    q: Float[Array, "P N H"],
    k: Float[Array, "P K H"],
    v: Float[Array, "P K H"],
    segments: Int[Array, " P"],
    bound: int = 0,
) -> Float[Array, "P N H"]:
    """Bidirectional attention within segments. The static `bound` is at least the length of the longest segment, or 0
    if the length is unknown. A `bound` smaller than a segment cuts the segment silently. Padding returns zeros."""
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
    """`[P, ...]` -> `[blocks, size, ...]`, with zeros (segment 0) at the end of the last block."""
    count = -(-x.shape[0] // size)
    x = jnp.pad(x, [(0, count * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(count, size, *x.shape[1:])


def _with_neighbours(x: Array) -> Array:
    """`[blocks, size, ...]` -> `[blocks, 3 * size, ...]`, each block between its two neighbours."""
    edge = jnp.zeros_like(x[:1])
    return jnp.concatenate([jnp.concatenate([edge, x[:-1]]), x, jnp.concatenate([x[1:], edge])], axis=1)


def packed_attention(
    segments_BT: Int[Array, "B T"], branches_BT: Int[Array, "B T"], queries: flash.Like = None
) -> Attention:
    """Returns attention under a causal `Mask` with branches, as a function of queries, keys and values. `queries` has
    the dtype and the head size of all layers' queries; without it, each layer lists its tiles."""
    B, T = segments_BT.shape
    visits = None
    if queries is not None and flash.chosen(queries):
        visits = flash.visits_of(segments_BT, branches_BT, True, queries)
    mask = Mask(segments_BT, branches_BT, visits=visits)
    if T < LONG_ROW:
        return lambda q, k, v: attention(q, k, v, mask)
    # Segments of different rows get different, ascending numbers.
    rows_B1 = jnp.arange(B, dtype=segments_BT.dtype)[:, None] * (jnp.max(segments_BT) + 1)
    apart_BT = jnp.where(segments_BT != 0, segments_BT + rows_B1, 0)
    tiles = tile_list(apart_BT.reshape(-1), branches_BT.reshape(-1))

    def attend(q: Array, k: Array, v: Array) -> Array:
        if flash.chosen(q, k, v):
            return attention(q, k, v, mask)
        q_SNH, k_SKH, v_SKH = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return tile_attention(q_SNH, k_SKH, v_SKH, tiles).reshape(q.shape)

    return attend
