"""The slotted KV cache: every running sample owns one row of fixed length, on the device.

A round of decoding reads a *view*: the active slots, as long as the longest of them needs. New keys and values
collect in a small buffer of the round and are written back once. So a nearly empty engine pays for what runs,
not for all slots, and the loop over tokens never copies the cache.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

Rows = tuple[Array, Array]  # keys and values [L, B, T, K, H] of a prefill
LayerRows = tuple[Array, Array]  # keys and values of one layer [B, K, T, H], as attention reads them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (rotated) and values of `B` slots and up to `S` tokens each. Entries beyond a slot's length are stale."""

    k_LBSKH: PyTree  # arrays; JAX also builds this class of one sharding for each
    v_LBSKH: PyTree

    def view(self, slots_B: Int[Array, " B"], length: int) -> list[LayerRows]:
        """The first `length` entries of some slots, layer by layer. An out-of-range slot (padding) reads another slot's
        entries."""

        def layer(x: Array) -> Array:
            return jnp.swapaxes(jnp.take(x[:, :length], slots_B, axis=0, mode="clip"), 1, 2)

        return [(layer(k), layer(v)) for k, v in zip(self.k_LBSKH, self.v_LBSKH, strict=True)]

    def append(self, layers: list[LayerRows], slots_B: Int[Array, " B"], start_B: Int[Array, " B"]) -> KVCache:
        """Writes `layers` behind the first `start_B` entries of each slot; what does not fit is dropped, and so is
        everything for an out-of-range slot."""
        offsets_BT = start_B[:, None] + jnp.arange(layers[0][0].shape[2])[None, :]

        def write(x: Array, new: tuple[Array, ...]) -> Array:
            new_LBTKH = jnp.swapaxes(jnp.stack(new), 2, 3)
            return x.at[:, slots_B[:, None], offsets_BT].set(new_LBTKH, mode="drop")

        k, v = zip(*layers, strict=True)
        return KVCache(write(self.k_LBSKH, k), write(self.v_LBSKH, v))

    def insert(
        self, rows: Rows, row_B: Int[Array, " B"], source_BT: Int[Array, "B T"], slots_B: Int[Array, " B"]
    ) -> KVCache:
        """Fills slots from prefilled rows: entry `t` of slot `slots_B[b]` becomes entry `source_BT[b, t]` of row
        `row_B[b]`. Several slots may read one row: that is how samples share the prefill of their prompt."""
        length = min(source_BT.shape[1], self.k_LBSKH.shape[2])
        source_BT = source_BT[:, :length]

        def write(x: Array, new: Array) -> Array:
            return x.at[:, slots_B, :length].set(new[:, row_B[:, None], source_BT], mode="drop")

        return KVCache(write(self.k_LBSKH, rows[0]), write(self.v_LBSKH, rows[1]))


def cached_attention(
    q: Float[Array, "B 1 N H"], cached: LayerRows, fresh: LayerRows, length_B: Int[Array, " B"], step: Int[Array, ""]
) -> Float[Array, "B 1 N H"]:
    """Attention of one new token a slot over its first `length_B` cached entries (`[B, K, S, H]`) and the round's
    own entries `0 .. step` (`[B, K, R, H]`). Scores and softmax are float32."""
    B, _, N, H = q.shape
    K = cached[0].shape[1]
    q = q.reshape(B, K, N // K, H)

    def scores(k: Array) -> Array:
        return jnp.einsum("BKGH,BKSH->BKGS", q, k, preferred_element_type=jnp.float32) * H**-0.5

    S, R = cached[0].shape[2], fresh[0].shape[2]
    old = jnp.where((jnp.arange(S)[None, :] < length_B[:, None])[:, None, None], scores(cached[0]), -1e30)
    new = jnp.where((jnp.arange(R) <= step)[None, None, None], scores(fresh[0]), -1e30)
    probs = jax.nn.softmax(jnp.concatenate([old, new], axis=-1), axis=-1).astype(q.dtype)
    out = jnp.einsum("BKGS,BKSH->BKGH", probs[..., :S], cached[1])
    out += jnp.einsum("BKGS,BKSH->BKGH", probs[..., S:], fresh[1])
    return out.reshape(B, 1, N, H)
