"""Attention over packed rows on NVIDIA GPUs, by the Triton kernels of `flash_kernels` or, on Hopper, those of `hopper`.

Scores are cut into tiles. Lists say which tiles of keys each tile of queries visits, and which tiles of queries each
tile of keys visits for its gradients. The device computes the lists once for all layers, from the least and largest
segment and branch of each tile. Memory is linear in the length.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..mesh import Tiling, launch, runs_triton, target, varied

# Says, at tracing, whether the kernels can compute attention over these arrays (see `runs_triton`).
chosen = functools.partial(runs_triton, multiple=8, most=128)

Like: TypeAlias = jax.ShapeDtypeStruct | None  # shape and dtype of the queries of every layer; None: unknown
KERNELS = ("forward", "query_gradients", "key_gradients")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """The tiles that the kernels visit under a `Mask`. `lists` and `tilings` have an entry for each of `KERNELS`."""

    segments: Any  # i32 [B, filled], with segment 0 at the ends to fill tiles
    branches: Any  # i32 [B, filled]
    lists: tuple[tuple[Any, Any], ...]  # results of `tile_lists`
    tilings: tuple[Tiling, ...] = dataclasses.field(metadata={"static": True})
    bounds: tuple[Any, Any] | None  # of `hopper.bounds_of`, if `hopper` computes
    causal: bool = dataclasses.field(metadata={"static": True})
    ahead: int = dataclasses.field(default=0, metadata={"static": True})  # keys of a row before the first query's key
    fill: int = dataclasses.field(default=0, metadata={"static": True})  # keys of padding at the start of a row


def visits_of(
    segments: Int[Array, "B S"],
    branches: Int[Array, "B S"] | None,
    causal: bool,
    queries: Array | jax.ShapeDtypeStruct,
    ahead: int = 0,
) -> Visits:
    """Returns the tiles to visit in rows whose first `ahead` keys have no query. `queries` give the dtype and the head
    size; `chosen(queries)` must be true. Call it outside the loop over layers, which may compute a layer again."""
    capability = target().capability
    hopper: Any = importlib.import_module(f"{__package__}.hopper") if for_hopper(queries) and not ahead else None
    settings = (tiling_of(kernel, queries.dtype, queries.shape[-1], capability) for kernel in KERNELS)
    tilings = hopper.TILINGS if hopper else tuple(settings)
    largest = max(size for tiling in tilings for size in tiling.sizes)
    fill = -ahead % largest  # so that the first query begins a tile
    ends = (fill, -(fill + segments.shape[1]) % largest)
    branches = jnp.zeros_like(segments) if branches is None else branches
    segments, branches = (jnp.pad(x, ((0, 0), ends)) for x in (segments, branches))
    lists = []
    for kernel, tiling in zip(KERNELS, tilings, strict=True):
        table = tile_table(segments, branches, tiling.sizes[0], tiling.sizes[1], causal)
        active, whole = (x[:, (ahead + fill) // tiling.sizes[0] :] for x in table)
        lists.append(tile_lists(active.mT, whole.mT) if kernel == "key_gradients" else tile_lists(active, whole))
    bounds = hopper.bounds_of(segments, branches, causal) if hopper else None
    return Visits(segments, branches, tuple(lists), tilings, bounds, causal, ahead + fill, fill)


def for_hopper(queries: Array | jax.ShapeDtypeStruct) -> bool:
    """Says whether `hopper`, which takes 0.57 to 0.81 of the Triton kernels' time, computes with such queries. It does
    not with CUDA 12: JAX's own attention kernel in Mosaic refuses causal masks with CUDA 12.8 and 12.9, whose ptxas
    compiles it wrongly."""
    if target().capability != 90 or queries.dtype != jnp.bfloat16 or queries.shape[-1] not in (64, 128):
        return False
    return not any(importlib.metadata.distributions(name="jax-cuda12-plugin"))


def tiling_of(kernel: str, dtype: Any, head: int, capability: int) -> Tiling:
    """Returns the sizes of a kernel's tiles of queries and keys, which are the largest that ptxas fits into registers.
    Tensor cores of Hopper and of data centres' Blackwell read from shared memory, which leaves more registers free.
    These GPUs have 227 KiB of shared memory, other GPUs at least 99 KiB.

    Only bfloat16 heads of 128 on Hopper were timed (`benchmarks/results/gpu_h100.json`). For these, `key_gradients` has
    larger tiles, which spill some registers, and is a fifth faster.
    """
    wide = head > 64
    if jnp.dtype(dtype).itemsize == 4:
        return Tiling((32, 16), 8, 2, "bf16x6") if kernel == "key_gradients" else Tiling((16, 32), 4, 2)
    if not 90 <= capability < 120:
        if kernel == "key_gradients":
            return Tiling((32, 64 if wide else 128), 8, 2)
        return Tiling((64 if wide else 128, 64), 8, 2)
    if kernel == "forward":
        return Tiling((128, 128), 8, 2) if wide and capability == 90 else Tiling((128, 64), 8 if wide else 4, 3)
    if kernel == "query_gradients":
        return Tiling((128, 64), 8, 2)
    if wide and capability == 90:
        return Tiling((64, 128), 8, 2)
    return Tiling((64, 64), 8, 2) if wide and capability >= 100 else Tiling((32, 128), 8, 2)


def forward(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], visits: Visits
) -> tuple[Float[Array, "B T N H"], tuple]:
    """Computes grouped-query attention under the mask of `visits`. A query that reaches no key returns zeros. Only rows
    with a query for every key (S = T) have gradients. Scores, softmax and sums are float32; products of float32 numbers
    are computed by three products of TF32 or six of bfloat16, which are about as exact. Returns the outputs, and the
    arrays that `backward` needs, as the log of the sum of exponentiated scores, `[B, N, T]` float32 (0: no key)."""
    B, T, N, _ = q.shape
    if visits.bounds is not None:
        from . import hopper

        out, lse = varied(hopper.forward(q, k, v, visits.lists[0], visits.bounds), (q, k, v, visits.segments))
        return out, (q, k, v, out, lse, visits)
    outs = (jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32))
    out, lse = _call("forward", (q, k, v), (), visits, outs)
    return out, (q, k, v, out, lse, visits)


def backward(kept: tuple, dout: Array) -> tuple[Array, Array, Array, None]:
    """Returns the gradients of q, k and v, summed in float32, in the dtypes of q, k and v."""
    q, k, v, out, lse, visits = kept
    if visits.bounds is not None:
        from . import hopper_gradients

        grads = hopper_gradients.backward(kept[:5], dout, visits.segments, visits.lists[1:], visits.bounds)
        dq, dk, dv = varied(grads, (*kept[:5], dout, visits.segments))
        return dq, dk, dv, None
    # This is a sum, and no matrix product, because XLA might multiply in TF32.
    slope = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    arrays, like = (q, k, v), [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    (dq,) = _call("query_gradients", arrays, (dout, lse, slope), visits, like[:1])
    dk, dv = _call("key_gradients", arrays, (dout, lse, slope), visits, like[1:])
    return dq, dk, dv, None


flash_attention = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
flash_attention.defvjp(forward, backward)


def _call(
    kernel: str, qkv: tuple[Array, Array, Array], more: tuple[Array, ...], visits: Visits, outs: Any
) -> list[Array]:
    (B, _, N, H), K = qkv[0].shape, qkv[1].shape[2]
    place = KERNELS.index(kernel)
    (tiles, counts), tiling = visits.lists[place], visits.tilings[place]
    queries, keys = tiling.sizes
    if visits.fill:
        before = ((0, 0), (visits.fill, 0), (0, 0), (0, 0))
        qkv = qkv[0], jnp.pad(qkv[1], before), jnp.pad(qkv[2], before)
    T = qkv[1].shape[1]
    return launch(
        "flash_kernels",
        kernel,
        (*qkv, *more, visits.segments, visits.branches, tiles, counts, T, visits.segments.shape[1], tiles.shape[2]),
        outs,
        (tiles.shape[1], K if kernel == "key_gradients" else N, B),
        tiling,
        N=N,
        K=K,
        H=H,
        WIDTH=max(1 << (H - 1).bit_length(), 16),
        QUERIES=queries,
        KEYS=keys,
        CAUSAL=visits.causal,
        SCALE=H**-0.5,
        **({"AHEAD": visits.ahead} if kernel == "forward" else {}),
    )


def tile_table(
    segments: Int[Array, "B S"], branches: Int[Array, "B S"], queries: int, keys: int, causal: bool
) -> tuple[Bool[Array, "B Q K"], Bool[Array, "B Q K"]]:
    """Returns the tiles in which any query may reach a key, and the tiles in which every query reaches every key. S is
    a multiple of the tiles' sizes. The first table also has needless tiles at borders of segments, where branches are
    not compared, and in rows whose segment numbers do not ascend."""
    most = jnp.iinfo(jnp.int32).max

    def ends(x: Array, size: int) -> tuple[Array, Array, Array]:
        """Returns (least value, largest value, whether no token is padding) of each tile. Padding has no value."""
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
    """Lists the indices of the active tiles of each line of the tables: the tiles that need the mask, then the `whole`
    tiles. Also returns, for each list, (number of tiles that need the mask, number of active tiles)."""
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
