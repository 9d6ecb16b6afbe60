"""The output projection of a gated MLP, `(silu(gate) * up) @ down`, with its backward pass for NVIDIA GPUs.

The backward pass needs the gradients of gate and up, and `silu(gate) * up` again, for the gradient of `down`. XLA's
three kernels read 7 arrays as large as `gate` and write 3. The kernel of `gated_kernels` reads 3 and writes 3.
"""

import jax
from jaxtyping import Array, Float

from ..mesh import Tiling, launch, runs_triton

NUMBERS = 1024  # of an array, that a program computes: 16 bytes a thread and array in bfloat16

chosen = runs_triton  # says, while a program is traced, whether the kernel computes the gradients of (gate, up)


def _forward(
    gate: Float[Array, "T F"], up: Float[Array, "T F"], down: Float[Array, "F D"]
) -> tuple[Float[Array, "T D"], tuple[Array, Array, Array]]:
    return (jax.nn.silu(gate) * up) @ down, (gate, up, down)


def _backward(kept: tuple[Array, Array, Array], dout: Float[Array, "T D"]) -> tuple[Array, Array, Array]:
    gate, up, down = kept
    blocks = -(-gate.size // NUMBERS)
    dgate, dup, inner = launch(
        "gated_kernels",
        "gradients",
        (gate, up, dout @ down.T, gate.size),
        [jax.ShapeDtypeStruct(gate.shape, gate.dtype)] * 3,
        (blocks, 1, 1),
        Tiling((NUMBERS,), 4, 1),
        NUMBERS=NUMBERS,
        FULL=blocks * NUMBERS == gate.size,
    )
    return dgate, dup, inner.T @ dout


gated_product = jax.custom_vjp(lambda *arrays: _forward(*arrays)[0])
gated_product.defvjp(_forward, _backward)
