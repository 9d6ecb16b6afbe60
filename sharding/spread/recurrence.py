"""The gated delta rule over sequences that several devices share: a `HeadMixer` of `ulysses`.

A device computes the states of its value heads over all tokens of its device group's stream. A unit is a key head, or a
copy of a key head, with value heads that read it. Devices exchange what `DeltaInputs` has of each token: the channels
before the convolution, in their own dtype, and the logarithm of the decay and beta, in float32. Outputs come back in
float32, because the layer normalises them. Every device has the convolution's weights of all channels.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..kernels.delta import DeltaInputs, delta_rule
from ..kernels.delta_heads import DeltaHeads
from ..planner.plan import Deal
from .buffers import Spread
from .ulysses import HeadMixer, View, bare_views, mixed, to_devices


def spread_delta(spread: Spread, heads: DeltaHeads, columns: int) -> Callable[[DeltaInputs], Float[Array, "1 T V J"]]:
    """Returns `recur(inputs) -> out_BTVJ` for a spread batch, which has one row of `columns` tokens on each device;
    see `spread_attention`. Outputs are float32, and zero at padding. Raises ValueError for a batch without tables of
    runs; `recur` raises PlanError for a degree above the number of value heads."""
    if len(spread.runs) != len(spread.rounds):
        raise ValueError("a model with Gated DeltaNet needs the tables of runs of its streams: see Spread.runs")
    bare = zip(bare_views(spread, columns), spread.runs, strict=True)
    views = tuple(dataclasses.replace(view, table=runs) for view, runs in bare)
    mixer = SpreadStates(heads.value_heads, heads.key_heads, heads.key_size)

    def recur(inputs: DeltaInputs) -> Array:
        gates_TVC = jnp.stack([inputs.log_decay_BTV[0], inputs.beta_BTV[0]], axis=-1)
        return mixed(mixer, (inputs.channels_BTX[0], gates_TVC), inputs.conv_XS, views)[None]

    return recur


@dataclasses.dataclass(frozen=True)
class SpreadStates(HeadMixer):
    """The convolution and the delta rule over tokens (channels `[T, X]`, gates `[T, V, 2]`). A stream is (channels `[S,
    units, 2 * H + heads of a unit * J]`, gates `[S, units, heads of a unit, 2]`)."""

    key_size: int
    verb = "recur"

    def deal(self, tokens: tuple[Array, ...], deal: Deal) -> tuple[Array, Array]:
        channels, gates = tokens
        return self._by_unit(channels, deal), self.deal_out(gates, deal)

    def collect(self, dealt: tuple[Array, Array], deal: Deal) -> tuple[Array, ...]:
        q, k, v = jnp.split(dealt[0], [self.key_size, 2 * self.key_size], axis=-1)
        v = self.collected(v.reshape(*v.shape[:2], deal.queries, -1), deal)
        return _flat(self.sum_copies(q, deal), self.sum_copies(k, deal), v), self.collected(dealt[1], deal)

    def forward(
        self, stream: tuple[Array, Array], weights: Float[Array, "X 4"], view: View, deal: Deal
    ) -> tuple[Array, Callable]:
        return jax.vjp(functools.partial(self._rule, view, deal), stream, weights)

    def backward(self, residuals: Callable, dout: Array, view: View) -> tuple[tuple[Array, Array], Array]:
        return residuals(dout)

    def _rule(self, view: View, deal: Deal, stream: tuple[Array, Array], conv_XS: Array) -> Array:
        channels, gates = stream
        units, queries = gates.shape[1:3]
        value_size = (channels.shape[-1] - 2 * self.key_size) // queries
        heads = DeltaHeads(units, units * queries, self.key_size, value_size)
        rank = jax.lax.axis_index(view.axes) if view.axes else 0
        conv = to_devices(self._by_unit(conv_XS.T, deal), deal)[rank]
        channels, conv = (_flat(*jnp.split(x, [self.key_size, 2 * self.key_size], axis=-1)) for x in (channels, conv))
        log_decay, beta = jnp.unstack(gates.reshape(1, len(gates), -1, 2), axis=-1)
        out, _ = delta_rule(DeltaInputs(channels[None], log_decay, beta, conv.T), heads, view.table)
        return out.reshape(len(gates), units, queries, value_size)

    def _by_unit(self, channels: Float[Array, "T X"], deal: Deal) -> Float[Array, "T U C"]:
        """Channels of all heads -> those of each unit: its query, its key, its values."""
        T, keys = len(channels), self.groups * self.key_size
        q, k, v = jnp.split(channels, [keys, 2 * keys], axis=-1)
        q, k = (self.copy_out(x.reshape(T, self.groups, -1), deal) for x in (q, k))
        v = self.deal_out(v.reshape(T, self.heads, -1), deal)
        return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in (q, k, v)], axis=-1)


def _flat(*parts: Array) -> Array:
    """Arrays `[T, heads, ...]` -> their channels side by side, `[T, X]`."""
    return jnp.concatenate([part.reshape(len(part), -1) for part in parts], axis=-1)
