"""Chooses a kernel of attention for Hopper: ours in Triton beside ours in Pallas-Mosaic-GPU, cuDNN and PyTorch.

`values`: the errors of a candidate's output and gradients in rows of 2,000 tokens with prompts, branches and padding,
over the largest value of the portable form in float32; two runs must have the same bits. A candidate that fails there
is not timed. `two calls`: outputs of `merged_attention`, by XLA in float32 and by cuDNN in bfloat16, whose log-sum-exp
JAX rounds; cuDNN's error is printed only.

The cases are one sequence of 1k to 32k tokens, many short sequences, and prompts with branches, with Qwen2.5-7B's
heads. All forms of a case alternate in one run. cuDNN and PyTorch compute the sequences as a batch under a causal mask,
and have no branches. `heads of 256` are Qwen3.5-9B's, which ours computes portably: `wide` is `wide_heads`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import part

import attention as packed  # isort: skip  # benchmarks/attention.py, which `part` puts in front of this file

MOST = 0.012  # errors in bfloat16
ROW = [[300, 150, 77, 130], 413, [90, 200, 129, 61], 250]  # lengths: a prompt and its branches, or a sequence
TOKENS = 2000  # no multiple of a tile
CANDIDATES = ("mosaic", "wide", "cudnn", "torch")


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
    checked: dict[str, bool] = {}
    for name in [] if dry else ["ours", "mosaic"]:
        figures.attempt(f"values, {name}", functools.partial(_checked, name, checked))
    figures.attempt("values, two calls", functools.partial(_two_calls, dry))
    for name, case in cases(dry).items():
        figures.attempt(name, functools.partial(_times, case, forms(case, dry, checked.get("mosaic", False)), dry))
    figures.attempt("heads of 256", functools.partial(_wide, dry))


def forms(case: packed.Case, dry: bool, mosaic: bool) -> dict[str, Callable[[int], object]]:
    """Functions that run the passes of each form: see `attention.rates`."""
    import jax

    dtype = "float32" if dry else "bfloat16"
    runs = dict(packed.ours(case, dtype)[0])
    arrays, mask = packed.row(case, dtype)
    if mosaic:
        theirs = packed.jax_runs(_mosaic, arrays, mask.segments, mask.branches)
        runs |= {f"mosaic_{name}": run for name, run in theirs.items()}
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
    """Heads of 256, as Qwen3.5-9B has them: ours (portable), by the Triton kernels, by Pallas-Mosaic-GPU (forward only)
    and by cuDNN. The values of the first two are compared before."""
    import jax
    import jax.numpy as jnp
    from wide_heads import wide_heads

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
    errors = [_error(x, y.astype(jnp.float32)) for x, y in zip((out, *grads), runs["both"](1), strict=True)]
    if not all(error <= 2 * MOST for error in errors):  # both round
        raise part.CheckError(f"heads of 256: errors above {2 * MOST}", {"errors": errors})
    runs |= {f"wide_{name}": run for name, run in theirs.items()}
    if not dry:
        runs["mosaic_forward"] = packed.jax_runs(_mosaic, arrays, mask.segments, None)["forward"]
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla" if dry else "cudnn")
    runs |= {f"cudnn_{name}": run for name, run in packed.jax_runs(cudnn, arrays).items()}
    return {"errors": errors, **_times(case, runs, dry)}


def _mosaic(q: Any, k: Any, v: Any, segments: Any, branches: Any) -> Any:
    import mosaic_attention
    import mosaic_gradients

    return mosaic_gradients.attend(q, k, v, mosaic_attention.visits_of(segments, branches, True, q.shape[-1]))


def _checked(name: str, checked: dict[str, bool]) -> dict[str, object]:
    """The errors of a form in two rows, one of them with heads of 64."""
    found: dict[str, object] = {}
    for size in (64, 128):
        found[f"heads of {size}"] = figures = _values(name, size)
        if not (all(error <= MOST for error in figures["errors"]) and figures["equal bits"]):
            raise part.CheckError(f"heads of {size}: errors above {MOST}, or other bits the second time", found)
    checked[name] = True
    return found


def _values(name: str, size: int) -> dict[str, Any]:
    import flash_program
    import jax
    import jax.numpy as jnp

    from sharding.kernels.attention import Mask, attention

    *qkvd, segments, branches, _ = flash_program.case("bfloat16", 28, 4, size, True, [ROW, ROW[::-1]], TOKENS)

    def attend(form: str, q: Any, k: Any, v: Any) -> Any:
        if form == "mosaic":
            return _mosaic(q, k, v, segments, branches)
        mask = Mask(segments, branches)
        return attention(q, k, v, mask.dense() if form == "portable" else mask)

    @functools.partial(jax.jit, static_argnums=0)
    def passes(form: str, q: Any, k: Any, v: Any, dout: Any) -> Any:
        with jax.default_matmul_precision("highest"):  # a GPU would multiply float32 as TF32
            out, pull = jax.vjp(functools.partial(attend, form), q, k, v)
            return out, *pull(dout)

    want = passes("portable", *[x.astype(jnp.float32) for x in qkvd])
    first, second = passes(name, *qkvd), passes(name, *qkvd)
    errors = [_error(*pair) for pair in zip(first, want, strict=True)]
    return {"errors": errors, "equal bits": all(map(bool, map(jnp.array_equal, first, second)))}


def _error(got: Any, want: Any) -> float:
    """The largest error over the largest value, in three digits."""
    import jax.numpy as jnp

    return float(f"{float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want).max()):.3g}")


def _two_calls(dry: bool) -> dict[str, float]:
    """The largest errors of outputs merged by log-sum-exp, by XLA in float32 and by cuDNN in bfloat16."""
    import flash_program
    import jax
    import numpy as np
    from merged_attention import layout_of, library, merged

    from sharding.kernels.attention import Mask, attention

    heads = (4, 2, 16) if dry else (28, 4, 128)
    q, k, v, _, segments, branches, _ = flash_program.case("float32", *heads, True, [ROW], TOKENS)
    layout = layout_of(np.asarray(segments[0]), np.asarray(branches[0]))
    found = {}
    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda q, k, v: attention(q, k, v, Mask(segments, branches).dense()))(q, k, v)[0]
        for name, dtype in [("xla", "float32")] if dry else [("xla", "float32"), ("cudnn", "bfloat16")]:
            run = jax.jit(functools.partial(merged, layout=layout, call=library(name)))
            found[name] = _error(run(*[x[0].astype(dtype) for x in (q, k, v)]), want)
    return found


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
