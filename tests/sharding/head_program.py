"""Runs the Triton kernels of the head where there is no GPU, or on one; prints one JSON line.

python head_program.py interpret               in Triton's interpreter (TRITON_INTERPRET=1), against the portable form
python head_program.py assemble 90             compiles them for a compute capability, and assembles what comes out
python head_program.py dispatch                which programs call them, in JAX for a mesh of GPUs
python head_program.py compile 4096 32768 512  memory of a compiled program for an H100: tokens, vocabulary, width
python head_program.py device                  on this machine's GPU, against the portable form

A process of its own: tests on CPU devices must not see the CUDA plugin, and Triton reads the environment at import.
"""

import math
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
from triton_code import kernel_calls, machine_code, meshes, run_one

from sharding import vocab
from sharding.mesh import Target, Tiling, compiling_for, runs_triton
from sharding.vocab import token_logprobs

# name: (dtype, rows, tokens, vocabulary, width, chunk)
CASES = {
    "odd": ("float32", 1, 37, 150, 48, 16),
    "odd bf16": ("bfloat16", 1, 37, 150, 48, 16),
    "several parts and groups": ("float32", 3, 29, 611, 32, 0),
    "several parts and groups bf16": ("bfloat16", 3, 29, 611, 32, 30),
    "one token": ("float32", 1, 1, 70, 16, 0),
    "one token bf16": ("bfloat16", 1, 1, 70, 16, 1),
}
LARGE = {  # several groups, and several tiles in a part, where tiles are as large as they are on GPUs
    "large": ("float32", 1, 4500, 20011, 256, 0),
    "large bf16": ("bfloat16", 1, 4500, 20011, 256, 0),
}


def case(dtype, rows, tokens, vocabulary, width):
    """(hidden, head, cotangents), and the arguments that have no gradient. Of the ids that are not allowed, one is a
    target, one would be the most probable of all, and others fill a tile."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(rows, tokens, width))
    weights = rng.normal(size=(vocabulary, width)) * 3 / math.sqrt(width)
    weights[1] = 9 * hidden[0, 0] / math.sqrt(width)
    allowed = np.ones(vocabulary, bool)
    allowed[[1, 5, *range(96, min(128, vocabulary))]] = False
    targets = rng.choice(np.flatnonzero(allowed), (rows, tokens))
    if tokens > 1:
        targets[0, -1] = 5
    arrays = (jnp.asarray(hidden, dtype), jnp.asarray(weights, dtype))
    cotangents = tuple(jnp.asarray(rng.normal(size=(rows, tokens)), jnp.float32) for _ in range(2))
    temperatures = jnp.asarray(rng.uniform(0.5, 1.5, (rows, tokens)), jnp.float32)
    rest = {"temperature": temperatures, "allowed_V": jnp.asarray(allowed)}
    return arrays, cotangents, jnp.asarray(targets, jnp.int32), rest


def values_and_grads(arrays, cotangents, targets, **rest):
    """(log-probabilities, entropies, gradient of the hidden states, of the head)."""
    values, pull = jax.vjp(lambda hidden, head: token_logprobs(hidden, head, targets, **rest), *arrays)
    return *values, *pull(cotangents)


def errors(dtype, rows, tokens, vocabulary, width, chunk):
    """The largest error of the values and of each gradient, over the largest value of the portable form in float32.

    The log-probability of a target that is not allowed, -1e30, is left out."""
    arrays, cotangents, targets, rest = case(dtype, rows, tokens, vocabulary, width)
    with jax.default_device(jax.devices("cpu")[0]), compiling_for(Target("cpu")):  # exact products of float32
        wide = jax.tree.map(jnp.asarray, [np.asarray(x, np.float32) for x in arrays])
        want = jax.jit(lambda *x: values_and_grads(x, cotangents, targets, **rest))(*wide)
    got = jax.jit(lambda *x: values_and_grads(x, cotangents, targets, chunk=chunk, **rest))(*arrays)
    assert [x.dtype for x in got] == ["float32", "float32", dtype, dtype]
    got, want = ([np.array(x, np.float32) for x in results] for results in (got, want))
    for logprobs in (got[0], want[0]):
        never = logprobs < -0.99e30
        assert never.sum() == (tokens > 1)
        logprobs[never] = 0
    return [float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in zip(got, want, strict=True)]


def interpret():
    import triton_interpreter

    triton_interpreter.install()
    vocab.tiling_of = lambda *_: Tiling((16, 32, 32), 4, 1)
    vocab.TOGETHER, vocab.LEAST_PARTS, vocab.PROGRAMS = 2, 3, 8
    with compiling_for(Target("gpu", 90)):
        return {name: errors(*what) for name, what in CASES.items()}


def device():
    found = {name: errors(*what) for name, what in (CASES | LARGE).items()}
    return found | {"with triton": runs_triton(jnp.zeros(1))}


def assemble(capability):
    """The machine code of each kernel, for sizes that are multiples of all tiles' and sizes that are not."""
    programs = {}
    for dtype, vocabulary, width in (("bfloat16", 1024, 256), ("bfloat16", 1003, 208), ("float32", 1024, 256)):
        arrays, cotangents, targets, rest = case(dtype, 1, 512, vocabulary, width)

        def step(*arrays, cotangents=cotangents, targets=targets, rest=rest):
            return values_and_grads(arrays, cotangents, targets, **rest)

        programs[f"{dtype} {width}"] = step, arrays
    return machine_code(programs, capability)


def dispatch():
    """The kernels that programs for a GPU call, forward and backward, in a `shard_map` that checks what varies."""
    mesh, cpus = meshes()

    def calls(mesh, capability=90, dtype="bfloat16", head_dtype=None, width=64):
        (hidden, weights), cotangents, targets, rest = case(dtype, 2, 40, 1024, width)
        weights, allowed = weights.astype(head_dtype or dtype), rest["allowed_V"][:512]
        step = jax.shard_map(
            lambda hidden, weights, cotangents, targets, temperature: values_and_grads(
                (hidden, weights), cotangents, targets, temperature=temperature, allowed_V=allowed
            ),
            mesh=mesh,
            in_specs=P("d"),  # of the head, each device has ids of its own here
            out_specs=P("d"),
            check_vma=True,
        )
        with compiling_for(Target("gpu", capability)):
            return kernel_calls(step, hidden, weights, cotangents, targets, rest["temperature"])

    return {
        "bfloat16": calls(mesh),
        "float32": calls(mesh, dtype="float32"),
        "of two dtypes": calls(mesh, head_dtype="float32"),
        "odd width": calls(mesh, width=72),
        "on cpus": calls(cpus),
        "on an old GPU": calls(mesh, capability=75),
    }


def compile_ahead(tokens, vocabulary, width):
    """Of the fused and the portable form, compiled for an H100 in bfloat16, forward and backward: bytes of temporaries
    and of results, and the most numbers that any array of the program has."""
    from fluxjax.sizing.topology import Topology

    sharding = SingleDeviceSharding(Topology.parse("1x1xh100").devices()[0])

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    row = (1, tokens)
    arrays = array(jnp.bfloat16, *row, width), array(jnp.bfloat16, vocabulary, width)
    targets, temperatures = array(jnp.int32, *row), array(jnp.float32, *row)
    cotangents = (temperatures, temperatures)
    found = {}
    for name, capability in (("fused", 90), ("portable", 75)):
        with compiling_for(Target("gpu", capability)):
            program = jax.jit(lambda *given, temperature: values_and_grads(*given, temperature=temperature))
            compiled = program.lower(arrays, cotangents, targets, temperature=temperatures).compile()
        memory, hlo = compiled.memory_analysis(), compiled.as_text() or ""
        assert memory is not None
        found[name] = {
            "temporaries": memory.temp_size_in_bytes,
            "results": memory.output_size_in_bytes,
            "largest": max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b\w+\[([\d,]+)\]", hlo)),
            "calls": len(re.findall('custom_call_target="triton_kernel_call(?:_ffi)?"', hlo)),
        }
    return found


if __name__ == "__main__":
    run_one(interpret=interpret, assemble=assemble, dispatch=dispatch, compile=compile_ahead, device=device)
