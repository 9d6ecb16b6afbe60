"""Attention over packed rows, in portable JAX. Masks are described, never materialised outside."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query reaches: same non-zero segment; if `branches` are given, key branch 0 or the query's own;
    if `causal`, no later index of the row."""

    segments: Int[Array, "B T"]
    branches: Int[Array, "B T"] | None = None
    causal: bool = True

    def dense(self) -> Array:
        """The mask as booleans `[B, T, S]`."""
        query, key = self.segments[:, :, None], self.segments[:, None, :]
        allowed = (query == key) & (key != 0)
        if self.branches is not None:
            branch = self.branches[:, None, :]
            allowed &= (branch == 0) | (branch == self.branches[:, :, None])
        if self.causal:
            index = jnp.arange(self.segments.shape[1])
            allowed &= (index[:, None] >= index[None, :])[None]
        return allowed


def attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], allowed: Array
) -> Float[Array, "B T N H"]:
    """Grouped-query attention; `allowed` is `[B, T, S]`. Scores and softmax are float32.

    A query that reaches no key (padding) returns zeros, so that its gradient is zero too, never NaN.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32) * H**-0.5
    mask = allowed[:, None, None]
    scores = jnp.where(mask, scores, -1e30)
    probs = jax.nn.softmax(scores, axis=-1)
    probs = jnp.where(mask, probs, 0.0).astype(v.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", probs, v).reshape(B, T, N, H)
