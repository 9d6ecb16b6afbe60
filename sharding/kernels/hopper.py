"""Attention over packed rows for Hopper (H100, H200) in Pallas-Mosaic-GPU; `flash` chooses it.

The mask is an interval of queries for each key (`bounds_of`): a key of a prompt is seen up to the end of its segment,
branches included, and a key of a branch up to the end of the branch. Programs visit the tiles that `flash` lists.

A program of the forward kernel computes 128 queries of a head. Two warpgroups compute 64 queries each; a third one
copies tiles of keys and values into a ring of shared memory (TMA). A warpgroup issues the scores of a tile before the
product with the values of the previous tile, and computes the softmax while that product runs (FlashAttention-3,
arXiv:2407.08608, 3.2). Products accumulate in float32; the running softmax is to base 2.

`jax.experimental.pallas.mosaic_gpu` is documented as unstable; this file and `hopper_gradients` use its public names.
"""

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mesh import Tiling

TILE = 128  # the most queries or keys of a tile; two warpgroups share them
HALF = 64  # the queries or keys of a warpgroup
# Queries and keys of a tile, and the tiles that a ring of shared memory has, for each kernel of `flash.KERNELS`.
TILINGS = (Tiling((TILE, TILE), 12, 2), Tiling((TILE, HALF), 12, 4), Tiling((HALF, TILE), 12, 3))
MASKED = -1e30  # the score of a key that the query does not reach
FLOOR = -1e20  # the least running maximum: a query that reaches no key gets weights of 0
COMPUTE, COPY = 240, 24  # registers of a thread that computes, and of a thread that copies
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # how wgmma reads numbers of 16 bits
LINES, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # layouts: a number for each line or column
LOG2E = math.log2(math.e)
Lists = tuple[Any, Any]  # a result of `flash.tile_lists`
Bounds = tuple[jax.Array, jax.Array]  # i32 [B, filled] each; see `bounds_of`


def bounds_of(segments: jax.Array, branches: jax.Array, causal: bool) -> Bounds:
    """Returns the first query that sees each key, and the query after the last one; equal queries for padding.

    `segments` and `branches` are `[B, filled]`. Tokens of a segment, and those of its branches, are contiguous but for
    padding: padding within a segment lies in the intervals of the segment's keys, padding behind it does not.
    """
    filled = segments.shape[1]
    index = jnp.broadcast_to(jnp.arange(filled, dtype=jnp.int32), segments.shape)
    real = lax.cummax(jnp.where(segments != 0, index, -1), axis=1)  # the latest token that is no padding
    latest = jnp.maximum(real, 0)

    def run(new: jax.Array) -> jax.Array:
        """The index after the last real token of each token's run. `new` marks the first tokens of runs."""
        starts = jnp.where(jnp.roll(new, -1, axis=1).at[:, -1].set(True), index, filled)
        end = lax.cummin(starts, axis=1, reverse=True)
        return jnp.take_along_axis(real, end, axis=1) + 1

    segment, branch = (jnp.take_along_axis(x, latest, axis=1) for x in (segments, branches))
    new_segment = segment != jnp.roll(segment, 1, axis=1)
    new_branch = new_segment | (branch != jnp.roll(branch, 1, axis=1))
    last = jnp.where(branches == 0, run(new_segment), run(new_branch))
    first = index if causal else lax.cummax(jnp.where(new_segment.at[:, 0].set(True), index, 0), axis=1)
    return first, jnp.where(segments != 0, last, first)


def forward(q: jax.Array, k: jax.Array, v: jax.Array, lists: Lists, bounds: Bounds) -> tuple[jax.Array, jax.Array]:
    """Grouped-query attention: q `[B, T, N, H]`, k and v `[B, T, K, H]` of 16-bit numbers, H 64 or 128.

    Returns the outputs, and the log of the sum of exponentiated scores `[B, N, T]` float32, 0 where a query reaches no
    key. `lists` are those of the forward kernel.
    """
    B, T, N, H = q.shape
    (tiles, counts), filled, stages = lists, bounds[0].shape[1], TILINGS[0].stages
    ring = plgpu.SMEM((stages, TILE, H), k.dtype, transforms=SWIZZLED)
    numbers = plgpu.SMEM((stages, TILE), jnp.int32)
    consumed = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    kernel = plgpu.kernel(
        functools.partial(_forward, readers=N // k.shape[2], scale2=H**-0.5 * LOG2E, stages=stages),
        out_type=(jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct((B, N, filled), jnp.float32)),
        scratch_types={
            "q_smem": plgpu.SMEM((2, HALF, H), q.dtype, transforms=SWIZZLED),
            "lse_smem": plgpu.SMEM((2, HALF), jnp.float32),
            "k_smem": ring,
            "v_smem": ring,
            "first_smem": numbers,
            "last_smem": numbers,
            "q_there": plgpu.Barrier(num_barriers=2),
            "k_there": plgpu.Barrier(num_arrivals=3, num_barriers=stages),  # keys and two arrays of bounds
            "v_there": plgpu.Barrier(num_barriers=stages),
            "k_consumed": consumed,
            "v_consumed": consumed,
        },
        grid=(N, filled // TILE, B),
        grid_names=("head", "tile", "row"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="hopper_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out, lse = kernel(q, k, v, *bounds, tiles, counts)
    return out, lse[..., :T]


def _forward(
    q_ref: Any, k_ref: Any, v_ref: Any, first_ref: Any, last_ref: Any, tiles_ref: Any, counts_ref: Any,
    out_ref: Any, lse_ref: Any, *,
    q_smem: Any, lse_smem: Any, k_smem: Any, v_smem: Any, first_smem: Any, last_smem: Any,
    q_there: Any, k_there: Any, v_there: Any, k_consumed: Any, v_consumed: Any,
    readers: int, scale2: float, stages: int,
) -> None:  # fmt: skip
    """A program: see the module. The last tiles, which have most work under a causal mask, start first."""
    head, row, group = lax.axis_index("head"), lax.axis_index("row"), lax.axis_index("warpgroup")
    tile = counts_ref.shape[1] - 1 - lax.axis_index("tile")
    masked = counts_ref[row, tile, 0]
    visited = jnp.maximum(counts_ref[row, tile, 1], 1)  # a tile of padding visits one tile, whose mask excludes all
    H = q_ref.shape[-1]

    slot_of = functools.partial(slot, stages)

    @pl.when(group < 2)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE, action="increase")
        start = tile * TILE + group * HALF
        queries = q_smem.at[group]
        mine = (row, pl.ds(start, HALF), head)
        plgpu.copy_gmem_to_smem(q_ref.at[mine], queries, q_there.at[group])
        plgpu.barrier_wait(q_there.at[group])

        def softmax(scores: Any, peak: Any, total: Any, visit: Any, mask: bool) -> tuple[Any, ...]:
            """The weights of a tile, how much earlier sums fade, and the new maximum and sum."""
            if mask:
                first, last = (load(x.at[slot_of(visit)], COLUMNS) for x in (first_smem, last_smem))
                query = start + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
                reached = query >= lax.broadcast_in_dim(first, scores.shape, [1])
                reached &= query < lax.broadcast_in_dim(last, scores.shape, [1])
                scores = jnp.where(reached, scores, MASKED)
            plgpu.barrier_arrive(k_consumed.at[slot_of(visit)])
            new = jnp.maximum(peak, scores.max(axis=1) * scale2)
            fade = jnp.exp2(peak - new)
            weights = jnp.exp2(scores * scale2 - lax.broadcast_in_dim(new, scores.shape, [0]))
            return weights, fade, new, total * fade + weights.sum(axis=1)

        def await_keys(visit: Any) -> None:
            @pl.when(visit < visited)
            def _() -> None:
                plgpu.barrier_wait(k_there.at[slot_of(visit)])

        def scores_of(scores_ref: Any, visit: Any) -> None:
            plgpu.wgmma(scores_ref, queries, k_smem.at[slot_of(visit)].transpose((1, 0)))

        accumulator = plgpu.WGMMAAccumulatorRef((HALF, k_smem.shape[1]), jnp.float32)

        def begin(scores_ref: Any) -> tuple[Any, ...]:
            await_keys(jnp.int32(0))
            scores_of(scores_ref, jnp.int32(0))
            peak, total = (plgpu.layout_cast(jnp.full((HALF,), value, jnp.float32), LINES) for value in (FLOOR, 0.0))
            weights, _, peak, total = softmax(scores_ref[...], peak, total, jnp.int32(0), True)
            await_keys(jnp.int32(1))
            return weights.astype(v_ref.dtype), peak, total

        def go_on(visit: Any, carry: tuple[Any, ...], sums_ref: Any, mask: bool) -> tuple[Any, ...]:
            weights, peak, total = carry

            def products(scores_ref: Any) -> tuple[Any, ...]:
                scores_of(scores_ref, visit)
                plgpu.barrier_wait(v_there.at[slot_of(visit - 1)])
                plgpu.wgmma(sums_ref, weights, v_smem.at[slot_of(visit - 1)])
                scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)  # the product with the values goes on
                found = softmax(scores, peak, total, visit, mask)
                await_keys(visit + 1)  # ptxas moves no arithmetic across this branch, to behind the product's end
                return found

            following, fade, new, total = pl.run_scoped(products, accumulator)
            sums = plgpu.wgmma_accumulator_load(sums_ref, wait_n=0)
            plgpu.barrier_arrive(v_consumed.at[slot_of(visit - 1)])
            # Weights are rounded here: a product that runs still reads the registers of the weights before.
            following, sums = lax.optimization_barrier((following, sums))
            sums_ref[...] = sums * lax.broadcast_in_dim(fade, sums.shape, [0])
            return following.astype(v_ref.dtype), new, total

        def attend(sums_ref: Any) -> tuple[Any, ...]:
            carry = pl.run_scoped(begin, accumulator)
            step = functools.partial(go_on, sums_ref=sums_ref)
            carry = lax.fori_loop(1, masked, functools.partial(step, mask=True), carry)
            carry = lax.fori_loop(jnp.maximum(masked, 1), visited, functools.partial(step, mask=False), carry)
            weights, peak, total = carry
            plgpu.barrier_wait(v_there.at[slot_of(visited - 1)])
            plgpu.wgmma(sums_ref, weights, v_smem.at[slot_of(visited - 1)])
            sums = sums_ref[...]
            plgpu.barrier_arrive(v_consumed.at[slot_of(visited - 1)])
            return sums, peak, total

        sums, peak, total = pl.run_scoped(attend, plgpu.WGMMAAccumulatorRef((HALF, H), jnp.float32))
        some = total > 0
        total = jnp.where(some, total, 1.0)
        queries[...] = (sums / lax.broadcast_in_dim(total, sums.shape, [0])).astype(out_ref.dtype)
        lse_smem.at[group][...] = jnp.where(some, peak * math.log(2) + jnp.log(total), 0.0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, out_ref.at[mine])
        plgpu.copy_smem_to_gmem(lse_smem.at[group], lse_ref.at[row, head, pl.ds(start, HALF)])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == 2)
    def _copy() -> None:
        plgpu.set_max_registers(COPY, action="decrease")
        kv_head = lax.div(head, jnp.int32(readers))

        @pl.loop(0, visited)
        def _visit(visit: Any) -> None:
            here = slot_of(visit)
            keys = pl.ds(tiles_ref[row, tile, visit] * k_smem.shape[1], k_smem.shape[1])

            await_slot(k_consumed, visit, here, stages)
            plgpu.copy_gmem_to_smem(k_ref.at[row, keys, kv_head], k_smem.at[here], k_there.at[here])
            plgpu.copy_gmem_to_smem(first_ref.at[row, keys], first_smem.at[here], k_there.at[here])
            plgpu.copy_gmem_to_smem(last_ref.at[row, keys], last_smem.at[here], k_there.at[here])

            await_slot(v_consumed, visit, here, stages)
            plgpu.copy_gmem_to_smem(v_ref.at[row, keys, kv_head], v_smem.at[here], v_there.at[here])

        drain(k_consumed, visited, stages)
        drain(v_consumed, visited, stages)


def slot(stages: int, turn: Any) -> jax.Array:
    """The slot of a ring that a turn uses."""
    return lax.rem(turn, jnp.int32(stages))


def load(ref: Any, layout: Any) -> jax.Array:
    """Loads all of a reference in a layout."""
    index = inspect.signature(plgpu.load).parameters.get("idx")  # none since JAX 0.12
    return plgpu.load(ref, *([()] if index else []), layout=layout)


def await_slot(consumed: Any, turn: Any, slot: Any, stages: int) -> None:
    """Waits until a slot of the ring may be written again."""

    @pl.when(turn >= stages)
    def _() -> None:
        plgpu.barrier_wait(consumed.at[slot])


def drain(consumed: Any, visited: Any, stages: int) -> None:
    """Waits for the last reading of every slot of the ring."""
    for slot in range(stages):

        @pl.when(slot < visited)
        def _(slot: int = slot) -> None:
            plgpu.barrier_wait(consumed.at[slot])
