"""Mixes tokens of sequences that groups of devices share, each sequence with its own number of devices (FlexUlysses).

Within a group of `p` devices every device holds 1/p of the tokens of a stream with all their heads. An all-to-all turns
this into all tokens with 1/p of the heads, the layer mixes tokens locally, and a second all-to-all goes back (Ulysses).
`docs/parallelism.md` has the order of rounds, what they keep, and a proof that they can't deadlock.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..kernels import tiles
from ..kernels.flash import Like
from ..mesh import group_axes
from ..planner.plan import Deal, deal_heads
from .buffers import Spread

Attention = Callable[[Array, Array, Array], Array]
Compute = Callable[[int, PyTree], tuple[PyTree, PyTree]]  # (round, stream) -> result to send back, residuals


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """One round as a device sees it: columns of its row from `start`. Only the `valid` columns belong to the round:
    `read` gives zeros for the others, also as their segments, and `write` leaves them unchanged. `axes` are the group's
    mesh axes (none for one device). `table` says which tokens of the group's stream a layer mixes: `Tiles` for
    attention, `PackedRuns` for the delta rule."""

    start: Any  # i32 []
    valid: Any  # bool [budget]
    table: Any
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def degree(self) -> int:
        return 1 << len(self.axes)

    def read(self, row: Array) -> Array:
        """`[T, ...]` -> `[budget, ...]`; columns of other rounds become zeros."""
        part = jax.lax.dynamic_slice_in_dim(row, self.start, self.valid.shape[0])
        return jnp.where(_wide(self.valid, part), part, jnp.zeros_like(part))

    def write(self, row: Array, part: Array) -> Array:
        """The row with `part` in the valid columns, all others unchanged."""
        there = jax.lax.dynamic_slice_in_dim(row, self.start, self.valid.shape[0])
        return jax.lax.dynamic_update_slice_in_dim(row, jnp.where(_wide(self.valid, part), part, there), self.start, 0)


def _wide(valid: Array, part: Array) -> Array:
    return jnp.broadcast_to(valid.reshape(-1, *[1] * (part.ndim - 1)), part.shape)


@dataclasses.dataclass(frozen=True)
class HeadMixer(abc.ABC):
    """A kind of layer whose heads mix tokens independently of each other. `heads` counts the heads of the outputs,
    `groups` the KV heads or key heads; equally many heads read each group. A unit is a group, or a copy, with its heads
    (`Deal`). A stream `[S, units, ...]` has all tokens of the devices that share a round, and one device's units."""

    heads: int
    groups: int
    verb = "mix"  # names the computation in programs

    @abc.abstractmethod
    def deal(self, tokens: tuple[Array, ...], deal: Deal) -> PyTree:
        """Arrays `[T, ...]` of tokens -> arrays `[T, units, ...]` with the units of all devices."""

    @abc.abstractmethod
    def collect(self, dealt: PyTree, deal: Deal) -> tuple[Array, ...]:
        """The transpose of `deal`."""

    @abc.abstractmethod
    def forward(self, stream: PyTree, weights: PyTree, view: View, deal: Deal) -> tuple[Array, PyTree]:
        """(outputs `[S, units, heads of a unit, H]`, residuals). `weights` are those of all heads."""

    @abc.abstractmethod
    def backward(self, residuals: PyTree, dout: Array, view: View) -> tuple[PyTree, PyTree]:
        """Gradients of (stream, weights); those of `weights` are this device's part of a sum over devices."""

    def deal_out(self, x: Array, deal: Deal) -> Array:
        """Heads `[T, N, H]` -> `[T, units, heads of a unit, H]`, filled up with zeros."""
        (T, N, H), K = x.shape, self.groups
        x = x.reshape(T, K, N // K, H)
        x = jnp.pad(x, ((0, 0), (0, deal.kv - K), (0, deal.copies * deal.queries - N // K), (0, 0)))
        return x.reshape(T, deal.kv * deal.copies, deal.queries, H)

    def collected(self, x: Array, deal: Deal) -> Array:
        """The inverse of `deal_out`."""
        T, N, K, H = x.shape[0], self.heads, self.groups, x.shape[-1]
        return x.reshape(T, deal.kv, deal.copies * deal.queries, H)[:, :K, : N // K].reshape(T, N, H)

    def copy_out(self, x: Array, deal: Deal) -> Array:
        """Groups `[T, K, H]` -> `[T, units, 1, H]`, filled up with zeros."""
        x = jnp.pad(x, ((0, 0), (0, deal.kv - x.shape[1]), (0, 0)))
        return jnp.repeat(x, deal.copies, axis=1)[:, :, None]

    def sum_copies(self, x: Array, deal: Deal) -> Array:
        """The transpose of `copy_out`: gradients of the copies `[T, units, H]` -> `[T, K, H]`, summed in float32."""
        x = x.reshape(x.shape[0], deal.kv, deal.copies, x.shape[-1])[:, : self.groups]
        return x.astype(jnp.float32).sum(axis=2).astype(x.dtype)


def spread_attention(
    spread: Spread, segments_BT: Int[Array, "B T"], branches_BT: Int[Array, "B T"], tile: int = 0, queries: Like = None
) -> Attention:
    """Returns `attend(q_BTNH, k_BTKH, v_BTKH) -> out_BTNH` for the rows of a spread batch, inside a `shard_map` over at
    least `spread.axes`; each device has one row (B = 1). Call this function outside the scan over the layers, which
    share its views and tiles, and `attend` in it. The mask is `sharding.kernels.attention.Mask` along the streams;
    padding gives zeros. `tile` and `queries` are those of `tile_list`. Raises ValueError for several rows on a device;
    `attend` raises PlanError for a degree above the number of heads."""
    views = views_of(spread, segments_BT, branches_BT, tile, queries)

    def attend(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array) -> Array:
        if not views:  # no device has a token
            return jnp.zeros_like(q_BTNH)
        mixer = SpreadHeads(q_BTNH.shape[2], k_BTKH.shape[2])
        return mixed(mixer, (q_BTNH[0], k_BTKH[0], v_BTKH[0]), None, views)[None]

    return attend


def views_of(
    spread: Spread, segments_BT: Int[Array, "B T"], branches_BT: Int[Array, "B T"], tile: int = 0, queries: Like = None
) -> tuple[View, ...]:
    """The views of attention, shared by all layers. Raises as `spread_attention` does."""
    if segments_BT.shape[0] != 1:
        raise ValueError(f"a device of a spread batch has one row, not {segments_BT.shape[0]}")

    def with_tiles(view: View) -> View:
        marks = jnp.stack([view.read(segments_BT[0]), view.read(branches_BT[0])])
        if view.axes:
            marks = jax.lax.all_gather(marks, view.axes, axis=1, tiled=True)
        return dataclasses.replace(view, table=tiles.tile_list(marks[0], marks[1], tile, queries))

    return tuple(with_tiles(view) for view in bare_views(spread, segments_BT.shape[1]))


def bare_views(spread: Spread, columns: int) -> list[View]:
    """The views of the rounds of rows of `columns` tokens, in the order of execution, without tables."""
    views = []
    for j, (degree, budget) in enumerate(spread.rounds):
        first, count = spread.starts_BJ[0, j], spread.counts_BJ[0, j]
        start = jnp.minimum(first, columns - budget)
        column = start + jnp.arange(budget)
        views.append(View(start, (column >= first) & (column < first + count), None, group_axes(spread.axes, degree)))
    return views


def _forward(
    mixer: HeadMixer, tokens: tuple[Array, ...], weights: PyTree, views: tuple[View, ...]
) -> tuple[Float[Array, "T N H"], tuple]:
    """Deals the tokens of a device's row (`[T, ...]` each) to the devices of their groups, by heads. Returns (outputs,
    zero at padding; residuals). `views` are at least one, with the mixer's tables; `weights` are those of all heads,
    equal on all devices. Raises PlanError for a degree above the number of heads."""
    deals = [deal_heads(mixer.heads, mixer.groups, view.degree) for view in views]
    outgoing = []
    for view, deal in zip(views, deals, strict=True):
        dealt = mixer.deal(jax.tree.map(view.read, tokens), deal)
        outgoing.append(jax.tree.map(functools.partial(to_devices, deal=deal), dealt))

    def compute(j: int, stream: PyTree) -> tuple[Array, PyTree]:
        return mixer.forward(stream, weights, views[j], deals[j])

    back, kept = _execute("forward", mixer.verb, outgoing, views, compute)
    outs = [mixer.collected(_from_devices(part), deal) for part, deal in zip(back, deals, strict=True)]
    return _row(len(tokens[0]), views, outs), (kept, views)


def _backward(mixer: HeadMixer, saved: tuple, dout: Array) -> tuple[tuple[Array, ...], PyTree, None]:
    kept, views = saved
    deals = [deal_heads(mixer.heads, mixer.groups, view.degree) for view in views]
    outgoing = []
    for view, deal in zip(views, deals, strict=True):
        outgoing.append(to_devices(mixer.deal_out(view.read(dout), deal), deal))

    def compute(j: int, dstream: Array) -> tuple[PyTree, PyTree]:
        return mixer.backward(kept[j], dstream, views[j])

    back, dweights = _execute("backward", mixer.verb, outgoing, views, compute)
    parts = [mixer.collect(jax.tree.map(_from_devices, part), deal) for part, deal in zip(back, deals, strict=True)]
    return _row(len(dout), views, parts), jax.tree.map(lambda *rounds: sum(rounds), *dweights), None


mixed = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(0,))
mixed.defvjp(_forward, _backward)


def _row(columns: int, views: tuple[View, ...], parts: list[PyTree]) -> PyTree:
    row = jax.tree.map(lambda part: jnp.zeros((columns, *part.shape[1:]), part.dtype), parts[0])
    for view, part in zip(views, parts, strict=True):
        row = jax.tree.map(view.write, row, part)
    return row


def _execute(
    phase: str, verb: str, outgoing: list[PyTree], views: tuple[View, ...], compute: Compute
) -> tuple[list[PyTree], list[PyTree]]:
    """Sends each round's `[degree, budget, ...]` to its group, computes on the stream, and sends the results back.

    Barriers fix the order in the program: no round's exchange starts before the exchange of the previous round has
    arrived, and no round is computed before all previous rounds. On GPUs, `mesh.compiler_options` make the compiler
    start an exchange as early as barriers allow. Operations are named `{phase}_round{j}_{send, verb, return}`.
    """
    back, kept = list(outgoing), list[PyTree](outgoing)
    alone = [j for j, view in enumerate(views) if view.degree == 1]
    sharded = [j for j, view in enumerate(views) if view.degree > 1]

    def exchange(j: int, x: PyTree, way: str) -> PyTree:
        with jax.named_scope(f"{phase}_round{j}_{way}"):
            return jax.lax.all_to_all(x, views[j].axes, split_axis=0, concat_axis=0, tiled=True)

    def mix(j: int, x: PyTree) -> tuple[PyTree, PyTree]:
        with jax.named_scope(f"{phase}_round{j}_{verb}"):
            result, keep = compute(j, jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), x))
            return jax.tree.map(lambda part: part.reshape(views[j].degree, -1, *part.shape[1:]), result), keep

    arrived = exchange(sharded[0], outgoing[sharded[0]], "send") if sharded else None
    done: dict[int, PyTree] = {}  # results that are not sent back yet
    for j in alone:
        done[j], kept[j] = mix(j, outgoing[j])
    for place, j in enumerate(sharded):
        waiting = {i: outgoing[i] for i in sharded[place + 1 : place + 2]}
        arrived, waiting, done = jax.lax.optimization_barrier((arrived, waiting, done))
        for i, result in done.items():
            back[i] = exchange(i, result, "return") if views[i].axes else result
        ahead = [exchange(i, x, "send") for i, x in waiting.items()]
        result, kept[j] = mix(j, arrived)
        arrived, done = (ahead[0] if ahead else None), {j: result}
    for i, result in done.items():
        back[i] = exchange(i, result, "return") if views[i].axes else result
    return back, kept


class SpreadHeads(HeadMixer):
    """Grouped-query attention: q, k and v travel as one array `[T, units, queries + 2, H]`."""

    verb = "attend"

    def deal(self, tokens: tuple[Array, ...], deal: Deal) -> Array:
        q, k, v = tokens
        return jnp.concatenate([self.deal_out(q, deal), self.copy_out(k, deal), self.copy_out(v, deal)], axis=2)

    def collect(self, dealt: Array, deal: Deal) -> tuple[Array, ...]:
        dq = self.collected(dealt[:, :, :-2], deal)
        return dq, *(self.sum_copies(dealt[:, :, i], deal) for i in (-2, -1))

    def forward(self, stream: Array, weights: None, view: View, deal: Deal) -> tuple[Array, tuple]:
        out, kept = tiles.forward(*self._split(stream), view.table)
        return out.reshape(*stream.shape[:2], -1, out.shape[-1]), (stream, *kept[3:5])

    def backward(self, residuals: tuple, dout: Array, view: View) -> tuple[Array, None]:
        stream, out, lse = residuals
        dq, dk, dv, _ = tiles.backward((*self._split(stream), out, lse, view.table), dout.reshape(out.shape))
        return jnp.concatenate([dq.reshape(dout.shape), dk[:, :, None], dv[:, :, None]], axis=2), None

    @staticmethod
    def _split(stream: Array) -> tuple[Array, Array, Array]:
        """`[S, kv, queries + 2, H]` -> q `[S, kv * queries, H]`, k and v `[S, kv, H]`."""
        q = stream[:, :, :-2]
        return q.reshape(q.shape[0], -1, q.shape[-1]), stream[:, :, -2], stream[:, :, -1]


def to_devices(x: Array, deal: Deal) -> Array:
    """`[T, units, ...]` -> `[degree, T, units / degree, ...]`: the part for each device of the group."""
    return jnp.moveaxis(x.reshape(x.shape[0], deal.degree, -1, *x.shape[2:]), 1, 0)


def _from_devices(x: Array) -> Array:
    """The inverse of `to_devices`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
