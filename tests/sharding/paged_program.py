"""Runs the Triton kernel of attention over pages where there is no GPU, or on one; prints one JSON line.

python paged_program.py interpret           in Triton's interpreter (TRITON_INTERPRET=1), against the portable form
python paged_program.py assemble 90         compiles it for a compute capability, and assembles what comes out
python paged_program.py dispatch            which programs call it, in JAX for a GPU
python paged_program.py device              on this machine's GPU, against the portable form

A process of its own: tests on CPU devices must not see the CUDA plugin, and Triton reads the environment at import.
"""

import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from triton_code import kernel_calls, machine_code, run_one

from sharding.kernels import paged
from sharding.mesh import Target, Tiling, compiling_for, runs_triton

PAGE = 16
# name: (dtype, query heads, KV heads, head size, least and largest length); the others of 5 lengths are drawn
CASES = {
    "one entry": ("float32", 4, 2, 64, 1, 5),
    "7 queries a key": ("float32", 14, 2, 64, 17, 200),
    "long parts": ("float32", 3, 1, 80, 1, 400),
    "two parts bf16": ("bfloat16", 8, 2, 128, 30, 128),
    "wide bf16": ("bfloat16", 6, 3, 256, 16, 129),
    "20 queries a key": ("float32", 20, 1, 72, 5, 64),
}


def case(dtype, N, K, H, least, most, rows=5, layers=2):
    """(q, k, v, pages, length): sequences that share their first page, in drawn pages of a cache of two layers. Pages
    behind a sequence's last are out of range."""
    rng = np.random.default_rng([N, K, H])
    length = np.append([least, most], rng.integers(least, most + 1, rows - 2)).astype(np.int32)
    count = -(-length // PAGE)
    total = int(count.sum()) + 3
    pages, free = np.full((rows, -(-most // PAGE) + 2), total, np.int32), rng.permutation(total)
    for row, n in enumerate(count):
        pages[row, :n], free = free[:n], free[n:]
    pages[:, 0] = pages[0, 0]
    q = jnp.asarray(rng.normal(size=(rows, N, H)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(layers, total, K, PAGE, H)), dtype) for _ in "kv")
    return q, k, v, jnp.asarray(pages), jnp.asarray(length)


def error(*what):
    """The largest error of an output, over the largest output of the portable form in float32."""
    q, k, v, pages, length = case(*what)
    with jax.default_device(jax.devices("cpu")[0]), compiling_for(Target("cpu")):
        wide = [jnp.asarray(np.asarray(x, np.float32)) for x in (q, k, v)]
        portable = jax.jit(functools.partial(paged.paged_attention, layer=1))
        want = np.asarray(portable(*wide, pages=np.asarray(pages), length=np.asarray(length)))
    assert paged.chosen(q, k, v)
    got = jax.jit(functools.partial(paged.paged_attention, layer=1))(q, k, v, pages=pages, length=length)
    assert got.dtype == q.dtype
    return float(np.abs(np.asarray(got, np.float32) - want).max() / np.abs(want).max())


def interpret():
    import triton_interpreter

    triton_interpreter.install()
    paged.tiling_of, paged.PARTS = lambda *_: Tiling((16,), 4, 1), 4
    with compiling_for(Target("gpu", 90)):
        return errors()


def errors():
    return {name: [error(*what)] for name, what in CASES.items()}


def device():
    return errors() | {"with triton": runs_triton(jnp.zeros(1))}


def assemble(capability):
    """The machine code of the kernel, for heads of several sizes."""
    programs = {}
    for dtype, H in [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 128)]:
        programs[f"{dtype} {H}"] = functools.partial(paged.paged_attention, layer=1), case(dtype, 28, 4, H, 1, 64)
    return machine_code(programs, capability)


def dispatch():
    """The kernels that programs call: for a GPU, for heads of an odd size, for an old GPU."""
    q, k, v, pages, length = case("bfloat16", 4, 2, 64, 1, 64)

    def calls(*qkv):
        return kernel_calls(functools.partial(paged.paged_attention, layer=1), *qkv, pages, length)

    with compiling_for(Target("gpu", 90)):
        found = {"on a GPU": calls(q, k, v), "odd heads": calls(*(x[..., :63] for x in (q, k, v)))}
    with compiling_for(Target("gpu", 75)):
        return found | {"on an old GPU": calls(q, k, v)}


if __name__ == "__main__":
    run_one(interpret=interpret, assemble=assemble, dispatch=dispatch, device=device)
