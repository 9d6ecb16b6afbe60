"""Measures attention, all-to-alls and matrix products on this machine's devices, and fits the cost model to them."""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cost_fit import fitted as fitted_model
from benchmarks.cost_fit import launch_seconds
from sharding.cost import CostError, CostModel, ModelSizes
from sharding.kernels.tiles import Tiles, tile_attention, tile_list
from sharding.mesh import group_axes, make_mesh, replica_size

Rows = list[tuple[str, float, float]]  # (name, seconds measured, seconds fitted) of each measurement


@dataclasses.dataclass(frozen=True)
class CalibrationLoad:
    """The measured sizes: one layer of `sizes`, in `dtype`. `attention` lists (sequences, tokens of each) of the
    launches; the other fields are numbers of tokens."""

    sizes: ModelSizes
    dtype: str
    attention: tuple[tuple[int, int], ...]
    all_to_all: tuple[int, ...]
    linear: int
    repeats: int


def calibrate(num_devices: int = 0, *, quick: bool = False, repeats: int = 0) -> tuple[CostModel, Rows]:
    """Measures and fits the cost model of one layer; returns it and rows (name, seconds measured, seconds fitted).

    Raises MeshError for more devices than JAX sees, CostError if they do not form groups of two.
    """
    mesh = make_mesh(num_devices)
    widest = replica_size(mesh.size)
    if widest < 2:
        raise CostError(f"all-to-alls need groups of two devices; {mesh.size} have none. Give an even --devices")
    platform = mesh.devices.flat[0].platform
    load = _workload(platform, quick, repeats)
    degrees = [1 << k for k in range(1, widest.bit_length())]
    with _progress(len(load.attention) + 2 + len(degrees) * len(load.all_to_all) + 2) as step:
        forward, backward = {}, []
        for count, length in load.attention:
            step(f"attention, {count} x {length} tokens")
            forward[count, length] = _attention(load, count, length, backward=False)
        for count, length in load.attention[-2:]:
            step(f"attention backward, {count} x {length} tokens")
            backward.append(_attention(load, count, length, backward=True) / forward[count, length])
        exchange = {}
        for degree in degrees:
            for tokens in load.all_to_all:
                step(f"all-to-all over {degree} devices, {tokens} tokens")
                exchange[degree, tokens] = _all_to_all(mesh, load, degree, tokens)
        step("matrix products")
        linear = _matmul(load, load.sizes.width, load.sizes.mlp)
        step("matrix products of the vision tower")
        vision = _matmul(load, load.sizes.vision_width, load.sizes.vision_mlp)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shared = f", forced devices of one process on {cores} cores" if platform == "cpu" else ""
    source = (
        f"measured on {mesh.size} x {mesh.devices.flat[0].device_kind}{shared}: {load.dtype}, {load.sizes.heads}/"
        f"{load.sizes.kv_heads} heads of {load.sizes.head_size}, least of {load.repeats}, JAX {jax.__version__}"
    )
    cost = fitted_model(
        source,
        attention=(forward, load.sizes),
        all_to_all=(exchange, load.sizes),
        node=mesh.size,
        flops=(linear, vision),
    )
    cost = dataclasses.replace(cost, backward_attention=max(statistics.median(backward) - 1, 0.0))
    rows: Rows = [
        (f"attention, {count} x {length} tokens", seconds, launch_seconds(cost, [length] * count))
        for (count, length), seconds in forward.items()
    ]
    for (degree, tokens), seconds in exchange.items():
        fitted = cost.all_to_all_seconds(tokens, degree)
        rows.append((f"all-to-all over {degree}, {tokens} tokens", seconds, fitted))
    return cost, rows


def _workload(platform: str, quick: bool, repeats: int) -> CalibrationLoad:
    if platform == "cpu":
        sizes = ModelSizes("toy layer", 1, 256, 8, 2, 32, mlp=1024, vision_width=128, vision_mlp=512, value_bytes=4)
        longest, tokens = (1024, (512, 2048)) if quick else (4096, (512, 2048, 8192))
        return CalibrationLoad(sizes, "float32", _cuts(longest), tokens, 512, repeats or (5 if quick else 10))
    sizes = ModelSizes("7B layer", 1, 3584, 28, 4, 128, mlp=18944, vision_width=1280, vision_mlp=3420)
    longest, tokens = (8192, (8192, 32768)) if quick else (16384, (8192, 32768, 131072))
    return CalibrationLoad(sizes, "bfloat16", _cuts(longest), tokens, 8192, repeats or (5 if quick else 20))


def _cuts(longest: int) -> tuple[tuple[int, int], ...]:
    """Returns (sequences, tokens of each): single sequences of four lengths, and the longest one's total in pieces."""
    return (1, longest // 8), (1, longest // 4), (16, longest // 16), (4, longest // 4), (1, longest // 2), (1, longest)


# --- measurements: least seconds of one call ----------------------------------------------------------


def _attention(load: CalibrationLoad, count: int, length: int, *, backward: bool) -> float:
    """Measures the attention of `count` packed sequences: forward, or forward and backward together."""
    sizes = load.sizes
    segments = jnp.repeat(jnp.arange(1, count + 1, dtype=jnp.int32), length)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (count * length, heads, sizes.head_size), load.dtype)
        for i, heads in enumerate((sizes.heads, sizes.kv_heads, sizes.kv_heads))
    )
    tiles = jax.jit(functools.partial(tile_list, queries=q))(segments, jnp.zeros_like(segments))

    def total(q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles) -> jax.Array:
        return tile_attention(q, k, v, tiles).astype(jnp.float32).sum()

    run = jax.jit(jax.grad(total, argnums=(0, 1, 2)) if backward else tile_attention)
    return _least(lambda: run(q, k, v, tiles), load.repeats)


def _all_to_all(mesh: Mesh, load: CalibrationLoad, degree: int, tokens: int) -> float:
    """Measures both all-to-alls of `tokens` tokens (q, k and v; then outputs), in all groups at once."""
    axes, sizes = group_axes(mesh.axis_names[1:], degree), load.sizes
    queries, kv = sizes.heads_of(degree)
    heads = queries + 2 * kv
    spec = P(mesh.axis_names)

    def there_and_back(x: jax.Array) -> jax.Array:
        whole = lax.all_to_all(x, axes, split_axis=1, concat_axis=0, tiled=True)
        return lax.all_to_all(whole[:, : queries // degree], axes, split_axis=0, concat_axis=1, tiled=True)

    run = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=spec))
    shape = (tokens // degree * mesh.size, heads, sizes.head_size)
    x = jax.device_put(jnp.ones(shape, load.dtype), NamedSharding(mesh, spec))
    return _least(lambda: run(x), load.repeats)


def _matmul(load: CalibrationLoad, width: int, mlp: int) -> float:
    """Measures the FLOP/s of an up and a down projection."""
    x, up, down = (jnp.full(shape, 0.01, load.dtype) for shape in ((load.linear, width), (width, mlp), (mlp, width)))
    run = jax.jit(lambda x, up, down: x @ up @ down)
    return 4.0 * load.linear * width * mlp / _least(lambda: run(x, up, down), load.repeats)


def _least(call: Callable[[], object], repeats: int) -> float:
    for _ in range(2):  # the first call compiles, the second warms up
        jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return min(seconds)  # other programs on the machine only add time


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a bar. The context gives `step(text)`; call it with the name of each measurement that begins."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda text: bar.update(task, advance=1, description=text)
