"""Measures what the cost model needs on the machine it runs on, and writes it for the planner.

    python -m sharding.calibrate                        all devices that JAX sees; without an accelerator, 8 of the CPU
    python -m sharding.calibrate --devices=2 --quick    two of them, a rough look

Measured are the project's attention over packed sequences (forward, and backward for its factor), both all-to-alls of
an attention at each degree, and matrix products of the widths of the language model and of the vision tower. The forms
of `sharding.cost` are fitted to them; the table shows how well. `CostModel.load(FILE)` reads the result. Nodes are not
told apart: run it on one, and cap the sharding degree at its devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from .cost import CostModel, ModelSizes
    from .kernels.tiles import Tiles

Rows = list[tuple[str, float, float]]  # what was measured, seconds measured, seconds fitted
CPU_DEVICES = 8  # forced where there is no accelerator
FORCE = "xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class CalibrationLoad:
    """The sizes that are measured: one layer of `sizes`, in `dtype`. `attention` are (sequences, tokens of each) of a
    launch, the others token counts."""

    sizes: ModelSizes
    dtype: str
    attention: tuple[tuple[int, int], ...]
    all_to_all: tuple[int, ...]
    linear: int
    repeats: int


def main(argv: Sequence[str]) -> int:
    """0; 2 with one line on standard error for what cannot be measured or written."""
    options = _parser().parse_args(argv)
    out = pathlib.Path(options.out)
    if options.devices < 0 or options.devices == 1 or options.repeats < 0:
        return _fail("--devices must be at least 2 (0 is all there are) and --repeats must not be negative")
    if not out.parent.is_dir():
        return _fail(f"--out={out}: there is no folder {out.parent}")
    if FORCE not in os.environ.get("XLA_FLAGS", ""):  # before JAX starts; accelerators do not mind
        flags = f"{os.environ.get('XLA_FLAGS', '')} --{FORCE}={options.devices or CPU_DEVICES}"
        os.environ["XLA_FLAGS"] = flags.strip()
    from .cost import CostError
    from .cost.model import named
    from .mesh import MeshError

    try:
        model = named(options.model)
        cost, rows = calibrate(options.devices, quick=options.quick, repeats=options.repeats)
        cost.of(model).save(out)
    except (CostError, MeshError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"--out={out}: {error.strerror}")
    _show(cost, rows, out)
    return 0


def calibrate(num_devices: int = 0, *, quick: bool = False, repeats: int = 0) -> tuple[CostModel, Rows]:
    """Measures and fits the cost model of one layer; returns it and rows (what, seconds measured, seconds fitted).

    Raises MeshError for more devices than there are, CostError if they do not make groups of two.
    """
    import jax

    from .cost import CostError, CostModel
    from .mesh import make_mesh

    mesh = make_mesh(num_devices)
    widest = 1 << (len(mesh.axis_names) - 1)
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
    cost = CostModel.fitted(
        source,
        attention=(forward, load.sizes),
        all_to_all=(exchange, load.sizes),
        node=mesh.size,
        flops=(linear, vision),
    )
    cost = dataclasses.replace(cost, backward_attention=max(statistics.median(backward) - 1, 0.0))
    rows: Rows = [
        (f"attention, {count} x {length} tokens", seconds, cost.launch_seconds([length] * count))
        for (count, length), seconds in forward.items()
    ]
    for (degree, tokens), seconds in exchange.items():
        fitted = cost.all_to_all_seconds(tokens, degree)
        rows.append((f"all-to-all over {degree}, {tokens} tokens", seconds, fitted))
    return cost, rows


def _workload(platform: str, quick: bool, repeats: int) -> CalibrationLoad:
    """Chooses the sizes of a real layer where there is an accelerator, of a toy on a CPU."""
    from .cost import ModelSizes

    if platform == "cpu":
        sizes = ModelSizes("toy layer", 1, 256, 8, 2, 32, mlp=1024, vision_width=128, vision_mlp=512, value_bytes=4)
        longest, tokens = (1024, (512, 2048)) if quick else (4096, (512, 2048, 8192))
        return CalibrationLoad(sizes, "float32", _cuts(longest), tokens, 512, repeats or (5 if quick else 10))
    sizes = ModelSizes("7B layer", 1, 3584, 28, 4, 128, mlp=18944, vision_width=1280, vision_mlp=3420)
    longest, tokens = (8192, (8192, 32768)) if quick else (16384, (8192, 32768, 131072))
    return CalibrationLoad(sizes, "bfloat16", _cuts(longest), tokens, 8192, repeats or (5 if quick else 20))


def _cuts(longest: int) -> tuple[tuple[int, int], ...]:
    """Returns (sequences, tokens of each): one of several lengths, and the longest total in several pieces."""
    return (1, longest // 8), (1, longest // 4), (16, longest // 16), (4, longest // 4), (1, longest // 2), (1, longest)


# --- measurements: least seconds of one call ----------------------------------------------------------


def _attention(load: CalibrationLoad, count: int, length: int, *, backward: bool) -> float:
    """Measures the attention of `count` packed sequences: forward, or forward and backward together."""
    import jax
    import jax.numpy as jnp

    from .kernels.tiles import tile_attention, tile_list

    sizes = load.sizes
    segments = jnp.repeat(jnp.arange(1, count + 1, dtype=jnp.int32), length)
    tiles = jax.jit(tile_list)(segments, jnp.zeros_like(segments))
    q, k, v = (
        jax.random.normal(jax.random.key(i), (count * length, heads, sizes.head_size), load.dtype)
        for i, heads in enumerate((sizes.heads, sizes.kv_heads, sizes.kv_heads))
    )

    def total(q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles) -> jax.Array:
        return tile_attention(q, k, v, tiles).astype(jnp.float32).sum()

    run = jax.jit(jax.grad(total, argnums=(0, 1, 2)) if backward else tile_attention)
    return _least(lambda: run(q, k, v, tiles), load.repeats)


def _all_to_all(mesh: Mesh, load: CalibrationLoad, degree: int, tokens: int) -> float:
    """Measures queries, keys and values of `tokens` tokens going there and outputs back, in all groups at once."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from .mesh import group_axes

    axes, sizes = group_axes(mesh, degree), load.sizes
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
    import jax
    import jax.numpy as jnp

    x, up, down = (jnp.full(shape, 0.01, load.dtype) for shape in ((load.linear, width), (width, mlp), (mlp, width)))
    run = jax.jit(lambda x, up, down: x @ up @ down)
    return 4.0 * load.linear * width * mlp / _least(lambda: run(x, up, down), load.repeats)


def _least(call: Callable[[], object], repeats: int) -> float:
    import jax

    for _ in range(2):  # compiles, and warms up
        jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return min(seconds)  # what others do on the machine only ever adds


# --- what the user sees -------------------------------------------------------------------------------


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a bar; `step(text)`, which the context gives, says what begins now."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda text: bar.update(task, advance=1, description=text)


def _show(cost: CostModel, rows: Rows, out: pathlib.Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=cost.source, caption_justify="left")
    for name, justify in (("", "left"), ("measured ms", "right"), ("fitted ms", "right"), ("error", "right")):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    for name, measured, fitted in rows:
        table.add_row(name, f"{measured * 1e3:.3f}", f"{fitted * 1e3:.3f}", f"{fitted / measured - 1:+.0%}")
    console = Console()
    console.print(table)
    for name, figures in cost.fits.items():
        console.print(
            f"{name}: R2 {figures['r2']:.3f}, relative error {figures['mean_relative_error']:.0%} on average, "
            f"{figures['worst_relative_error']:.0%} at worst"
        )
    console.print(
        f"linear {cost.linear_flops / 1e9:,.0f} GFLOP/s, vision tower {cost.vision_flops / 1e9:,.0f} GFLOP/s, "
        f"attention backward {cost.backward_attention:.2f} times forward"
    )
    console.print(f"written to {out}", soft_wrap=True)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sharding.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", default="cost.json", help="the file to write (default cost.json)")
    parser.add_argument("--devices", type=int, default=0, help="how many of the devices (default: all)")
    parser.add_argument("--model", default="qwen2.5-vl-7b", help="the model to scale to (default qwen2.5-vl-7b)")
    parser.add_argument("--repeats", type=int, default=0, help="timed calls of each (default 10 CPU, 20 else)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
