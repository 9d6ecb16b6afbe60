"""Measures the gated delta rule at the heads of Qwen3.5-9B, in chunks beside a scan over tokens, and its errors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import part

import deltanet as delta  # isort: skip  # benchmarks/deltanet.py, which `part` puts in front of this file


# (chunks of a block, chunks of an iteration of the loop over states)
SETTINGS = ((8, 8), (32, 1), (32, 8), (64, 8))


def measure(figures: part.Figures, dry: bool) -> None:
    heads = (1, 2, 8, 8) if dry else delta.HEADS_9B
    lengths, dtype, repeats = ((96,), "float32", 1) if dry else ((4096, 1024, 16384), "bfloat16", 3)
    figures.add(heads=heads, dtype=dtype)
    figures.attempt("errors", lambda: _errors(heads, 96 if dry else 2048))
    for tokens in lengths:
        table = functools.partial(delta.lengths_table, heads, [tokens], [8], dtype, repeats)
        figures.attempt(f"{tokens} tokens", lambda table=table: next(iter(table().values())))
    figures.attempt("shared", lambda: delta.sharing(heads, lengths[-1], 8, dtype, repeats))
    figures.attempt("inverse", lambda: _inverses(8 if dry else 8192))
    figures.attempt("settings", lambda: _settings(heads, lengths[0], dtype, SETTINGS[:1] if dry else SETTINGS, repeats))


def _settings(
    heads: tuple[int, ...], tokens: int, dtype: str, settings: Sequence[tuple[int, int]], repeats: int
) -> dict[str, object]:
    """The figures of the chunked form under other settings."""
    from sharding.kernels import delta as kernel

    def under(unroll: int, program: Callable[[], tuple]) -> tuple:
        kernel.UNROLL = unroll
        return program()

    forms = {}
    for block, unroll in settings:
        program = delta.chunked(heads, [(1, 0, tokens)], dtype, block)["both"]
        forms[f"blocks of {block}, {unroll} an iteration"] = {"both": functools.partial(under, unroll, program)}
    return delta.milliseconds(forms, repeats)


def _inverses(systems: int) -> dict[str, float]:
    """The milliseconds of the inverses of triangular systems of a chunk: by halves, and by the triangular solver."""
    import jax
    import jax.numpy as jnp

    from sharding.kernels import delta as kernel

    system = jnp.tril(jax.random.normal(jax.random.key(0), (systems, 64, 64)) * 0.1, -1)

    def solver(system: jax.Array) -> jax.Array:
        eye = jnp.broadcast_to(jnp.eye(64), system.shape)
        return jax.lax.linalg.triangular_solve(system + eye, eye, left_side=True, lower=True, unit_diagonal=True)

    forms = {"by halves": jax.jit(kernel._inverse), "solver": jax.jit(solver)}
    times = {
        name: 1e3 * part.seconds(functools.partial(form, system), jax.block_until_ready, 5)
        for name, form in forms.items()
    }
    return part.rounded(times)


def _errors(heads: tuple[int, ...], tokens: int) -> dict[str, float]:
    """The largest difference between both forms, in float32, of results and of gradients, over the largest value."""
    import jax
    import numpy as np

    forms = {"chunked": delta.chunked(heads, [(1, 0, tokens)], "float32")}
    forms["by_token"] = delta.by_token(heads, tokens, "float32")
    names = ("forward", "both")
    programs = delta.compile_all({(form, name): forms[form][name] for form in forms for name in names})
    results = {
        key: jax.device_get(jax.tree.leaves(program(*arguments))) for key, (program, arguments) in programs.items()
    }
    found = {}
    for name in names:
        pairs = zip(results["chunked", name], results["by_token", name], strict=True)
        found[name] = max(float(np.abs(ours - exact).max() / np.abs(exact).max()) for ours, exact in pairs)
    if max(found.values()) > 1e-5:
        raise part.CheckError("the forms differ by more than 1e-5", found)
    return found


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
