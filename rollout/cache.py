"""The cache of the embedded engine on its devices: pages of keys and values, and states.

The cache is a pool of pages (`rollout.slots`). A layer with Gated DeltaNet has a state of fixed size for each slot
instead of pages. The state behind a prefilled row is written to the slots of all samples that go on from the row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from models.config import TextConfig
from models.inputs import AnyArray
from sharding.kernels.delta import DeltaState, new_state
from sharding.kernels.paged import gathered

from .slots import PAGE_TOKENS

# Keys and values of a prefill [L, B, K, T, H], and the states behind its rows [L, B, ...] (None: no layer has a state)
Rows = tuple[Array, Array, DeltaState | None]
LayerRows = tuple[Array, Array]  # keys and values of one layer [B, K, T, H], as attention reads them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageWrites:
    """Entry `s` of page `page_W[w]` gets column `column_WS[w, s]` of prefilled row `row_W[w]`. Out-of-range pages
    (padding) are not written. If the model has layers with states, `states` are (slots, rows): slot `slots[b]` gets the
    state behind prefilled row `rows[b]`. Out-of-range slots (padding) are not written."""

    page_W: Int[AnyArray, " W"]
    row_W: Int[AnyArray, " W"]
    column_WS: Int[AnyArray, "W S"]
    states: tuple[Int[AnyArray, " B"], Int[AnyArray, " B"]] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The cached entries before row `b` of a prefill: the first `length_B[b]` entries of the pages `pages_BC[b]`. If
    the model has layers with states, slot `slot_B[b]` holds the states behind these entries."""

    pages_BC: Int[AnyArray, "B C"]
    length_B: Int[AnyArray, " B"]
    slot_B: Int[AnyArray, " B"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (rotated) and values of `C` pages of `S` tokens each, of the layers with attention. Entries that belong to
    no sample are finite. `states` are the states `[L, N, ...]` of the layers with states: one of each slot, then those
    that are kept between turns. They are None if no layer has a state."""

    k_LCKSH: PyTree  # arrays; JAX also builds this class with shapes or shardings
    v_LCKSH: PyTree
    states: DeltaState | None = None

    @staticmethod
    def shapes(text: TextConfig, pages: int, states: int, dtype: DTypeLike) -> KVCache:
        """The shapes of a model's cache. Heads come first, so that a head's entries of a page are neighbours."""
        shape = len(text.attention_layers), pages, text.num_kv_heads, PAGE_TOKENS, text.head_dim
        rows = jax.ShapeDtypeStruct(shape, dtype)
        if (heads := text.delta) is None:
            return KVCache(rows, rows)
        layer = jax.eval_shape(lambda: new_state(heads, states, dtype))
        layers = len(text.delta_layers)
        return KVCache(rows, rows, jax.tree.map(lambda x: jax.ShapeDtypeStruct((layers, *x.shape), x.dtype), layer))

    def view(self, pages_BC: Int[Array, "B C"], layer: int) -> LayerRows:
        """A copy of the entries of these pages in one layer, `[B, K, T, H]`."""
        return gathered(self.k_LCKSH, pages_BC, layer), gathered(self.v_LCKSH, pages_BC, layer)

    def state(self, slot_B: Int[AnyArray, " B"] | None, layer: int) -> DeltaState:
        """The states of these slots in one layer. An out-of-range slot gets the state of the last slot."""
        assert slot_B is not None, "slot_B must be given for a model with states"

        def gather(x: Array) -> Array:
            L, N, *sizes = x.shape
            index_B = jnp.minimum(slot_B, N - 1) + layer * N
            return jnp.take(x.reshape(L * N, *sizes), index_B, axis=0, mode="clip")

        return jax.tree.map(gather, self.states)

    def _written(self, slot_B: Int[Array, " B"], new: DeltaState) -> DeltaState:
        return jax.tree.map(lambda x, y: x.at[:, slot_B].set(y.astype(x.dtype), mode="drop"), self.states, new)

    def extended(
        self, layer: int, pages_BC: AnyArray, entry_B: Array, k_BKH: Float[Array, "B K H"], v_BKH: Float[Array, "B K H"]
    ) -> KVCache:
        """The cache with the entry of number `entry_B` of each sample in one layer. The entry is in the sample's page
        `entry_B // PAGE_TOKENS`, and is not written if there is no such page, or if it is out of range."""
        C, place_B = self.k_LCKSH.shape[1], entry_B % PAGE_TOKENS
        number_B1 = entry_B[:, None] // PAGE_TOKENS
        page_B = jnp.take_along_axis(jnp.asarray(pages_BC), number_B1, axis=1, mode="fill", fill_value=C)[:, 0]

        def write(x: Array, new: Array) -> Array:
            return x.at[layer, page_B, :, place_B].set(new, mode="drop")

        return dataclasses.replace(self, k_LCKSH=write(self.k_LCKSH, k_BKH), v_LCKSH=write(self.v_LCKSH, v_BKH))

    def with_states(self, slot_B: Int[AnyArray, " B"], layers: list[DeltaState]) -> KVCache:
        """The cache with new states of these slots, unless out of range, for each layer with states."""
        if not layers:
            return self
        return dataclasses.replace(self, states=self._written(slot_B, jax.tree.map(lambda *x: jnp.stack(x), *layers)))

    def insert(self, rows: Rows, writes: PageWrites) -> KVCache:
        """The cache with pages filled from prefilled rows; a column may go to several pages."""

        def write(x: Array, new: Array) -> Array:
            new_WSLKH = new[:, writes.row_W[:, None], :, writes.column_WS]
            return x.at[:, writes.page_W].set(jnp.moveaxis(new_WSLKH, (0, 1), (1, 3)), mode="drop")

        (k, v, ends), states = rows, None
        if ends is not None and writes.states is not None:
            slot_B, row_B = writes.states
            states = self._written(slot_B, jax.tree.map(lambda x: x[:, row_B], ends))
        return KVCache(write(self.k_LCKSH, k), write(self.v_LCKSH, v), states)


def layers_by_kind(layers: list[LayerRows | DeltaState]) -> tuple[list[LayerRows], DeltaState | None]:
    """Returns (keys and values of each layer with attention, the stacked states of all other layers if any)."""
    rows = [layer for layer in layers if not isinstance(layer, DeltaState)]
    states = [layer for layer in layers if isinstance(layer, DeltaState)]
    return rows, jax.tree.map(lambda *x: jnp.stack(x), *states) if states else None
