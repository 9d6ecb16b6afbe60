"""Compares attention of decoding over gathered pages, as the engine computes it, with Pallas' paged attention.

One new token for each of 64 sequences in one layer with Qwen2.5-7B's heads (28 queries, 4 keys, of 128, bfloat16). The
engine gathers every sequence's pages of 16 tokens into rows as long as the longest sequence, then attends. Its time is
given with the gathering in each token (`gathered`, as with large caches) and without (`attention alone`). Pallas'
`paged_attention` reads pages of 16 or 64 tokens where they lie.

`one long row`: 63 sequences of 1,024 tokens and one of 32,768, beside 64 of 1,024. Times are milliseconds a layer and
token. Results are compared first: `difference` is the largest difference, for normally distributed values.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import part

HEADS, KV_HEADS, HEAD_SIZE, ROWS = 28, 4, 128, 64
ALLOWED = 0.02  # largest difference in bfloat16; its last bit is 0.0078 at values next to 1


def measure(figures: part.Figures, dry: bool) -> None:
    if dry:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    figures.add(device=jax.devices()[0].device_kind, heads=[HEADS, KV_HEADS, HEAD_SIZE])
    rows, unit = (4, 16) if dry else (ROWS, 1024)
    for tokens in (unit // 2, unit, 4 * unit):
        figures.attempt(f"{rows} x {tokens}", functools.partial(_case, [tokens] * rows, dry))
    figures.attempt("one long row", functools.partial(_case, [unit] * (rows - 1) + [32 * unit], dry))


def _case(lengths: list[int], dry: bool) -> dict[str, Any]:
    """The milliseconds of each form, and the difference of its results to the first form's."""
    import jax
    import jax.numpy as jnp

    forms = {"gathered": _gathered(lengths, alone=False), "attention alone": _gathered(lengths, alone=True)}
    for tokens in (16, 64):
        forms[f"Pallas, pages of {tokens}"] = functools.partial(_pallas, lengths, tokens, dry)()
    found: dict[str, Any] = {}
    expected = jax.jit(forms["gathered"][0])(*forms["gathered"][1])
    for name, (function, arrays) in forms.items():
        try:
            program = jax.jit(function)
            difference = float(jnp.max(jnp.abs(program(*arrays).astype(jnp.float32) - expected.astype(jnp.float32))))
            milliseconds = 1e3 * part.seconds(
                functools.partial(program, *arrays), jax.block_until_ready, 1 if dry else 20
            )
            found[name] = part.rounded({"ms": milliseconds, "difference": difference})
        except Exception as error:  # a kernel that this GPU or this version cannot run
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    differences = [form.get("difference", 0.0) for form in found.values()]
    if not max(differences) <= ALLOWED:
        raise part.CheckError(f"results differ by {max(differences)}", found)
    return found


def _entries(length: int, row: int) -> Any:
    """Keys and values `[2, K, S, H]` of a row, the same for every form and size of pages."""
    import jax

    return jax.random.normal(jax.random.key(row), (2, KV_HEADS, length, HEAD_SIZE), "bfloat16")


def _queries(rows: int) -> Any:
    import jax

    return jax.random.normal(jax.random.key(0), (rows, HEADS, HEAD_SIZE), "bfloat16")


def _pages(lengths: list[int], tokens: int) -> tuple[Any, Any]:
    """Returns keys and values `[2, C, K, S, H]` in pages of `tokens` tokens, and the page numbers `[B, V]` of the rows.
    Shorter rows end with zeros, the number of the first page."""
    import jax.numpy as jnp
    import numpy as np

    pages, table, used = [], np.zeros((len(lengths), -(-max(lengths) // tokens)), np.int32), 0
    for row, length in enumerate(lengths):
        count = -(-length // tokens)
        entries = jnp.pad(_entries(length, row + 1), ((0, 0), (0, 0), (0, count * tokens - length), (0, 0)))
        pages.append(jnp.moveaxis(entries.reshape(2, KV_HEADS, count, tokens, HEAD_SIZE), 2, 1))
        table[row, :count] = np.arange(used, used + count)
        used += count
    return jnp.concatenate(pages, axis=1), jnp.asarray(table)


def _gathered(lengths: list[int], *, alone: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The engine's attention. It also takes the entries that this round added: here one masked entry a sequence."""
    import jax.numpy as jnp

    from rollout.cache import KVCache
    from rollout.programs import cached_attention
    from rollout.slots import PAGE_TOKENS

    (k_CKSH, v_CKSH), table = _pages(lengths, PAGE_TOKENS)
    cache = KVCache(k_CKSH[None], v_CKSH[None])
    length_B, queries_BNH = jnp.asarray(lengths, jnp.int32), _queries(len(lengths))
    none = jnp.zeros((len(lengths), KV_HEADS, 1, HEAD_SIZE), "bfloat16")

    def attend(queries_BNH: Any, rows: Any) -> Any:
        return cached_attention(queries_BNH[:, None], rows, (none, none), length_B, jnp.int32(-1))[:, 0]

    if alone:
        return attend, (queries_BNH, cache.view(table, 0))
    return lambda queries_BNH, cache, table: attend(queries_BNH, cache.view(table, 0)), (queries_BNH, cache, table)


def _pallas(lengths: list[int], tokens: int, dry: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    (k_CKSH, v_CKSH), table = _pages(lengths, tokens)
    k_KCSH, v_KCSH = jnp.swapaxes(k_CKSH, 0, 1), jnp.swapaxes(v_CKSH, 0, 1)
    # Splits run side by side; each has equally many pages, and reads eight pages at once.
    splits = 1 if dry else 16
    block = 1 if dry else 8
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (splits * block))))
    length_B = jnp.asarray(lengths, jnp.int32)

    def attend(queries_BNH: Any, k_KCSH: Any, v_KCSH: Any, table: Any) -> Any:
        scaled = queries_BNH * jnp.asarray(HEAD_SIZE**-0.5, queries_BNH.dtype)  # the kernel does not scale
        return paged_attention(
            scaled, k_KCSH, v_KCSH, table, length_B, pages_per_compute_block=block, k_splits=splits, interpret=dry
        )

    return attend, (_queries(len(lengths)), k_KCSH, v_KCSH, table)


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
