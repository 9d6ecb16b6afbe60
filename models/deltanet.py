"""Gated DeltaNet, the layer of Qwen3.5 that mixes tokens by a state (Gated DeltaNet, arXiv:2412.06464).

The layer projects tokens, and mixes the projections by a function `recur` that its caller hands in: `delta_rule` of
`sharding.kernels.delta` for packed rows, or `delta_step` to decode one token of each sequence.
"""

import math
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sharding.kernels.delta import DeltaHeads, DeltaInputs
from sharding.weights import WeightSpec, weight

from .layers import RMSNorm, add_bias, normal, project, uniform

Aux = TypeVar("Aux")  # second result of the recurrence: the state after the tokens, or None
Recur: TypeAlias = Callable[[DeltaInputs], tuple[Array, Aux]]


class GatedDeltaNet(nnx.Module):
    """Projections, decays and output gate. `qkv` has the channels of `DeltaHeads` as its outputs."""

    def __init__(self, width: int, heads: DeltaHeads, *, eps: float, std: float, stack: int | None = None) -> None:
        D, V, J, X = width, heads.value_heads, heads.value_size, heads.channels
        init = normal(std)
        self.qkv = weight(WeightSpec((D, X), ("D", "X"), init, inputs=1), stack)
        self.z = weight(WeightSpec((D, V, J), ("D", "N", "H"), init, inputs=1), stack)
        self.b = weight(WeightSpec((D, V), ("D", "N"), init, inputs=1), stack)
        self.a = weight(WeightSpec((D, V), ("D", "N"), init, inputs=1), stack)
        self.conv = weight(WeightSpec((X, 4), ("X", "S"), init), stack)
        # Decays of 0.6 to 0.999 a token, as in trained models. transformers' initial values let a state vanish at once.
        self.decay_log = weight(WeightSpec((V,), ("N",), uniform(0.0, math.log(16))), stack)  # A_log on disk
        self.decay_bias = weight(WeightSpec((V,), ("N",), uniform(-7.0, -3.5)), stack)  # dt_bias on disk
        self.norm = RMSNorm(J, eps, stack, axis="H")
        self.out = weight(WeightSpec((V, J, D), ("N", "H", "D"), init, inputs=2), stack)

    def __call__(self, x: Float[Array, "B T D"], recur: Recur[Aux]) -> tuple[Float[Array, "B T D"], Aux]:
        """`recur` returns `(out_BTVJ float32, aux)`; the layer returns this `aux`. Decays, beta, gate are float32."""
        b, a, z = (project(x, matrix).astype(jnp.float32) for matrix in (self.b, self.a, self.z))
        rate = jnp.exp(self.decay_log[...].astype(jnp.float32))
        a = jax.nn.softplus(add_bias(a, self.decay_bias[...].astype(jnp.float32)))
        inputs = DeltaInputs(
            channels_BTX=project(x, self.qkv),
            log_decay_BTV=-jnp.broadcast_to(rate, a.shape) * a,
            beta_BTV=jax.nn.sigmoid(b),
            conv_XS=self.conv[...],
        )
        out, aux = recur(inputs)
        gated = self.norm(out) * jax.nn.silu(z)
        return project(gated.astype(x.dtype), self.out), aux
