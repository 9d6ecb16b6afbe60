"""The gated delta rule by its definition, a scan over tokens: the reference of `sharding/kernels/delta.py`."""

import jax
import jax.numpy as jnp

from sharding.kernels.delta import DeltaHeads, DeltaInputs, DeltaState

BLOCK = 64  # tokens whose states the backward pass computes again


def delta_by_token(inputs: DeltaInputs, heads: DeltaHeads, state: DeltaState) -> tuple[jax.Array, DeltaState]:
    """Outputs `[B, T, V, J]`, and the state behind them. Each row is one sequence that goes on from `state`."""
    B, T, V = inputs.beta_BTV.shape
    before = jnp.concatenate([state.channels_B3X, inputs.channels_BTX], axis=1)
    windows = jnp.stack([before[:, i : i + T] for i in range(4)], axis=-1).astype(jnp.float32)
    x = jax.nn.silu(jnp.sum(windows * inputs.conv_XS[None, None].astype(jnp.float32), axis=-1))
    size = heads.key_heads * heads.key_size

    def unit(x: jax.Array) -> jax.Array:
        """Vectors of norm 1, once for each value head."""
        x = x.reshape(B, T, heads.key_heads, heads.key_size)
        x = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, V // heads.key_heads, axis=2)

    q, k = unit(x[..., :size]) / heads.key_size**0.5, unit(x[..., size : 2 * size])
    v = x[..., 2 * size :].reshape(B, T, V, heads.value_size)

    def token(S: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay, beta = x
        S = S * jnp.exp(log_decay)[..., None, None]
        stored = jnp.einsum("BVHJ,BVH->BVJ", S, k, precision="highest")
        S = S + k[..., None] * (beta[..., None] * (v - stored))[..., None, :]
        return S, jnp.einsum("BVHJ,BVH->BVJ", S, q, precision="highest")

    def blocks(x: jax.Array) -> jax.Array:
        """`[B, T, ...]` -> `[blocks, tokens, B, ...]`, filled up with tokens that change no state."""
        x = jnp.pad(x, ((0, 0), (0, -T % BLOCK)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x, 1, 0).reshape(-1, BLOCK, B, *x.shape[2:])

    step = jax.checkpoint(lambda S, xs: jax.lax.scan(token, S, xs), prevent_cse=False)
    tokens = tuple(map(blocks, (q, k, v, inputs.log_decay_BTV, inputs.beta_BTV)))
    S, out = jax.lax.scan(step, state.heads_BVHJ, tokens)
    return jnp.moveaxis(out.reshape(-1, B, V, heads.value_size)[:T], 0, 1), DeltaState(S, before[:, T:])
