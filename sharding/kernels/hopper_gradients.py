"""The gradients of `hopper`'s attention: two kernels, of queries and of keys and values, without atomics.

Sums have a fixed order, so that the same inputs give the same bits. The rings of shared memory, the bounds and the
warpgroups are those of the forward kernel. In the kernel of queries a warpgroup computes 64 queries against tiles of 64
keys; it issues the product for the gradients of a tile together with the scores of the next one. In the kernel of keys
it computes 64 keys against tiles of 64 queries, for all query heads that read its KV head one after another.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import hopper
from .hopper import COLUMNS, HALF, LINES, LOG2E, MASKED, SWIZZLED, TILE, Bounds, Lists, load

EXCLUDED = 1e30  # the log of a sum: of a query whose weights are all 0


def backward(
    kept: tuple[jax.Array, ...], dout: jax.Array, segments: jax.Array, lists: tuple[Lists, Lists], bounds: Bounds
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v, in their dtypes. `kept` are q, k, v, the outputs and the second result of
    `hopper.forward`. `segments` are `[B, filled]`: padding has no part in any gradient. `lists` are those of the
    kernels of queries and keys."""
    q, k, v, out, lse = kept
    slope = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    rest = segments.shape[1] - lse.shape[2]
    lse2, slope = (jnp.pad(x, ((0, 0), (0, 0), (0, rest))) for x in (lse * LOG2E, slope))
    lse2 = jnp.where(segments[:, None] != 0, lse2, EXCLUDED)
    arrays = (q, k, v, dout, lse2, slope, *bounds)
    (dq,) = _call("query_gradients", arrays, lists[0], (q,))
    dk, dv = _call("key_gradients", arrays, lists[1], (k, v))
    return dq, dk, dv


def _call(kernel: str, arrays: tuple[jax.Array, ...], lists: Lists, like: tuple[jax.Array, ...]) -> Any:
    """Runs a kernel over all tiles of queries (or of keys), all heads and rows."""
    (B, _, N, H), K, dtype = arrays[0].shape, arrays[1].shape[2], arrays[0].dtype
    of_queries = kernel == "query_gradients"
    stages = hopper.TILINGS[1 if of_queries else 2].stages
    still = plgpu.SMEM((2, HALF, H), dtype, transforms=SWIZZLED)  # a warpgroup's queries or keys
    ring = plgpu.SMEM((stages, HALF, H), dtype, transforms=SWIZZLED)
    numbers = [plgpu.SMEM((2, HALF), kind) for kind in (jnp.float32, jnp.int32)]
    moving = [plgpu.SMEM((stages, HALF), kind) for kind in (jnp.float32, jnp.int32)]
    return plgpu.kernel(
        functools.partial(
            _query_gradients if of_queries else _key_gradients, readers=N // K, scale=H**-0.5, stages=stages
        ),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        scratch_types={
            "still": (still, still),
            "still_numbers": (numbers[0 if of_queries else 1],) * 2,
            "ring": (ring, ring),
            "ring_numbers": (moving[1 if of_queries else 0],) * 2,
            "there": plgpu.Barrier(num_arrivals=4, num_barriers=2),
            "arrived": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        grid=(N if of_queries else K, lists[0].shape[1], B),
        grid_names=("head", "tile", "row"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=f"hopper_{kernel}",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays, *lists)


def _query_gradients(
    q_ref: Any, k_ref: Any, v_ref: Any, dout_ref: Any, lse_ref: Any, slope_ref: Any, first_ref: Any, last_ref: Any,
    tiles_ref: Any, counts_ref: Any, dq_ref: Any, *,
    still: Any, still_numbers: Any, ring: Any, ring_numbers: Any, there: Any, arrived: Any, consumed: Any,
    readers: int, scale: float, stages: int,
) -> None:  # fmt: skip
    """A program computes 128 queries of a head."""
    head, row, group = lax.axis_index("head"), lax.axis_index("row"), lax.axis_index("warpgroup")
    tile = counts_ref.shape[1] - 1 - lax.axis_index("tile")
    masked, visited = counts_ref[row, tile, 0], jnp.maximum(counts_ref[row, tile, 1], 1)
    H = q_ref.shape[-1]

    slot = functools.partial(hopper.slot, stages)

    @pl.when(group < 2)
    def _compute() -> None:
        plgpu.set_max_registers(hopper.COMPUTE, action="increase")
        start = tile * TILE + group * HALF
        queries, douts = still[0].at[group], still[1].at[group]
        mine = (row, pl.ds(start, HALF), head)
        line = (row, head, pl.ds(start, HALF))
        plgpu.copy_gmem_to_smem(q_ref.at[mine], queries, there.at[group])
        plgpu.copy_gmem_to_smem(dout_ref.at[mine], douts, there.at[group])
        plgpu.copy_gmem_to_smem(lse_ref.at[line], still_numbers[0].at[group], there.at[group])
        plgpu.copy_gmem_to_smem(slope_ref.at[line], still_numbers[1].at[group], there.at[group])
        plgpu.barrier_wait(there.at[group])
        lse, slope = (load(x.at[group], LINES) for x in still_numbers)

        def await_tile(visit: Any) -> None:
            @pl.when(visit < visited)
            def _() -> None:
                plgpu.barrier_wait(arrived.at[slot(visit)])

        def products(visit: Any, sums_ref: Any, before: Any, mask: bool, scores_ref: Any, dweights_ref: Any) -> Any:
            """The gradients of a tile's scores. The product of the gradients `before` runs meanwhile."""
            here, running = slot(visit), 0 if before is None else 1
            plgpu.wgmma(scores_ref, queries, ring[0].at[here].transpose((1, 0)))
            plgpu.wgmma(dweights_ref, douts, ring[1].at[here].transpose((1, 0)))
            if before is not None:
                plgpu.wgmma(sums_ref, before, ring[0].at[slot(visit - 1)])
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1 + running)
            if mask:
                first, last = (load(x.at[here], COLUMNS) for x in ring_numbers)
                query = start + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
                reached = query >= lax.broadcast_in_dim(first, scores.shape, [1])
                reached &= query < lax.broadcast_in_dim(last, scores.shape, [1])
                scores = jnp.where(reached, scores, MASKED)
            weights = jnp.exp2(scores * (scale * LOG2E) - lax.broadcast_in_dim(lse, scores.shape, [0]))
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=running)
            found = weights * (dweights - lax.broadcast_in_dim(slope, scores.shape, [0]))
            await_tile(visit + 1)  # ptxas moves no arithmetic across this branch, to behind the product's end
            return found

        def gradients(visit: Any, before: Any, sums_ref: Any, mask: bool) -> Any:
            step = functools.partial(products, visit, sums_ref, before, mask)
            accumulator = plgpu.WGMMAAccumulatorRef((HALF, HALF), jnp.float32)
            found = pl.run_scoped(step, accumulator, accumulator)
            plgpu.wgmma_wait(0)
            if before is not None:
                plgpu.barrier_arrive(consumed.at[slot(visit - 1)])
            # Rounded here: a product that runs still reads the registers of the gradients before.
            return lax.optimization_barrier(found).astype(q_ref.dtype)

        def sums(sums_ref: Any) -> Any:
            await_tile(jnp.int32(0))
            before = gradients(jnp.int32(0), None, sums_ref, True)
            step = functools.partial(gradients, sums_ref=sums_ref)
            before = lax.fori_loop(1, masked, functools.partial(step, mask=True), before)
            before = lax.fori_loop(jnp.maximum(masked, 1), visited, functools.partial(step, mask=False), before)
            plgpu.wgmma(sums_ref, before, ring[0].at[slot(visited - 1)])
            return sums_ref[...]

        dq = pl.run_scoped(sums, plgpu.WGMMAAccumulatorRef((HALF, H), jnp.float32))
        plgpu.barrier_arrive(consumed.at[slot(visited - 1)])
        queries[...] = (dq * scale).astype(dq_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, dq_ref.at[mine])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == 2)
    def _copy() -> None:
        plgpu.set_max_registers(hopper.COPY, action="decrease")
        kv_head = lax.div(head, jnp.int32(readers))

        @pl.loop(0, visited)
        def _visit(visit: Any) -> None:
            here = slot(visit)
            keys = pl.ds(tiles_ref[row, tile, visit] * HALF, HALF)
            hopper.await_slot(consumed, visit, here, stages)
            plgpu.copy_gmem_to_smem(k_ref.at[row, keys, kv_head], ring[0].at[here], arrived.at[here])
            plgpu.copy_gmem_to_smem(v_ref.at[row, keys, kv_head], ring[1].at[here], arrived.at[here])
            plgpu.copy_gmem_to_smem(first_ref.at[row, keys], ring_numbers[0].at[here], arrived.at[here])
            plgpu.copy_gmem_to_smem(last_ref.at[row, keys], ring_numbers[1].at[here], arrived.at[here])

        hopper.drain(consumed, visited, stages)


def _key_gradients(
    q_ref: Any, k_ref: Any, v_ref: Any, dout_ref: Any, lse_ref: Any, slope_ref: Any, first_ref: Any, last_ref: Any,
    tiles_ref: Any, counts_ref: Any, dk_ref: Any, dv_ref: Any, *,
    still: Any, still_numbers: Any, ring: Any, ring_numbers: Any, there: Any, arrived: Any, consumed: Any,
    readers: int, scale: float, stages: int,
) -> None:  # fmt: skip
    """A program computes 128 keys of a KV head. Scores are keys x queries."""
    kv_head, row, group = lax.axis_index("head"), lax.axis_index("row"), lax.axis_index("warpgroup")
    tile = lax.axis_index("tile")
    # Under `shard_map`, numbers of arguments vary over mesh axes, and sums do not. A loop's first index must not vary.
    masked, visited = (counts_ref[row, tile, which] + 0 for which in (0, 1))
    H = q_ref.shape[-1]

    slot = functools.partial(hopper.slot, stages)

    @pl.when(group < 2)
    def _compute() -> None:
        plgpu.set_max_registers(hopper.COMPUTE, action="increase")
        start = tile * TILE + group * HALF
        keys, values = still[0].at[group], still[1].at[group]
        mine, line = (row, pl.ds(start, HALF), kv_head), (row, pl.ds(start, HALF))
        plgpu.copy_gmem_to_smem(k_ref.at[mine], keys, there.at[group])
        plgpu.copy_gmem_to_smem(v_ref.at[mine], values, there.at[group])
        plgpu.copy_gmem_to_smem(first_ref.at[line], still_numbers[0].at[group], there.at[group])
        plgpu.copy_gmem_to_smem(last_ref.at[line], still_numbers[1].at[group], there.at[group])
        plgpu.barrier_wait(there.at[group])
        first, last = (load(x.at[group], LINES) for x in still_numbers)

        def products(here: Any, visit: Any, dv_ref: Any, mask: bool, scores_ref: Any, dweights_ref: Any) -> Any:
            """The gradients of a tile's scores; issues the product for those of values."""
            plgpu.wgmma(scores_ref, keys, ring[0].at[here].transpose((1, 0)))
            plgpu.wgmma(dweights_ref, values, ring[1].at[here].transpose((1, 0)))
            lse = load(ring_numbers[0].at[here], COLUMNS)
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            if mask:
                query = tiles_ref[row, tile, visit] * HALF
                query += plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
                reached = query >= lax.broadcast_in_dim(first, scores.shape, [0])
                reached &= query < lax.broadcast_in_dim(last, scores.shape, [0])
                scores = jnp.where(reached, scores, MASKED)
            weights = jnp.exp2(scores * (scale * LOG2E) - lax.broadcast_in_dim(lse, scores.shape, [1]))
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=0)
            plgpu.wgmma(dv_ref, weights.astype(v_ref.dtype), ring[1].at[here])
            slope = load(ring_numbers[1].at[here], COLUMNS)
            return weights * (dweights - lax.broadcast_in_dim(slope, scores.shape, [1]))

        def add(visit: Any, carry: None, reader: Any, dk_ref: Any, dv_ref: Any, mask: bool) -> None:
            del carry
            turn = reader * visited + visit
            here = slot(turn)
            plgpu.barrier_wait(arrived.at[here])
            accumulator = plgpu.WGMMAAccumulatorRef((HALF, HALF), jnp.float32)
            found = pl.run_scoped(functools.partial(products, here, visit, dv_ref, mask), accumulator, accumulator)
            plgpu.wgmma(dk_ref, found.astype(q_ref.dtype), ring[0].at[here])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(consumed.at[here])

        def sums(dk_ref: Any, dv_ref: Any) -> Any:
            @pl.loop(0, readers)
            def _reader(reader: Any) -> None:
                step = functools.partial(add, reader=reader, dk_ref=dk_ref, dv_ref=dv_ref)
                lax.fori_loop(0, masked, functools.partial(step, mask=True), None)
                lax.fori_loop(masked, visited, functools.partial(step, mask=False), None)

            return dk_ref[...], dv_ref[...]

        accumulator = plgpu.WGMMAAccumulatorRef((HALF, H), jnp.float32)
        dk, dv = pl.run_scoped(sums, accumulator, accumulator)
        keys[...], values[...] = (dk * scale).astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(keys, dk_ref.at[mine])
        plgpu.copy_smem_to_gmem(values, dv_ref.at[mine])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == 2)
    def _copy() -> None:
        plgpu.set_max_registers(hopper.COPY, action="decrease")

        @pl.loop(0, readers * visited)
        def _turn(turn: Any) -> None:
            here, head = slot(turn), kv_head * readers + lax.div(turn, visited)
            queries = pl.ds(tiles_ref[row, tile, lax.rem(turn, visited)] * HALF, HALF)
            hopper.await_slot(consumed, turn, here, stages)
            plgpu.copy_gmem_to_smem(q_ref.at[row, queries, head], ring[0].at[here], arrived.at[here])
            plgpu.copy_gmem_to_smem(dout_ref.at[row, queries, head], ring[1].at[here], arrived.at[here])
            plgpu.copy_gmem_to_smem(lse_ref.at[row, head, queries], ring_numbers[0].at[here], arrived.at[here])
            plgpu.copy_gmem_to_smem(slope_ref.at[row, head, queries], ring_numbers[1].at[here], arrived.at[here])

        hopper.drain(consumed, readers * visited, stages)
