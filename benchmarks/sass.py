"""Counts what the machine code of our GPU kernels does on an H100: registers, spills, and products that overlap.

    python benchmarks/sass.py                       all kernels, at the sizes of Qwen2.5-7B and others
    python benchmarks/sass.py --only paged --table  kernels whose name contains a word, as a table for people

No GPU is needed: the compiler is found as `scripts/test.sh aot` does, or installed by `scripts/install_aot.sh`. Prints
one JSON line. Names that begin with `mosaic` are `hopper` and `hopper_gradients` of `sharding/kernels`, as XLA compiles
them; other kernels are Triton's, assembled by the ptxas that Triton brings. `programs` are those
that a processor (SM) holds at once by registers, threads and shared memory. `in_loops`, `together`, `overlapping` and
`hidden`: see `benchmarks/gpu/machine_code.py`. Nothing is timed.

Gated DeltaNet (`delta.py`) and the gated MLP (`gated.py`) have no kernels of ours: XLA compiles them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.append(str(pathlib.Path(__file__).resolve().parent / "gpu"))
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "sharding"))

from gpu_compiler import find_compiler
from machine_code import summary

from fluxjax.sizing.topology import Topology

TOKENS, HEADS, KV_HEADS = 16384, 28, 4
VOCABULARY, WIDTH = 152064, 3584
REGISTERS, THREADS, SHARED = 65536, 2048, 228 << 10  # of a processor of an H100
RESERVED = 1024  # bytes of shared memory that a program takes beside its own
COLUMNS = ("registers", "spilled", "shared", "threads", "programs", "hgmma", "hmma", "in_loops", "together",
           "overlapping", "hidden")  # fmt: skip
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def triton_programs(only: str) -> dict[str, Program]:
    """Programs that launch our Triton kernels, by kind and head size, with descriptions of their arrays."""
    import jax
    import jax.numpy as jnp
    from triton_attention import wide_heads, without_hopper

    from sharding.kernels.attention import Mask, attention
    from sharding.kernels.paged import paged_attention
    from sharding.vocab import token_logprobs

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def attend(q: Any, k: Any, v: Any, dout: Any, segments: Any, branches: Any) -> Any:
        with wide_heads(), without_hopper():
            return passes(q, k, v, dout, segments, branches)

    def passes(q: Any, k: Any, v: Any, dout: Any, segments: Any, branches: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, Mask(segments, branches)), q, k, v)
        return out, *pull(dout)

    def decode(*arrays: Any) -> Any:
        return paged_attention(*arrays, layer=1)

    def head(hidden: Any, weights: Any, targets: Any, cotangent: Any) -> Any:
        values, pull = jax.vjp(lambda hidden, weights: token_logprobs(hidden, weights, targets), hidden, weights)
        return *values, *pull((cotangent, cotangent))

    numbers, bf16 = array(jnp.int32, 1, TOKENS), jnp.bfloat16
    found: dict[str, Program] = {}
    for H in (64, 128, 256):
        q, k = array(bf16, 1, TOKENS, HEADS, H), array(bf16, 1, TOKENS, KV_HEADS, H)
        found[f"flash {H}"] = attend, (q, k, k, q, numbers, numbers)
        pages = array(bf16, 2, 4096, KV_HEADS, 16, H)
        tables = array(jnp.int32, 64, 512), array(jnp.int32, 64)
        found[f"paged {H}"] = decode, (array(bf16, 64, HEADS, H), pages, pages, *tables)
    tokens = array(jnp.float32, 1, TOKENS)
    weights = array(bf16, VOCABULARY, WIDTH)
    found["head"] = head, (array(bf16, 1, TOKENS, WIDTH), weights, numbers, tokens)
    return {name: program for name, program in found.items() if only in name}


def mosaic_programs(only: str) -> dict[str, Program]:
    """Programs that call Mosaic's kernels, by head size, with descriptions of their arrays."""
    import jax
    import jax.numpy as jnp

    from sharding.kernels import flash

    importlib.import_module("sharding.kernels.hopper")  # Mosaic sets MOSAIC_GPU_CUDA_ROOT when it is imported
    flash.for_hopper = lambda queries: True  # with CUDA 12, too: nothing is executed

    def passes(q: Any, k: Any, v: Any, dout: Any, segments: Any, branches: Any) -> Any:
        visits = flash.visits_of(segments, branches, True, q)
        out, pull = jax.vjp(lambda q, k, v: flash.flash_attention(q, k, v, visits), q, k, v)
        return out, *pull(dout)

    numbers = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    found: dict[str, Program] = {}
    for H in (64, 128):
        q, k = (jax.ShapeDtypeStruct((1, TOKENS, heads, H), jnp.bfloat16) for heads in (HEADS, KV_HEADS))
        found[f"mosaic {H}"] = passes, (q, k, k, q, numbers, numbers)
    return {name: program for name, program in found.items() if only in name}


def triton_code(only: str) -> dict[str, dict[str, Any]]:
    """The figures of our Triton kernels; none of a program that computes portably."""
    from triton_code import machine_code

    found = {}
    for name, code in sorted(machine_code(triton_programs(only), 90, sass=True).items()):
        kernel, kind = name.split(" ", 1)
        figures = {column: code[column] for column in ("registers", "spilled", "shared", "threads")}
        found[f"{kind}: {kernel}"] = _figures(figures, code["sass"])
    return found


def mosaic_code(only: str) -> dict[str, dict[str, Any]]:
    """The figures of Mosaic's kernels, from what Mosaic writes into a folder while XLA compiles for an H100."""
    programs = mosaic_programs(only)  # imports Mosaic, which sets the variable of the environment below
    if not programs:
        return {}
    import jax
    import triton  # pyright: ignore[reportMissingImports]

    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(pathlib.Path(str(triton.__file__)).parent / "backends/nvidia")
    place = jax.sharding.SingleDeviceSharding(Topology.parse("1x1xh100").devices()[0])
    found = {}
    for name, (function, arrays) in programs.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
            os.environ["MOSAIC_GPU_DUMP_SASS"] = "1"
            placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arrays]
            jax.jit(function).lower(*placed).compile()
            for log in sorted(pathlib.Path(folder).glob("*.ptxas")):
                kernel = re.sub(r"hopper_(\w+)_\d+", r"\1", log.stem)
                found[f"{name}: {kernel}"] = _mosaic_figures(log)
    return found


def _mosaic_figures(log: pathlib.Path) -> dict[str, Any]:
    """Reads ptxas' messages, and what lies beside them. Registers are those of the launch; a warpgroup that computes
    takes others' (`setmaxnreg`)."""
    messages, ptx = log.read_text(), log.with_suffix(".ptx").read_text()
    figures = {
        "registers": int(re.findall(r"Used (\d+) registers", messages)[0]),
        "spilled": sum(map(int, re.findall(r"frame, (\d+) bytes spill stores, (\d+) bytes spill loads", messages)[0])),
        "shared": _shared(log.with_suffix(".mlir-passes.log")),
        "threads": int(re.findall(r"\.(?:reqntid|maxntid) (\d+)", ptx)[0]),
        "serialized": "serialized" in messages,
    }
    return _figures(figures, log.with_suffix(".sass_ctrl").read_text())


def _shared(passes: pathlib.Path) -> int | None:
    """The bytes of shared memory of a launch, from the messages of Mosaic's passes."""
    with passes.open() as lines:
        found = (re.search(r"dynamic_shared_memory_size %c(\d+)_i32", line) for line in lines)
        return next((int(match[1]) for match in found if match), None)


def _figures(figures: dict[str, Any], sass: str) -> dict[str, Any]:
    by_registers = REGISTERS // (-(-figures["registers"] // 8) * 8 * figures["threads"])
    programs = min(by_registers, THREADS // figures["threads"])
    if figures["shared"] is not None:
        programs = min(programs, SHARED // (figures["shared"] + RESERVED))
    return figures | {"programs": programs} | summary(sass)


def table(kernels: dict[str, dict[str, Any]]) -> str:
    """The figures as a table in Markdown."""
    lines = ["| kernel | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name, figures in kernels.items():
        cells = ("" if figures.get(column) is None else str(figures[column]) for column in COLUMNS)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="kernels whose name contains WORD")
    parser.add_argument("--table", action="store_true", help="a table in Markdown in place of JSON")
    options = parser.parse_args(argv)
    find_compiler()
    kernels = triton_code(options.only) | mosaic_code(options.only)
    if not kernels:
        print(f"error: no kernel's name contains {options.only!r}", file=sys.stderr)
        return 2
    if options.table:
        print(table(kernels))
    else:
        import jax

        print(json.dumps({"benchmark": "sass", "target": "sm_90a", "jax": jax.__version__, "kernels": kernels}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
