"""Runs the Triton kernel of gated MLPs where there is no GPU, or on one; prints one JSON line.

python gated_program.py interpret           in Triton's interpreter (TRITON_INTERPRET=1), against the portable form
python gated_program.py assemble 90         compiles it for a compute capability, and assembles what comes out
python gated_program.py dispatch            which programs call it, in JAX for a mesh of GPUs
python gated_program.py device              on this machine's GPU, against the portable form

A process of its own: tests on CPU devices must not see the CUDA plugin, and Triton reads the environment at import.
"""

import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from triton_code import kernel_calls, machine_code, meshes, run_one

from models.layers import GatedMLP
from sharding.kernels.gated import gated_product
from sharding.mesh import Target, compiling_for, runs_triton

CASES = {  # name: (dtype, tokens, inner width, width)
    "full blocks": ("float32", 64, 32, 16),
    "full blocks bf16": ("bfloat16", 64, 32, 16),
    "a part of a block": ("float32", 7, 40, 24),
    "a part of a block bf16": ("bfloat16", 37, 40, 24),
    "one number": ("float32", 1, 1, 8),
}


def case(dtype, tokens, inner, width):
    """(gate, up, down, cotangent); some gates are so large that their sigmoid is 0 or 1."""
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, tokens, inner))
    gate[:: max(tokens // 4, 1)] *= 100
    arrays = gate, up, rng.normal(size=(inner, width)), rng.normal(size=(tokens, width))
    return [jnp.asarray(array, dtype) for array in arrays]


def value_and_grads(product, *arrays):
    *given, dout = arrays
    out, pull = jax.vjp(product, *given)
    return out, *pull(dout)


def portable(gate, up, down):
    return (jax.nn.silu(gate) * up) @ down


def errors(*sizes):
    """The largest error of the output and of each gradient, over the largest value of the portable form in float32."""
    arrays = case(*sizes)
    with jax.default_device(jax.devices("cpu")[0]):  # exact products of float32
        wide = [jnp.asarray(np.asarray(x, np.float32)) for x in arrays]
        want = jax.jit(functools.partial(value_and_grads, portable))(*wide)
    got = jax.jit(functools.partial(value_and_grads, gated_product))(*arrays)
    assert {x.dtype.name for x in got} == {sizes[0]}
    pairs = zip((np.asarray(x, np.float32) for x in got), map(np.asarray, want), strict=True)
    return [float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in pairs]


def interpret():
    import triton_interpreter

    triton_interpreter.install()
    with compiling_for(Target("gpu", 90)):
        return {name: errors(*sizes) for name, sizes in CASES.items()}


def device():
    found = {name: errors(*sizes) for name, sizes in CASES.items()}
    return found | {"with triton": runs_triton(jnp.zeros(1))}


def assemble(capability):
    """The machine code of the kernel, for full blocks and others."""
    programs = {}
    for dtype, tokens in (("bfloat16", 128), ("bfloat16", 37), ("float32", 128)):
        programs[f"{dtype} {tokens}"] = functools.partial(value_and_grads, gated_product), case(dtype, tokens, 64, 32)
    return machine_code(programs, capability)


def dispatch():
    """The kernels that an MLP's program for a GPU calls, forward and backward, in a `shard_map` that checks what
    varies."""
    mesh, cpus = meshes()

    def calls(mesh, capability=90, dtype="bfloat16", computed_again=False, outputs_first=False):
        mlp = GatedMLP(16, 64, bias=True, std=1.0, rngs=nnx.Rngs(0))
        if outputs_first:
            spec = mlp.down.get_metadata("spec").turned()
            mlp.down = nnx.Param(mlp.down[...].T, spec=spec)
        structure, weights = nnx.split(mlp)
        weights = jax.tree.map(lambda array: array.astype(dtype), weights)

        def through(weights, x):
            weights = jax.tree.map(lambda array: jax.lax.pcast(array, "d", to="varying"), weights)
            return nnx.merge(structure, weights)(x)

        def step(weights, x, dout):
            return jax.vjp(jax.checkpoint(through) if computed_again else through, weights, x)[1](dout)

        specs = P(), P("d"), P("d")
        local = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=True)
        x = jnp.ones((2, 32, 16), dtype)
        with compiling_for(Target("gpu", capability)):
            return kernel_calls(local, weights, x, x)

    return {
        "bfloat16": calls(mesh),
        "float32": calls(mesh, dtype="float32"),
        "computed again": calls(mesh, computed_again=True),
        "outputs first": calls(mesh, outputs_first=True),
        "on cpus": calls(cpus),
        "on an old GPU": calls(mesh, capability=75),
    }


if __name__ == "__main__":
    run_one(interpret=interpret, assemble=assemble, dispatch=dispatch, device=device)
