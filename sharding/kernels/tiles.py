"""Attention over one packed stream that computes only the tiles in which a query reaches a key.

Scores are cut into square tiles. The active tiles, in which a query may reach a key, are listed once for all layers.
The length of the list is data, so that it may differ between the devices of one program. The running softmax of
FlashAttention (arXiv:2205.14135) combines tiles. The backward pass computes scores again, in linear memory.

A tile is computed by a batch of plain matrix products. Queries are `[tiles, K, R * tile, H]`, in which the `R` query
heads of one KV head are stacked.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..mesh import target, varying_zero
from . import flash

MASKED = -1e30  # the score of a key that the query does not reach
FLOOR = -1e20  # the least running maximum, so that all weights are 0 for a query that reaches no key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """The active tiles of a stream that is filled up to full tiles with padding (segment 0). `pairs[:count]` are sorted
    pairs (query tile, key tile). The rest of `pairs` is never read."""

    pairs: Any  # i32 [pairs, 2]
    count: Any  # i32 []
    segments: Any  # i32 [tiles, tile]
    branches: Any  # i32 [tiles, tile]
    visits: flash.Visits | None = None  # lists of tiles, if `flash` computes

    @property
    def size(self) -> int:
        """Tokens of a tile."""
        return self.segments.shape[1]


def tile_size(tokens: int) -> int:
    """Returns the size of a tile. A stream has at most 256 tiles. On CPUs, 64 and 128 were the fastest sizes up to 4096
    tokens. On other devices, each iteration launches kernels, so that larger tiles should be faster (not measured)."""
    least = (64 if tokens <= 512 else 128) if target().platform == "cpu" else 512
    at_256_tiles = 1 << max((tokens - 1).bit_length() - 8, 0)
    return min(max(least, at_256_tiles), -(-tokens // 8) * 8)


def tile_list(
    segments_S: Int[Array, " S"], branches_S: Int[Array, " S"], tile: int = 0, queries: flash.Like = None
) -> Tiles:
    """Returns the tiles in which `sharding.kernels.attention.Mask` (causal) lets a query reach a key. `tile=0` chooses
    a size. `queries` has the dtype and the head size of all layers' queries. Without `queries`, `flash` never computes.
    Padding may be anywhere, and segments may have any numbers. If segments and branches are contiguous, needless tiles
    are only at the border of two segments, where branches are not compared."""
    S = segments_S.shape[0]
    tile = tile or tile_size(S)
    tiles = -(-S // tile)
    padded = [jnp.pad(x, (0, tiles * tile - S)) for x in (segments_S, branches_S)]
    segments, branches = (x.reshape(tiles, tile) for x in padded)
    order = jnp.argsort(segments.reshape(-1), stable=True)
    ranked = segments.reshape(-1)[order]
    # The tile in which each token's segment begins. A tile of queries needs no key tile before the first of these
    # tiles.
    first = order[jnp.searchsorted(ranked, segments, method="sort")] // tile
    since = jnp.where(segments != 0, first, jnp.iinfo(jnp.int32).max).min(axis=1)
    table, _ = flash.tile_table(segments.reshape(1, -1), branches.reshape(1, -1), tile, tile, True)
    active = table[0] & (jnp.arange(tiles)[None, :] >= since[:, None])
    query, key = jnp.nonzero(active, size=tiles * (tiles + 1) // 2, fill_value=0)
    pairs = jnp.stack([query, key], axis=1).astype(jnp.int32)
    visits = None
    if queries is not None and flash.chosen(queries):
        visits = flash.visits_of(segments_S[None], branches_S[None], True, queries)
    return Tiles(pairs, active.sum(dtype=jnp.int32), segments, branches, visits)


def forward(
    q_SNH: Float[Array, "S N H"], k_SKH: Float[Array, "S K H"], v_SKH: Float[Array, "S K H"], tiles: Tiles
) -> tuple[Float[Array, "S N H"], tuple]:
    """Computes grouped-query attention over a stream. Scores, softmax and sums are float32. Padding gives zeros.

    Returns the outputs, and the arrays that `backward` needs, such as the log of the sum of exponentiated scores (0: no
    key is reached), float32 `[tiles, K, R * tile]`, or `[1, N, S]` if `flash` computes. Under `shard_map`, `q`, `k` and
    `v` must vary over at least the mesh axes over which `tiles` varies.
    """
    if tiles.visits is not None:
        out, kept = flash.forward(q_SNH[None], k_SKH[None], v_SKH[None], tiles.visits)
        real_S = tiles.segments.reshape(-1)[: len(q_SNH)] != 0
        out = jnp.where(real_S[:, None, None], out, 0)  # `hopper` lets padding within a segment see the segment's keys
        return out[0], (q_SNH, k_SKH, v_SKH, out[0], kept[4], tiles)
    S, N, _ = q_SNH.shape
    q, k, v = (_cut(x, k_SKH.shape[1], tiles.size) for x in (q_SNH, k_SKH, v_SKH))
    zero = varying_zero(q, k, v, tiles.count)
    sums = jnp.zeros(q.shape, jnp.float32) + zero
    total = jnp.zeros(q.shape[:3], jnp.float32) + zero

    def add(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        sums, total, peak = carry
        query, key = tiles.pairs[step]
        scores = _scores(q[query], k[key], tiles, query, key)
        old = peak[query]
        new = jnp.maximum(old, scores.max(axis=-1))
        weights = jnp.exp(scores - new[..., None])
        fade = jnp.exp(old - new)
        values = _dot("KMC,KCH->KMH", weights.astype(v.dtype), v[key])
        sums = _put(sums, query, sums[query] * fade[..., None] + values)
        total = _put(total, query, total[query] * fade + weights.sum(axis=-1))
        return sums, total, _put(peak, query, new)

    sums, total, peak = jax.lax.fori_loop(0, tiles.count, add, (sums, total, total + FLOOR))
    reached = total > 0
    total = jnp.where(reached, total, 1.0)
    out = _join((sums / total[..., None]).astype(v.dtype), N, tiles.size)[:S]
    return out, (q_SNH, k_SKH, v_SKH, out, jnp.where(reached, peak + jnp.log(total), 0.0), tiles)


def backward(kept: tuple, dout_SNH: Float[Array, "S N H"]) -> tuple[Array, Array, Array, None]:
    """Returns the gradients of q, k and v, summed in float32, in the dtypes of q, k and v."""
    q_SNH, k_SKH, v_SKH, out_SNH, lse, tiles = kept
    if tiles.visits is not None:
        arrays = (x[None] for x in (q_SNH, k_SKH, v_SKH, out_SNH))
        dq, dk, dv, _ = flash.backward((*arrays, lse, tiles.visits), dout_SNH[None])
        return dq[0], dk[0], dv[0], None
    S, N, H = q_SNH.shape
    K = k_SKH.shape[1]
    q, k, v, out, dout = (_cut(x, K, tiles.size) for x in (q_SNH, k_SKH, v_SKH, out_SNH, dout_SNH))
    slope = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    zero = varying_zero(q, k, v, dout, tiles.count)

    def add(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, dk, dv = carry
        query, key = tiles.pairs[step]
        weights = jnp.exp(_scores(q[query], k[key], tiles, query, key) - lse[query][..., None])
        dweights = _dot("KMH,KCH->KMC", dout[query], v[key])
        dscores = (weights * (dweights - slope[query][..., None]) * H**-0.5).astype(q.dtype)
        dq = _put(dq, query, dq[query] + _dot("KMC,KCH->KMH", dscores, k[key]))
        dk = _put(dk, key, dk[key] + _dot("KMC,KMH->KCH", dscores, q[query]))
        dv = _put(dv, key, dv[key] + _dot("KMC,KMH->KCH", weights.astype(v.dtype), dout[query]))
        return dq, dk, dv

    start = tuple(jnp.zeros(x.shape, jnp.float32) + zero for x in (q, k, v))
    sums = jax.lax.fori_loop(0, tiles.count, add, start)
    like = ((q, N), (k, K), (v, K))
    dq, dk, dv = (_join(x.astype(y.dtype), heads, tiles.size)[:S] for x, (y, heads) in zip(sums, like, strict=True))
    return dq, dk, dv, None


tile_attention = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
tile_attention.defvjp(forward, backward)


def _scores(q: Array, k: Array, tiles: Tiles, query: Array, key: Array) -> Array:
    """Returns the float32 scores of one tile, `[K, R * tile, tile]`, MASKED where the query does not reach the key."""
    tile, K = tiles.size, q.shape[0]
    segment, key_segment = tiles.segments[query][:, None], tiles.segments[key][None, :]
    branch, key_branch = tiles.branches[query][:, None], tiles.branches[key][None, :]
    lane = jnp.arange(tile)
    allowed = (segment == key_segment) & (segment != 0) & ((key_branch == 0) | (key_branch == branch))
    allowed &= (query - key) * tile + lane[:, None] >= lane[None, :]
    scores = _dot("KMH,KCH->KMC", q, k).reshape(K, -1, tile, tile) * q.shape[-1] ** -0.5
    return jnp.where(allowed[None, None], scores, MASKED).reshape(K, -1, tile)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _put(whole: Array, index: Array, part: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(whole, part, index, 0)


def _cut(x: Array, K: int, tile: int) -> Array:
    """`[S, N, H]` -> `[tiles, K, R * tile, H]`, filled up with zeros."""
    S, N, H = x.shape
    x = jnp.pad(x, ((0, -S % tile), (0, 0), (0, 0)))
    return x.reshape(-1, tile, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(-1, K, N // K * tile, H)


def _join(x: Array, N: int, tile: int) -> Array:
    tiles, K, _, H = x.shape
    return x.reshape(tiles, K, N // K, tile, H).transpose(0, 3, 1, 2, 4).reshape(tiles * tile, N, H)
