"""The gradients of `hopper`'s attention: two kernels, of queries and of keys and values, without atomics.

Sums have a fixed order, so that the same inputs give the same bits. The rings of shared memory, the bounds and the
warpgroups are those of the forward kernel. In the kernel of queries a warpgroup computes 64 queries against tiles of 64
keys; it issues the product for the gradients of a tile together with the scores of the next one. In the kernel of keys
it computes 64 keys against tiles of 64 queries, for all query heads that read its KV head one after another.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import hopper
from .hopper import COLUMNS, HALF, LINES, LOG2E, MASKED, SWIZZLED, TILE, Bounds, Lists, load

EXCLUDED = 1e30  # the log of a sum: of a query whose weights are all 0
SCORES = plgpu.WGMMAAccumulatorRef((HALF, HALF), jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Warpgroup:
    """A warpgroup that computes. It holds 64 queries in shared memory while keys come through a ring, or the reverse.
    Arrays of queries are (q, dout, lse, slope), those of keys (k, v, first, last)."""

    start: Any  # index in the row of the first query or key in `mine`
    mine: list[Any]  # two matrices [64, H] and two arrays of numbers [64]
    ring: list[Any]  # the same with a leading dimension of slots
    first_of: Callable[[Any], Any]  # index of the first query or key of a visited tile
    masked: Any  # number of tiles that need the mask; they come first
    visited: Any
    readers: int  # query heads of a KV head
    scale: float
    slot: Callable[[Any], Any]
    arrived: Any
    consumed: Any


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
    queries, keys, readers = (q, dout, lse2, slope), (k, v, *bounds), q.shape[2] // k.shape[2]
    (dq,) = _call(_query_gradients, queries, keys, lists[0], readers, 1)
    dk, dv = _call(_key_gradients, keys, queries, lists[1], readers, 2)
    return dq, dk, dv


def _call(
    body: Callable[[_Warpgroup], Any], still: tuple[jax.Array, ...], moving: tuple[jax.Array, ...], lists: Lists,
    readers: int, results: int,
) -> Any:  # fmt: skip
    """Runs a kernel over all tiles of `still`; those of `moving` go through the ring. Results are like `still`."""
    B, _, heads, H = still[0].shape
    stages = hopper.TILINGS[results].stages

    def smem(leading: int, array: jax.Array) -> Any:
        if array.ndim == 4:
            return plgpu.SMEM((leading, HALF, H), array.dtype, transforms=SWIZZLED)
        return plgpu.SMEM((leading, HALF), array.dtype)

    return plgpu.kernel(
        functools.partial(_kernel, body=body, readers=readers, scale=H**-0.5, stages=stages),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in still[:results]],
        scratch_types={
            "still": [smem(2, x) for x in still],
            "ring": [smem(stages, x) for x in moving],
            "there": plgpu.Barrier(num_arrivals=4, num_barriers=2),
            "arrived": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        grid=(heads, lists[0].shape[1], B),
        grid_names=("head", "tile", "row"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=f"hopper{body.__name__}",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*still, *moving, *lists)


def _kernel(
    *refs: Any, body: Callable[[_Warpgroup], Any], readers: int, scale: float, stages: int,
    still: list[Any], ring: list[Any], there: Any, arrived: Any, consumed: Any,
) -> None:  # fmt: skip
    """A program computes 128 queries of a head, or 128 keys of a KV head for all query heads that read it."""
    still_refs, moving_refs, (tiles_ref, counts_ref, *results) = refs[:4], refs[4:8], refs[8:]
    head, row, group = lax.axis_index("head"), lax.axis_index("row"), lax.axis_index("warpgroup")
    tile, of_queries = lax.axis_index("tile"), body is _query_gradients
    if of_queries:
        tile = counts_ref.shape[1] - 1 - tile  # the last tiles have most work
    # Under `shard_map`, numbers of arguments vary over mesh axes, and sums do not. A loop's first index must not vary.
    masked, visited = (counts_ref[row, tile, which] + 0 for which in (0, 1))
    if of_queries:
        visited = jnp.maximum(visited, 1)  # a tile of padding visits one tile, whose mask excludes all
    slot = functools.partial(hopper.slot, stages)

    def first_of(visit: Any) -> Any:
        return tiles_ref[row, tile, visit] * HALF

    @pl.when(group < 2)
    def _compute() -> None:
        plgpu.set_max_registers(hopper.COMPUTE, action="increase")
        start = tile * TILE + group * HALF
        mine = [x.at[group] for x in still]
        _copy(still_refs, row, head, start, mine, there.at[group])
        plgpu.barrier_wait(there.at[group])
        sums = body(_Warpgroup(start, mine, ring, first_of, masked, visited, readers, scale, slot, arrived, consumed))
        for number, x in enumerate(sums):
            mine[number][...] = x.astype(results[number].dtype)
        plgpu.commit_smem()
        for smem, result in zip(mine, results, strict=False):
            plgpu.copy_smem_to_gmem(smem, result.at[row, pl.ds(start, HALF), head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == 2)
    def _load() -> None:
        plgpu.set_max_registers(hopper.COPY, action="decrease")
        turns = visited if of_queries else readers * visited

        @pl.loop(0, turns)
        def _turn(turn: Any) -> None:
            here = slot(turn)
            if of_queries:
                visit, its_head = turn, lax.div(head, jnp.int32(readers))
            else:
                visit, its_head = lax.rem(turn, visited), head * readers + lax.div(turn, visited)
            hopper.await_slot(consumed, turn, here, stages)
            _copy(moving_refs, row, its_head, first_of(visit), [x.at[here] for x in ring], arrived.at[here])

        hopper.drain(consumed, turns, stages)


def _copy(refs: Any, row: Any, head: Any, start: Any, to: list[Any], barrier: Any) -> None:
    """Copies 64 queries or keys of `[B, T, heads, H]`, of numbers of heads `[B, heads, T]`, or of bounds `[B, T]`."""
    rows = pl.ds(start, HALF)
    for ref, smem in zip(refs, to, strict=True):
        place = {4: (row, rows, head), 3: (row, head, rows), 2: (row, rows)}[ref.ndim]
        plgpu.copy_gmem_to_smem(ref.at[place], smem, barrier)


def _query_gradients(group: _Warpgroup) -> tuple[jax.Array]:
    """Returns dq. Scores are queries x keys."""
    (queries, douts, *_), (keys, values, firsts, lasts), slot = group.mine, group.ring, group.slot
    lse, slope = (load(x, LINES) for x in group.mine[2:])

    def await_tile(visit: Any) -> None:
        @pl.when(visit < group.visited)
        def _() -> None:
            plgpu.barrier_wait(group.arrived.at[slot(visit)])

    def products(visit: Any, sums_ref: Any, before: Any, mask: bool, scores_ref: Any, dweights_ref: Any) -> Any:
        """The gradients of a tile's scores. The product of the gradients `before` runs meanwhile."""
        here, running = slot(visit), 0 if before is None else 1
        plgpu.wgmma(scores_ref, queries, keys.at[here].transpose((1, 0)))
        plgpu.wgmma(dweights_ref, douts, values.at[here].transpose((1, 0)))
        if before is not None:
            plgpu.wgmma(sums_ref, before, keys.at[slot(visit - 1)])
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1 + running)
        if mask:
            first, last = (load(x.at[here], COLUMNS) for x in (firsts, lasts))
            scores = _masked(scores, group.start, 0, first, last)
        weights = jnp.exp2(scores * (group.scale * LOG2E) - lax.broadcast_in_dim(lse, scores.shape, [0]))
        dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=running)
        found = weights * (dweights - lax.broadcast_in_dim(slope, scores.shape, [0]))
        await_tile(visit + 1)  # ptxas moves no arithmetic across this branch, to behind the product's end
        return found

    def gradients(visit: Any, before: Any, sums_ref: Any, mask: bool) -> Any:
        found = pl.run_scoped(functools.partial(products, visit, sums_ref, before, mask), SCORES, SCORES)
        plgpu.wgmma_wait(0)
        if before is not None:
            plgpu.barrier_arrive(group.consumed.at[slot(visit - 1)])
        # Rounded here: a product that runs still reads the registers of the gradients before.
        return lax.optimization_barrier(found).astype(queries.dtype)

    def sums(sums_ref: Any) -> Any:
        await_tile(jnp.int32(0))
        before = gradients(jnp.int32(0), None, sums_ref, True)
        step, masked = functools.partial(gradients, sums_ref=sums_ref), group.masked
        before = lax.fori_loop(1, masked, functools.partial(step, mask=True), before)
        before = lax.fori_loop(jnp.maximum(masked, 1), group.visited, functools.partial(step, mask=False), before)
        plgpu.wgmma(sums_ref, before, keys.at[slot(group.visited - 1)])
        return sums_ref[...]

    dq = pl.run_scoped(sums, plgpu.WGMMAAccumulatorRef(queries.shape, jnp.float32))
    plgpu.barrier_arrive(group.consumed.at[slot(group.visited - 1)])
    return (dq * group.scale,)


def _key_gradients(group: _Warpgroup) -> tuple[jax.Array, jax.Array]:
    """Returns dk and dv. Scores are keys x queries."""
    (keys, values, *_), (queries, douts, lses, slopes) = group.mine, group.ring
    first, last = (load(x, LINES) for x in group.mine[2:])

    def products(here: Any, visit: Any, dv_ref: Any, mask: bool, scores_ref: Any, dweights_ref: Any) -> Any:
        """The gradients of a tile's scores; issues the product for those of values."""
        plgpu.wgmma(scores_ref, keys, queries.at[here].transpose((1, 0)))
        plgpu.wgmma(dweights_ref, values, douts.at[here].transpose((1, 0)))
        lse = load(lses.at[here], COLUMNS)
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        if mask:
            scores = _masked(scores, group.first_of(visit), 1, first, last)
        weights = jnp.exp2(scores * (group.scale * LOG2E) - lax.broadcast_in_dim(lse, scores.shape, [1]))
        dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=0)
        plgpu.wgmma(dv_ref, weights.astype(values.dtype), douts.at[here])
        slope = load(slopes.at[here], COLUMNS)
        return weights * (dweights - lax.broadcast_in_dim(slope, scores.shape, [1]))

    def add(visit: Any, carry: None, reader: Any, dk_ref: Any, dv_ref: Any, mask: bool) -> None:
        del carry
        here = group.slot(reader * group.visited + visit)
        plgpu.barrier_wait(group.arrived.at[here])
        found = pl.run_scoped(functools.partial(products, here, visit, dv_ref, mask), SCORES, SCORES)
        plgpu.wgmma(dk_ref, found.astype(keys.dtype), queries.at[here])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(group.consumed.at[here])

    def sums(dk_ref: Any, dv_ref: Any) -> Any:
        @pl.loop(0, group.readers)
        def _reader(reader: Any) -> None:
            step = functools.partial(add, reader=reader, dk_ref=dk_ref, dv_ref=dv_ref)
            lax.fori_loop(0, group.masked, functools.partial(step, mask=True), None)
            lax.fori_loop(group.masked, group.visited, functools.partial(step, mask=False), None)

        return dk_ref[...], dv_ref[...]

    accumulator = plgpu.WGMMAAccumulatorRef(keys.shape, jnp.float32)
    dk, dv = pl.run_scoped(sums, accumulator, accumulator)
    return dk * group.scale, dv


def _masked(scores: jax.Array, start: Any, axis: int, first: jax.Array, last: jax.Array) -> jax.Array:
    """Scores whose queries, from `start` on along `axis`, see the keys of the other axis."""
    query = start + plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA)
    first, last = (lax.broadcast_in_dim(x, scores.shape, [1 - axis]) for x in (first, last))
    return jnp.where((query >= first) & (query < last), scores, MASKED)
