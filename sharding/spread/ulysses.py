"""Attention over sequences that groups of devices share, each sequence with its own number of devices (FlexUlysses).

Within a group of `p` devices every device holds 1/p of the tokens of a stream with all their heads. An all-to-all turns
this into all tokens with 1/p of the heads, attention is local, and a second all-to-all goes back (Ulysses). FlexRL
section 3 and algorithm 1: groups of different degrees follow each other as rounds, highest degree first. The first
round's tokens travel while unsharded sequences are computed, each further round's while the round before is computed.
The backward pass is written out and does the same, in the same order; a transposed forward pass would wait for every
transfer.

For the backward pass every round keeps q, k, v as received, its output and the log-sum-exp: sending q, k and v a second
time would double the traffic of that pass. To save this memory, wrap layers in `jax.checkpoint`.

Rounds can't deadlock. All devices run one program, so that all issue the same collectives in the same order. Columns,
counts and tiles differ between devices, but they are data, and a device without a token in a round still exchanges its
padding. Number the collectives in that order. Groups of one collective are disjoint and cover all devices; groups of
two collectives are disjoint or nested, for a group is a product of trailing mesh axes. Suppose that devices wait for
ever, and look at the lowest-numbered collective in which a device waits. It waits for a device of its group that has
not reached this collective. That device waits in a lower-numbered collective (a contradiction), or it computes; the
computation ends, as the loops over tiles have a fixed length. So that device reaches the collective, which then ends.
The same holds for asynchronous starts, as long as they run in the order in which the compiled program issues them.

The argument does not need the order of degrees. Degrees still never increase among the exchanges of one direction: a
device leaves a group's exchange only for an exchange of the same group or of a group within it. XLA:GPU keeps this
order; XLA:CPU drops the barriers that state it, and runs another order, the same on all devices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..kernels import tiles
from ..kernels.flash import Like
from ..planner.plan import Deal, deal_heads
from .buffers import Spread

Attention = Callable[[Array, Array, Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """One round as a device sees it: columns of its row from `start`; the `valid` columns belong to the round.

    The other columns belong to other rounds or are the row's padding. They are masked: `read` gives zeros for them
    (segment 0, too), and `write` leaves them unchanged. `tiles` are those of the group's stream, `axes` the group's
    mesh axes (none for one device).
    """

    start: Any  # i32 []
    valid: Any  # bool [budget]
    tiles: tiles.Tiles
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def degree(self) -> int:
        return 1 << len(self.axes)

    def read(self, row: Array) -> Array:
        """`[T, ...]` -> `[budget, ...]`; columns of other rounds become zeros."""
        return _read(row, self.start, self.valid)

    def write(self, row: Array, part: Array) -> Array:
        """The row with `part` in the valid columns, all others unchanged."""
        there = jax.lax.dynamic_slice_in_dim(row, self.start, self.valid.shape[0])
        return jax.lax.dynamic_update_slice_in_dim(row, jnp.where(_wide(self.valid, part), part, there), self.start, 0)


def _read(row: Array, start: Array, valid: Array) -> Array:
    part = jax.lax.dynamic_slice_in_dim(row, start, valid.shape[0])
    return jnp.where(_wide(valid, part), part, jnp.zeros_like(part))


def _wide(valid: Array, part: Array) -> Array:
    return jnp.broadcast_to(valid.reshape(-1, *[1] * (part.ndim - 1)), part.shape)


def spread_attention(
    spread: Spread, segments_BT: Int[Array, "B T"], branches_BT: Int[Array, "B T"], tile: int = 0, queries: Like = None
) -> Attention:
    """`attend(q_BTNH, k_BTKH, v_BTKH) -> out_BTNH` for the rows of a spread batch, inside a `shard_map` over at least
    `spread.axes`; each device has one row (B = 1).

    Views, gathered segments and tile lists, which all layers share, are computed here: call this function outside the
    scan over the layers, and `attend` in it. The mask is `sharding.kernels.attention.Mask` along the streams; padding
    gives zeros. `tile=0` chooses the tiles' size; `queries` are those of `tile_list`. Raises ValueError for several
    rows on a device; `attend` raises PlanError for a degree above the number of heads.
    """
    views = views_of(spread, segments_BT, branches_BT, tile, queries)

    def attend(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array) -> Array:
        if not views:  # no device has a token
            return jnp.zeros_like(q_BTNH)
        return _attend(k_BTKH.shape[2], q_BTNH[0], k_BTKH[0], v_BTKH[0], views)[None]

    return attend


def views_of(
    spread: Spread, segments_BT: Int[Array, "B T"], branches_BT: Int[Array, "B T"], tile: int = 0, queries: Like = None
) -> tuple[View, ...]:
    """The views of the rounds in the order of execution, shared by all layers. Raises as `spread_attention` does."""
    if segments_BT.shape[0] != 1:
        raise ValueError(f"a device of a spread batch has one row, not {segments_BT.shape[0]}")
    return tuple(_view(spread, j, segments_BT[0], branches_BT[0], tile, queries) for j in range(len(spread.rounds)))


def _view(spread: Spread, j: int, segments_T: Array, branches_T: Array, tile: int, queries: Like) -> View:
    degree, budget = spread.rounds[j]
    axes = spread.group(degree)
    first, count = spread.starts_BJ[0, j], spread.counts_BJ[0, j]
    start = jnp.minimum(first, segments_T.shape[0] - budget)
    column = start + jnp.arange(budget)
    valid = (column >= first) & (column < first + count)
    marks = jnp.stack([_read(segments_T, start, valid), _read(branches_T, start, valid)])
    if axes:
        marks = jax.lax.all_gather(marks, axes, axis=1, tiled=True)
    segments, branches = jnp.unstack(marks)
    return View(start, valid, tiles.tile_list(segments, branches, tile, queries), axes)


def _forward(
    K: int,
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    views: tuple[View, ...],
) -> tuple[Float[Array, "T N H"], tuple]:
    deals = [deal_heads(q.shape[1], K, view.degree) for view in views]
    outgoing = []
    for view, deal in zip(views, deals, strict=True):
        heads = [_deal_out(view.read(q), K, deal), *(_copy_out(view.read(x), deal) for x in (k, v))]
        outgoing.append(_to_devices(jnp.concatenate(heads, axis=2), deal))

    def compute(j: int, stream: Array) -> tuple[Array, tuple]:
        out, kept = tiles.forward(*_split(stream), views[j].tiles)
        return out.reshape(*stream.shape[:2], -1, out.shape[-1]), (stream, *kept[3:5])

    back, kept = _execute("forward", outgoing, views, compute)
    out = jnp.zeros_like(q)
    for view, deal, part in zip(views, deals, back, strict=True):
        out = view.write(out, _collect(_from_devices(part), q.shape[1], K, deal))
    return out, (kept, views)


def _backward(K: int, saved: tuple, dout: Array) -> tuple[Array, Array, Array, None]:
    kept, views = saved
    T, N, H = dout.shape
    deals = [deal_heads(N, K, view.degree) for view in views]
    outgoing = []
    for view, deal in zip(views, deals, strict=True):
        outgoing.append(_to_devices(_deal_out(view.read(dout), K, deal), deal))

    def compute(j: int, dstream: Array) -> tuple[Array, None]:
        stream, out, lse = kept[j]
        saved = (*_split(stream), out, lse, views[j].tiles)
        dq, dk, dv, _ = tiles.backward(saved, dstream.reshape(out.shape))
        return jnp.concatenate([dq.reshape(dstream.shape), dk[:, :, None], dv[:, :, None]], axis=2), None

    back, _ = _execute("backward", outgoing, views, compute)
    dq, dk, dv = (jnp.zeros((T, heads, H), dout.dtype) for heads in (N, K, K))
    for view, deal, part in zip(views, deals, back, strict=True):
        part = _from_devices(part)
        dq = view.write(dq, _collect(part[:, :, :-2], N, K, deal))
        dk = view.write(dk, _sum_copies(part[:, :, -2], K, deal))
        dv = view.write(dv, _sum_copies(part[:, :, -1], K, deal))
    return dq, dk, dv, None


_attend = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)


def _execute(
    phase: str, outgoing: list[Array], views: tuple[View, ...], compute: Callable[[int, Array], tuple[Array, PyTree]]
) -> tuple[list[Array], list[PyTree]]:
    """Sends each round's `[degree, budget, ...]` to its group, computes on the stream, and sends the results back.

    Barriers fix the order in the program: no round's exchange starts before the exchange of the round ahead has
    arrived, and no round is computed before all rounds ahead of it. The compiler only has to start an exchange as early
    as barriers allow, together with the computation of the round before; on GPUs it does under
    `mesh.compiler_options`. Operations are named `{phase}_round{j}_{send, attend, return}`.
    """
    back, kept = list(outgoing), list[PyTree](outgoing)
    alone = [j for j, view in enumerate(views) if view.degree == 1]
    sharded = [j for j, view in enumerate(views) if view.degree > 1]

    def exchange(j: int, x: Array, way: str) -> Array:
        with jax.named_scope(f"{phase}_round{j}_{way}"):
            return jax.lax.all_to_all(x, views[j].axes, split_axis=0, concat_axis=0, tiled=True)

    def attend(j: int, x: Array) -> tuple[Array, PyTree]:
        with jax.named_scope(f"{phase}_round{j}_attend"):
            result, keep = compute(j, x.reshape(-1, *x.shape[2:]))
            return result.reshape(*x.shape[:2], *result.shape[1:]), keep

    arrived = exchange(sharded[0], outgoing[sharded[0]], "send") if sharded else None
    done: dict[int, Array] = {}  # computed and not yet sent back
    for j in alone:
        done[j], kept[j] = attend(j, outgoing[j])
    for place, j in enumerate(sharded):
        waiting = {i: outgoing[i] for i in sharded[place + 1 : place + 2]}
        arrived, waiting, done = jax.lax.optimization_barrier((arrived, waiting, done))
        for i, result in done.items():
            back[i] = exchange(i, result, "return") if views[i].axes else result
        ahead = [exchange(i, x, "send") for i, x in waiting.items()]
        result, kept[j] = attend(j, arrived)
        arrived, done = (ahead[0] if ahead else None), {j: result}
    for i, result in done.items():
        back[i] = exchange(i, result, "return") if views[i].axes else result
    return back, kept


def _split(stream: Array) -> tuple[Array, Array, Array]:
    """`[S, kv, queries + 2, H]` -> q `[S, kv * queries, H]`, k and v `[S, kv, H]`."""
    q = stream[:, :, :-2]
    return q.reshape(q.shape[0], -1, q.shape[-1]), stream[:, :, -2], stream[:, :, -1]


def _deal_out(x: Array, K: int, deal: Deal) -> Array:
    """Query heads `[T, N, H]` -> `[T, kv * copies, queries, H]`, filled up with zeros."""
    T, N, H = x.shape
    x = x.reshape(T, K, N // K, H)
    x = jnp.pad(x, ((0, 0), (0, deal.kv - K), (0, deal.copies * deal.queries - N // K), (0, 0)))
    return x.reshape(T, deal.kv * deal.copies, deal.queries, H)


def _collect(x: Array, N: int, K: int, deal: Deal) -> Array:
    """The inverse of `_deal_out`."""
    T, H = x.shape[0], x.shape[-1]
    return x.reshape(T, deal.kv, deal.copies * deal.queries, H)[:, :K, : N // K].reshape(T, N, H)


def _copy_out(x: Array, deal: Deal) -> Array:
    """KV heads `[T, K, H]` -> `[T, kv * copies, 1, H]`, filled up with zeros."""
    x = jnp.pad(x, ((0, 0), (0, deal.kv - x.shape[1]), (0, 0)))
    return jnp.repeat(x, deal.copies, axis=1)[:, :, None]


def _sum_copies(x: Array, K: int, deal: Deal) -> Array:
    """The transpose of `_copy_out`: gradients of the copies `[T, kv * copies, H]` -> `[T, K, H]`, summed in float32."""
    x = x.reshape(x.shape[0], deal.kv, deal.copies, x.shape[-1])[:, :K]
    return x.astype(jnp.float32).sum(axis=2).astype(x.dtype)


def _to_devices(x: Array, deal: Deal) -> Array:
    """`[T, heads, ...]` -> `[degree, T, heads / degree, ...]`: the part for each device of the group."""
    return jnp.moveaxis(x.reshape(x.shape[0], deal.degree, -1, *x.shape[2:]), 1, 0)


def _from_devices(x: Array) -> Array:
    """The inverse of `_to_devices`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
