"""The output projection of a gated MLP, `(silu(gate) * up) @ down`, with a backward pass that reads gate and up once.

The backward pass computes three arrays as large as `gate`: the gradients of gate and up, and `silu(gate) * up`. Without
a barrier, XLA on GPUs computes them in three kernels, which read 7 such arrays; with a barrier, in one, which reads 3.
"""

import jax
from jaxtyping import Array, Float


def _product(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _forward(
    gate: Float[Array, "T F"], up: Float[Array, "T F"], down: Float[Array, "F D"]
) -> tuple[Float[Array, "T D"], tuple[Array, Array, Array]]:
    return _product(gate, up) @ down, (gate, up, down)


def _backward(kept: tuple[Array, Array, Array], dout: Float[Array, "T D"]) -> tuple[Array, Array, Array]:
    gate, up, down = kept
    gate, up, dinner = jax.lax.optimization_barrier((gate, up, dout @ down.T))
    inner, pull = jax.vjp(_product, gate, up)
    return *pull(dinner), inner.T @ dout


gated_product = jax.custom_vjp(lambda *arrays: _forward(*arrays)[0])
gated_product.defvjp(_forward, _backward)
