"""Compares attention on Hopper: ours in Pallas-Mosaic-GPU beside ours in Triton, cuDNN and PyTorch.

`values` are those of `attention_values`, a process of its own: a kernel that waits for itself holds the GPU until it is
killed. Nothing is timed if ours are wrong.

The cases are one sequence of 1k to 32k tokens, many short sequences, and prompts with branches, with Qwen2.5-7B's
heads. All forms of a case alternate in one run. cuDNN and PyTorch compute the sequences as a batch under a causal mask,
and have no branches. `heads of 256` are Qwen3.5-9B's, which ours computes portably: `wide` is `wide_heads`.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import attention_values as values
import part

import attention as packed  # isort: skip  # benchmarks/attention.py, which `part` puts in front of this file

VALUES_LIMIT = 100.0  # seconds
CANDIDATES = ("triton", "wide", "cudnn", "torch")


def cases(dry: bool) -> dict[str, packed.Case]:
    unit, heads = (4, (4, 2, 64)) if dry else (1024, (28, 4, 128))
    case = functools.partial(packed.Case, heads=heads[0], kv_heads=heads[1], head_size=heads[2])
    found = {f"1 x {n}k": case(f"1 x {n * unit}", 1, n * unit) for n in (1, 4, 16, 32)}
    found["16 x 1k"] = case(f"16 x {unit}", 16, unit)
    found["branches"] = case(
        f"4 prompts of {unit} with 6 branches of {unit // 2}", 4, unit, branches=6, branch_length=unit // 2
    )
    return found


def measure(figures: part.Figures, dry: bool) -> None:
    if not _values(figures, dry):
        return
    figures.attempt("heads of 256", functools.partial(_wide, dry))
    for name, case in cases(dry).items():
        figures.attempt(name, functools.partial(_times, case, forms(case, dry), dry))


def _values(figures: part.Figures, dry: bool) -> bool:
    """Adds the figures of `attention_values`. Returns whether our values are right."""
    from gpu import runner

    with tempfile.TemporaryDirectory(prefix="values-") as logs:
        ended = runner.run("attention_values", VALUES_LIMIT, dict(os.environ), pathlib.Path(logs), dry=dry)
    figures.add(values=ended.figures, **({"values_error": ended.error} if ended.error else {}))
    figures.failed |= bool(ended.error)
    return dry or (ended.figures or {}).get("ours", {}).get("heads of 128", {}).get("right", False)


def forms(case: packed.Case, dry: bool) -> dict[str, Callable[[int], object]]:
    """Functions that run the passes of each form: see `attention.rates`."""
    import jax
    from triton_attention import without_hopper

    dtype = "float32" if dry else "bfloat16"
    runs = dict(packed.ours(case, dtype)[0])
    arrays, _ = packed.row(case, dtype)
    with without_hopper():
        theirs = packed.ours(case, dtype)[0]
        for run in theirs.values():
            run(1)  # compiles
    runs |= {f"triton_{name}": run for name, run in theirs.items()}
    if case.branches:
        return runs
    batch = [x.reshape(case.sequences, case.length, *x.shape[2:]) for x in arrays]
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla" if dry else "cudnn")
    runs |= {f"cudnn_{name}": run for name, run in packed.jax_runs(attend, batch).items()}
    return runs | packed.torch_runs(case)


def _times(case: packed.Case, forms: dict[str, Callable[[int], object]], dry: bool) -> dict[str, object]:
    """The times and rates of each form, and each candidate's times over ours; the errors of forms that cannot run."""
    runs, failed = dict(forms), {}
    for name, run in forms.items():
        try:
            run(1)
        except Exception as error:  # a kernel that this GPU or this version cannot run
            failed[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
            del runs[name]
    calls = 1 if dry else max(min(int(2e13 / case.flops), 50), 2)  # about 30 ms
    figures = packed.rates(case, runs, 1 if dry else 5, calls)
    ratios = {
        f"{form} {which} / ours": round(figures[f"{form}_{which}_ms"] / max(figures[f"{which}_ms"], 1e-3), 3)
        for form in CANDIDATES
        for which in ("forward", "backward")
        if f"{form}_{which}_ms" in figures
    }
    return {"case": case.name, **figures, **ratios, **failed}


def _wide(dry: bool) -> dict[str, object]:
    """Heads of 256, as Qwen3.5-9B has them: ours (portable), by the Triton kernels and by cuDNN. Values of ours and of
    the Triton kernels are compared before."""
    import jax
    import jax.numpy as jnp
    from triton_attention import wide_heads

    from sharding.kernels.attention import packed_attention

    case = packed.Case("1 x 8192, 16/4 heads of 256", 1, 64 if dry else 8192, 16, 4, 16 if dry else 256)
    dtype = "float32" if dry else "bfloat16"
    arrays, mask = packed.row(case, dtype)

    def attend(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return packed_attention(segments, jnp.zeros_like(segments))(q, k, v)

    def wide(*arrays: Any) -> Any:
        with wide_heads():
            return attend(*arrays)

    runs = packed.jax_runs(attend, arrays, mask.segments)
    theirs = packed.jax_runs(wide, arrays, mask.segments)
    out, *grads = theirs["both"](1)
    errors = [
        values.relative_error(x, y.astype(jnp.float32)) for x, y in zip((out, *grads), runs["both"](1), strict=True)
    ]
    if not all(error <= 2 * values.MOST for error in errors):  # both round
        raise part.CheckError(f"heads of 256: errors above {2 * values.MOST}", {"errors": errors})
    runs |= {f"wide_{name}": run for name, run in theirs.items()}
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla" if dry else "cudnn")
    runs |= {f"cudnn_{name}": run for name, run in packed.jax_runs(cudnn, arrays).items()}
    return {"errors": errors, **_times(case, runs, dry)}


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
