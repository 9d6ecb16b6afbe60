"""The values of attention's kernels on Hopper, before `attention_candidates` times them.

`ours`, which is Mosaic's there, and `triton`: the errors of output and gradients in rows of 2,000 tokens with prompts,
branches and padding, over the largest value of the portable form in float32; two runs must have the same bits. `two
calls`: outputs of `merged_attention`, by XLA in float32 and by cuDNN in bfloat16, whose log-sum-exp JAX rounds; no
bound holds for cuDNN's error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import part

MOST = 0.012  # errors in bfloat16
ROW = [[300, 150, 77, 130], 413, [90, 200, 129, 61], 250]  # lengths: a prompt and its branches, or a sequence
TOKENS = 2000  # no multiple of a tile


def measure(figures: part.Figures, dry: bool) -> None:
    for name in [] if dry else ["ours", "triton"]:
        figures.attempt(name, functools.partial(_checked, name))
    figures.attempt("two calls", functools.partial(_two_calls, dry))


def _checked(name: str) -> dict[str, dict[str, Any]]:
    """The errors of a form in two rows, for two sizes of heads."""
    found = {f"heads of {size}": _values(name, size) for size in (128, 64)}
    if not all(figures["right"] for figures in found.values()):
        raise part.CheckError(f"errors above {MOST}, or other bits the second time", found)
    return found


def _values(name: str, size: int) -> dict[str, Any]:
    import flash_program
    import jax
    import jax.numpy as jnp
    from triton_attention import without_hopper

    from sharding.kernels.attention import Mask, attention

    *qkvd, segments, branches, _ = flash_program.case("bfloat16", 28, 4, size, True, [ROW, ROW[::-1]], TOKENS)

    def attend(form: str, q: Any, k: Any, v: Any) -> Any:
        mask = Mask(segments, branches)
        with without_hopper() if form == "triton" else contextlib.nullcontext():
            return attention(q, k, v, mask.dense() if form == "portable" else mask)

    @functools.partial(jax.jit, static_argnums=0)
    def passes(form: str, q: Any, k: Any, v: Any, dout: Any) -> Any:
        with jax.default_matmul_precision("highest"):  # a GPU would multiply float32 as TF32
            out, pull = jax.vjp(functools.partial(attend, form), q, k, v)
            return out, *pull(dout)

    want = passes("portable", *[x.astype(jnp.float32) for x in qkvd])
    first, second = passes(name, *qkvd), passes(name, *qkvd)
    errors = [relative_error(*pair) for pair in zip(first, want, strict=True)]
    equal = all(map(bool, map(jnp.array_equal, first, second)))
    return {"errors": errors, "equal bits": equal, "right": equal and all(found <= MOST for found in errors)}


def relative_error(got: Any, want: Any) -> float:
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
            found[name] = relative_error(run(*[x[0].astype(dtype) for x in (q, k, v)]), want)
    return found


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
