"""Measures the gated delta rule in chunks (`sharding/kernels/delta.py`) beside a scan over tokens.

    python benchmarks/deltanet.py                              heads of Qwen3.5-9B on a GPU, an eighth of them on a CPU
    python benchmarks/deltanet.py --tokens 1024 16384 --blocks 8 32 --repeats 3

Prints one JSON line. `tokens` has, for each length, the milliseconds of both forms (`forward_ms`, `both_ms` with the
backward pass: medians of `--repeats`, both forms in turn), the memory that a program takes beside arguments and results
(`temporary_mib`), and `speedup`, the ratio of `both_ms`. `speedup` beside it is the one at 4096 tokens, or else at
the longest. `shared` compares a group of `--responses` in one row, each response a third of its prompt: the prompt once
(`shared`) or before every response (`apart`, `--tokens` at most); `shared_prompt_saving` is the share of time saved.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sharding")]  # also without an installation; the reference

HEADS_9B = (16, 32, 128, 128)  # key heads, value heads, numbers of a key, numbers of a value
Programs = Mapping[str, Callable[[], tuple[Any, Any]]]  # of a form, by name: they are traced when called


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error for settings that cannot work."""
    options = _parser().parse_args(argv)
    if min(*options.tokens, *(options.heads or [1]), *options.blocks, options.repeats, options.responses) < 1:
        print("error: --tokens, --heads, --blocks, --repeats and --responses must be at least 1", file=sys.stderr)
        return 2
    import jax

    gpu = jax.default_backend() == "gpu"
    heads = tuple(options.heads or (HEADS_9B if gpu else (2, 4, 128, 128)))
    if heads[1] % heads[0]:
        print("error: --heads must have a multiple of its key heads as value heads", file=sys.stderr)
        return 2
    dtype = "bfloat16" if gpu else "float32"
    about = {"benchmark": "deltanet", "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    lengths = lengths_table(heads, options.tokens, options.blocks, dtype, options.repeats)
    at = "4096" if "4096" in lengths else max(lengths, key=int)
    shared = sharing(heads, max(options.tokens), options.responses, dtype, options.repeats)
    summary = {"speedup": lengths[at]["speedup"], "shared_prompt_saving": shared["saving"]}
    print(json.dumps(about | {"heads": heads, "dtype": dtype, **summary, "tokens": lengths, "shared": shared}))
    return 0


def lengths_table(
    heads: tuple[int, ...], lengths: Sequence[int], blocks: Sequence[int], dtype: str, repeats: int
) -> dict[str, dict[str, Any]]:
    """The figures of both forms at each length. With several `blocks` the chunked form is measured with each; the
    first is the one that `speedup` is about."""
    table = {}
    for tokens in lengths:
        forms = {name: chunked(heads, [(1, 0, tokens)], dtype, block) for name, block in _names(blocks).items()}
        forms["by_token"] = by_token(heads, tokens, dtype)
        figures = milliseconds(forms, repeats)
        ratio = figures["by_token"]["both_ms"] / figures["chunked"]["both_ms"]
        table[str(tokens)] = {**figures, "speedup": round(ratio, 2)}
    return table


def sharing(heads: tuple[int, ...], tokens: int, responses: int, dtype: str, repeats: int) -> dict[str, Any]:
    """The figures of a group with its prompt once, and with its prompt before each response: at most `tokens`."""
    length = max(tokens // (4 * responses), 1)
    shared = [(1, 0, 3 * length), *((1, branch + 1, length) for branch in range(responses))]
    apart = [(segment + 1, 0, 4 * length) for segment in range(responses)]
    forms = {"shared": chunked(heads, shared, dtype), "apart": chunked(heads, apart, dtype)}
    figures = milliseconds(forms, repeats)
    saving = 1 - figures["shared"]["both_ms"] / figures["apart"]["both_ms"]
    return {"response_tokens": length, **figures, "saving": round(saving, 3)}


def _names(blocks: Sequence[int]) -> dict[str, int]:
    return {"chunked" if i == 0 else f"chunked, blocks of {block}": block for i, block in enumerate(blocks)}


def milliseconds(forms: Mapping[str, Programs], repeats: int) -> dict[str, dict[str, float]]:
    """The median times of each form, which take turns."""
    import jax

    compiled = compile_all({(form, name): programs[name] for form, programs in forms.items() for name in programs})
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in compiled}
    for turn in range(repeats + 1):
        for key, (program, arguments) in compiled.items():
            started = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            if turn:  # the first call warms up
                seconds[key].append(time.perf_counter() - started)
    figures = {}
    for form in forms:
        memory = compiled[form, "both"][0].memory_analysis().temp_size_in_bytes
        times = {f"{name}_ms": round(1e3 * statistics.median(seconds[form, name]), 3) for name in forms[form]}
        figures[form] = {**times, "temporary_mib": round(memory / 2**20, 1)}
    return figures


def compile_all(programs: Mapping[Any, Callable[[], tuple[Any, Any]]]) -> dict[Any, tuple[Any, Any]]:
    """Each program, compiled, with its arguments. They are traced in turn, and compiled at the same time."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        lowered = {name: program() for name, program in programs.items()}
        found = {name: (pool.submit(program.compile), arguments) for name, (program, arguments) in lowered.items()}
        return {name: (program.result(), arguments) for name, (program, arguments) in found.items()}


def chunked(heads: tuple[int, ...], runs: Sequence[tuple[int, int, int]], dtype: str, block: int = 0) -> Programs:
    """The programs of the chunked form over one row of (segment, branch, tokens)."""
    import numpy as np

    from sharding.kernels.delta import BLOCK, DeltaHeads, delta_rule
    from sharding.kernels.runs import packed_runs

    segments, branches, lengths = np.array(runs).T
    table = packed_runs(np.repeat(segments, lengths)[None], np.repeat(branches, lengths)[None])
    sizes = DeltaHeads(*heads)
    return _programs(
        lambda inputs, table: delta_rule(inputs, sizes, table, block=block or BLOCK)[0],
        heads,
        lengths.sum(),
        dtype,
        table,
    )


def by_token(heads: tuple[int, ...], tokens: int, dtype: str) -> Programs:
    import jax.numpy as jnp
    from delta_by_token import delta_by_token

    from sharding.kernels.delta import DeltaHeads, new_state

    sizes = DeltaHeads(*heads)
    state = new_state(sizes, 1, jnp.dtype(dtype))
    return _programs(lambda inputs, state: delta_by_token(inputs, sizes, state)[0], heads, tokens, dtype, state)


def _programs(function: Callable[..., Any], heads: tuple[int, ...], tokens: int, dtype: str, *more: object) -> Programs:
    """Functions that trace the forward pass, or forward and backward pass, and return (program, its arguments)."""
    import jax
    import jax.numpy as jnp

    from sharding.kernels.delta import DeltaHeads, DeltaInputs

    keys = jax.random.split(jax.random.key(0), 5)
    channels = DeltaHeads(*heads).channels
    d_out = jax.random.normal(keys[4], (1, int(tokens), heads[1], heads[3]), jnp.float32)
    inputs = DeltaInputs(
        jax.random.normal(keys[0], (1, int(tokens), channels), dtype),
        -jax.random.uniform(keys[1], (1, int(tokens), heads[1]), jnp.float32, 0.001, 0.5),
        jax.random.uniform(keys[2], (1, int(tokens), heads[1]), jnp.float32),
        jax.random.normal(keys[3], (channels, 4), dtype) * 0.5,
    )

    def forward_and_backward(d_out: jax.Array, inputs: DeltaInputs, *more: object) -> object:
        _, pull = jax.vjp(lambda inputs: function(inputs, *more), inputs)
        return pull(d_out)

    def lowered(function: Callable[..., Any], *arguments: object) -> tuple[Any, Any]:
        arguments = jax.device_put(arguments)
        return jax.jit(function).lower(*arguments), arguments

    return {
        "forward": lambda: lowered(function, inputs, *more),
        "both": lambda: lowered(forward_and_backward, d_out, inputs, *more),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="default: 1024 4096 16384")
    parser.add_argument("--heads", type=int, nargs=4, metavar=("KEY", "VALUE", "H", "J"), help="and their sizes")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8], help="chunks of a block; default: 8")
    parser.add_argument("--responses", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
