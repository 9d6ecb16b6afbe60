"""Runs the Triton kernels of attention where there is no GPU, or on one; prints one JSON line.

python flash_program.py interpret           in Triton's interpreter (TRITON_INTERPRET=1), against the portable kernel
python flash_program.py assemble 90         compiles them for a compute capability, and assembles what comes out
python flash_program.py dispatch            which programs of `sharding.kernels` call them, in JAX for a mesh of GPUs
python flash_program.py hopper              Mosaic's kernels, compiled for two described H100
python flash_program.py device              on this machine's GPU, against the portable kernel

A process of its own: tests on CPU devices must not see the CUDA plugin, and Triton reads the environment at import.
"""

import collections
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from triton_code import kernel_calls, machine_code, meshes, run_one

from sharding.kernels import flash, tiles
from sharding.kernels.attention import Mask, attention, packed_attention, segment_attention
from sharding.mesh import Target, Tiling, compiling_for, runs_triton

# name: (dtype, query heads, KV heads, head size, causal, lengths of each row's segments); a list is one with branches
CASES = {
    "branches": ("float32", 4, 2, 64, True, [[[9, 13, 20], 3, [17, 1, 5]], [0, [40, 30]]]),
    "branches bf16": ("bfloat16", 3, 1, 128, True, [[5, [20, 17, 9], 25]]),
    "empty row": ("float32", 2, 1, 128, True, [[0], [0, 33, 0, 1]]),
    "windows": ("float32", 2, 2, 80, False, [[16, 16, 12, 16, 4, 5]]),
    "frames bf16": ("bfloat16", 2, 2, 80, False, [[50, 27]]),
    "one token": ("bfloat16", 2, 1, 64, True, [[1]]),
}

# name: (dtype, query heads, KV heads, head size, tokens of a context, the real ones in each row, each row's branches)
CONTEXTS = {
    "behind a context": ("float32", 4, 2, 64, 48, [48, 0, 33], [[7, 20, 3], [29], [1]]),
    "behind a long context bf16": ("bfloat16", 7, 1, 128, 96, [80], [[40, 16, 16]]),
}


def row(lengths, tokens):
    """(segments, branches) `[tokens]`; a 0 among the lengths is some padding."""
    segments, branches = np.zeros(0, int), np.zeros(0, int)
    for number, length in enumerate(lengths, 1):
        parts = length if isinstance(length, list) else [length or 4]
        segments = np.append(segments, np.full(sum(parts), number if length else 0))
        branches = np.append(branches, np.repeat(np.arange(len(parts)), parts))
    return [np.pad(x, (0, tokens - len(x))).astype(np.int32) for x in (segments, branches)]


def case(dtype, N, K, H, causal, rows, tokens=None):
    """(q, k, v, dout, segments, branches) of a case."""
    rng = np.random.default_rng(0)
    sizes = [sum(sum(x) if isinstance(x, list) else x or 4 for x in lengths) for lengths in rows]
    T = tokens or max(sizes)
    segments, branches = (jnp.asarray(x) for x in np.stack([row(lengths, T) for lengths in rows], axis=1))
    arrays = (jnp.asarray(rng.normal(size=(len(rows), T, heads, H)), dtype) for heads in (N, K, K, N))
    return *arrays, segments, branches, causal


def errors(dtype, N, K, H, causal, rows):
    """The largest error of the output and of each gradient, over the largest value of the portable one in float32."""
    *qkvd, segments, branches, causal = case(dtype, N, K, H, causal, rows)

    def portable(q, k, v):
        return attention(q, k, v, Mask(segments, branches, causal).dense())  # booleans are always portable

    def ours(q, k, v):
        return attention(q, k, v, Mask(segments, branches, causal))

    def value_and_grads(f, qkvd):
        *qkv, dout = qkvd
        out, pull = jax.vjp(f, *qkv)
        return out, *pull(dout)

    with jax.default_device(jax.devices("cpu")[0]):  # where products of float32 are exact
        wide = [np.asarray(x, np.float32) for x in qkvd]
        want = jax.jit(lambda *x: value_and_grads(portable, x))(*map(jnp.asarray, wide))
    got = jax.jit(lambda *x: value_and_grads(ours, x))(*qkvd)
    assert all(x.dtype == dtype for x in got)
    got = [np.asarray(x, np.float32) for x in got]
    return [
        float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in zip(got, map(np.asarray, want), strict=True)
    ]


def context_errors(dtype, N, K, H, before, real, rows):
    """As `errors`, of the output of queries behind a context."""
    q, k, v, _, segments, branches, _ = case(dtype, N, K, H, True, [[lengths] for lengths in rows])
    context = np.random.default_rng(1).normal(size=(2, len(rows), before, K, H))
    k, v = (jnp.concatenate([jnp.asarray(old, dtype), new], axis=1) for old, new in zip(context, (k, v), strict=True))
    known = jnp.arange(before)[None] < jnp.asarray(real)[:, None]
    mask = Mask(jnp.concatenate([known.astype(int), segments], 1), jnp.pad(branches, ((0, 0), (before, 0))))
    with jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float32)) for x in (q, k, v)]
        allowed = mask.of(*mask.queries(q.shape[1]))
        want = np.asarray(jax.jit(lambda q, k, v: attention(q, k, v, allowed))(*wide))
    got = jax.jit(lambda q, k, v: attention(q, k, v, mask))(q, k, v)
    assert got.dtype == dtype
    return [float(np.abs(np.asarray(got, np.float32) - want).max() / np.abs(want).max())]


def interpret():
    import triton_interpreter

    triton_interpreter.install()
    small = {"key_gradients": Tiling((16, 32), 4, 1)}
    flash.for_hopper = lambda queries: False
    flash.tiling_of = lambda kernel, *_: small.get(kernel, Tiling((32, 16), 4, 1))
    with compiling_for(Target("gpu", 90)):
        return all_errors()


def all_errors():
    found = {name: errors(*what) for name, what in CASES.items()}
    return found | {name: context_errors(*what) for name, what in CONTEXTS.items()}


def device():
    return all_errors() | {"with triton": runs_triton(jnp.zeros(1))}


def assemble(capability):
    """The machine code of each Triton kernel, for heads of several sizes."""
    flash.for_hopper = lambda queries: False
    shapes = [("bfloat16", 64), ("bfloat16", 80), ("bfloat16", 128), ("float32", 80)]
    programs = {}
    for dtype, H in shapes if capability == 90 else shapes[2:]:
        *qkvd, segments, branches, _ = case(dtype, 4, 2, H, True, [[[40, 20], 30]], 256)

        def step(q, k, v, dout, segments=segments, branches=branches):
            out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, Mask(segments, branches)), q, k, v)
            return out, *pull(dout)

        programs[f"{dtype} {H}"] = step, qkvd
    return machine_code(programs, capability)


def dispatch():
    """The kernels that programs for a GPU call, forward and backward, in a `shard_map` that checks what varies."""
    mesh, cpus = meshes()
    q, k, v, dout, segments, branches, _ = case("bfloat16", 4, 2, 64, True, [[[40, 20], 30]] * 2, 128)

    def masked(q, k, v, segments, branches):
        return attention(q, k, v, Mask(segments, branches))

    def tiled(q, k, v, segments, branches):
        return tiles.tile_attention(q[0], k[0], v[0], tiles.tile_list(segments[0], branches[0], queries=q))[None]

    def windows(q, k, v, segments, branches):
        return segment_attention(q[0], k[0], v[0], segments[0], 16)[None]

    def dense(q, k, v, segments, branches):
        return attention(q, k, v, Mask(segments, branches).dense())

    def odd(q, k, v, segments, branches):
        return masked(q[..., :63], k[..., :63], v[..., :63], segments, branches)

    def calls(f, mesh):
        local = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=True)

        def step(q, k, v, dout):
            def loss(q, k, v):
                out = jax.checkpoint(local)(q, k, v, segments, branches)
                return jnp.sum((out * dout[..., : out.shape[-1]]).astype(jnp.float32))

            return jax.grad(loss, (0, 1, 2))(q, k, v)

        return kernel_calls(step, q, k, v, dout)

    with compiling_for(Target("gpu", 90)):
        found = {f.__name__: calls(f, mesh) for f in (masked, tiled, windows, dense, odd)}
        found["on cpus"] = calls(masked, cpus)
    with compiling_for(Target("gpu", 75)):
        return found | {"on an old GPU": calls(masked, mesh)}


def hopper():
    """The calls of Mosaic's kernels, and the bytes of temporaries, of three layers that are computed again backward, in
    a `shard_map` that checks what varies."""
    from fluxjax.sizing.topology import Topology

    mesh = jax.sharding.Mesh(np.array(Topology.parse("1x2xh100").devices()), ("d",))
    flash.for_hopper = lambda queries: True  # with CUDA 12, too: nothing is executed

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, P("d")))

    def loss(q, k, v, segments, branches):
        attend = packed_attention(segments, branches, q)
        layer = jax.checkpoint(lambda x, _: (x + attend(x, k, v), None))
        return jnp.sum(jax.lax.scan(layer, q, None, length=3)[0].astype(jnp.float32) ** 2)

    grads = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=True)
    keys, numbers = array(jnp.bfloat16, 2, 4096, 2, 128), array(jnp.int32, 2, 4096)
    with compiling_for(Target("gpu", 90)):
        compiled = jax.jit(grads).lower(array(jnp.bfloat16, 2, 4096, 8, 128), keys, keys, numbers, numbers).compile()
    memory, hlo = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None
    names = re.findall(r'custom_call_target="mosaic_gpu\w*".*/hopper_(\w+)/', hlo)
    return {"kernels": dict(collections.Counter(names)), "temporaries": memory.temp_size_in_bytes}


if __name__ == "__main__":
    run_one(hopper=hopper, interpret=interpret, assemble=assemble, dispatch=dispatch, device=device)
