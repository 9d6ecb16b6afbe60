"""Measures attention over packed rows of Qwen2.5-7B beside cuDNN and PyTorch, and other settings of our kernels.

The cases: one sequence, many, prompts with branches, and a long row (forward only). cuDNN and PyTorch compute the same
sequences as a batch under a causal mask, without branches. Each of our kernels is timed at one sequence, under the
settings of `sharding.kernels.flash.tiling_of` (`chosen`) and others.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import part

import attention as packed  # isort: skip  # benchmarks/attention.py, which `part` puts in front of this file

# Queries, keys, warps and stages: the settings that ptxas fits into registers, or nearly.
SETTINGS = {
    "forward": [
        (128, 64, 8, 2),
        (128, 64, 8, 4),
        (128, 32, 8, 4),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 32, 4, 4),
    ],
    "key_gradients": [
        (16, 128, 8, 3),
        (16, 128, 8, 4),
        (32, 128, 8, 3),
        (32, 64, 8, 3),
        (32, 64, 4, 3),
        (64, 64, 8, 2),
        (64, 64, 8, 3),
        (64, 128, 8, 2),
    ],
    "query_gradients": [(128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
}


def cases(dry: bool) -> dict[str, packed.Case]:
    length, heads = (1, (4, 2, 16)) if dry else (256, (28, 4, 128))
    case = functools.partial(packed.Case, heads=heads[0], kv_heads=heads[1], head_size=heads[2])
    return {
        "one sequence": case("1 x 16384", 1, 64 * length),
        "many sequences": case("16 x 1024", 16, 4 * length),
        "branches": case(
            "4 prompts of 1024 with 6 branches of 512", 4, 4 * length, branches=6, branch_length=2 * length
        ),
        "long": case("1 x 65536", 1, 256 * length),
    }


def measure(figures: part.Figures, dry: bool) -> None:
    dtype, repeats = ("float32", 1) if dry else ("bfloat16", 5)
    for name, case in cases(dry).items():
        figures.attempt(name, functools.partial(_ours, case, dtype, repeats))
    for name in ("one sequence", "many sequences"):
        case = cases(dry)[name]
        figures.attempt(f"{name}, cuDNN", functools.partial(_cudnn, case, dtype, repeats))
        figures.attempt(f"{name}, PyTorch", lambda case=case: packed.rates(case, packed.torch_runs(case), repeats, 10))
    if not dry:  # the portable form has no settings
        for kernel in SETTINGS:
            figures.attempt(f"settings of {kernel}", functools.partial(_settings, kernel, cases(dry)["one sequence"]))


def _ours(case: packed.Case, dtype: str, repeats: int) -> dict[str, object]:
    runs, kernel = packed.ours(case, dtype)
    if case.name == "1 x 65536":
        del runs["both"]
    return {"case": case.name, "kernel": kernel, **packed.rates(case, runs, repeats, 10 if "both" in runs else 2)}


def _cudnn(case: packed.Case, dtype: str, repeats: int) -> dict[str, float]:
    import jax

    arrays, _ = packed.row(case, dtype)
    batch = [x.reshape(case.sequences, case.length, *x.shape[2:]) for x in arrays]
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if dtype == "bfloat16" else None
    )
    return packed.rates(case, packed.jax_runs(attend, batch), repeats, 10)


def _settings(kernel: str, case: packed.Case) -> dict[str, object]:
    """The milliseconds of a kernel under each of its settings, or why it cannot run under them."""
    import jax
    from triton_attention import without_hopper

    from sharding.kernels import flash
    from sharding.mesh import Tiling

    (q, k, v, dout), mask = packed.row(case, "bfloat16")
    segments, chosen_for = mask.segments, flash.tiling_of

    def visits(segments: jax.Array) -> Any:
        return flash.visits_of(segments, None, True, q)

    with without_hopper():
        out, kept = jax.jit(lambda q, k, v: flash.forward(q, k, v, visits(segments)))(q, k, v)

    arrays = (q, k, v, segments) if kernel == "forward" else (q, k, v, out, kept[4], segments, dout)

    def function(*arrays: jax.Array) -> object:
        if kernel == "forward":
            q, k, v, segments = arrays
            return flash.forward(q, k, v, visits(segments))[0]
        *kept, segments, dout = arrays
        query_gradients, *key_gradients = flash.backward((*kept, visits(segments)), dout)[:3]
        return query_gradients if kernel == "query_gradients" else key_gradients  # an unused kernel is left out

    def compiled(tiling: Tiling | None) -> concurrent.futures.Future[Callable[..., object]]:
        """The program under some settings: it is traced here, which looks the settings up, and compiled in a thread."""
        flash.tiling_of = lambda name, *about: tiling if tiling and name == kernel else chosen_for(name, *about)
        try:
            traced = jax.jit(lambda *arrays: function(*arrays)).trace(*arrays)
        finally:
            flash.tiling_of = chosen_for
        return pool.submit(lambda: traced.lower().compile())

    with without_hopper(), concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = {"chosen": compiled(None)}
        for setting in SETTINGS[kernel]:
            programs[" ".join(map(str, setting))] = compiled(Tiling(setting[:2], *setting[2:]))
    found: dict[str, object] = {"chosen is": str(dataclasses.astuple(chosen_for(kernel, q.dtype, q.shape[-1], 90)))}
    for name, program in programs.items():
        try:
            run = functools.partial(program.result(), *arrays)
            found[name] = round(1e3 * part.seconds(run, jax.block_until_ready, 10), 3)
        except Exception as error:  # too many registers, too much shared memory
            found[name] = f"{type(error).__name__}: {error}"[:120]
    return found


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
