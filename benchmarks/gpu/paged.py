"""Compares attention of decoding in place, as the engine computes it, with gathered pages and with Pallas' kernel.

One new token for each of 64 sequences in one layer with Qwen2.5-7B's heads (28 queries, 4 keys, of 128, bfloat16).
`in place` is `sharding.kernels.paged` with the engine's pages of 16 tokens, by its Triton kernel; `portable` is its
other form. `gathered` copies every sequence's pages into rows as long as the longest sequence, then attends, as the
engine did before; `attention alone` is without the copy. Pallas' `paged_attention` has pages of 16 tokens, too; pages
of 64 needed more shared memory than an H100 has.

`one long row`: 63 sequences of 1,024 tokens and one of 32,768, beside 64 of 1,024. Times are milliseconds a layer and
token. Results are compared first: `difference` is the largest difference, for normally distributed values. `floor_ms`
is the time of reading all keys and values at the memory's full speed (H100: 3.35 TB/s).

Predicted for `in place` on an H100: 64 x 4096: 0.19-0.23 ms (floor 0.160; gathered 0.615 and Pallas 0.282 measured);
64 x 1024: 0.055-0.075 (floor 0.040); one long row: 0.08-0.12 (floor 0.058; gathered 3.33, Pallas 0.182).
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
    from gpu import random_qwen

    from rollout.slots import PAGE_TOKENS

    forms = {
        "gathered": _gathered(lengths, alone=False),
        "attention alone": _gathered(lengths, alone=True),
        "in place": _in_place(lengths),
        "portable": _in_place(lengths, portable=True),
        "Pallas": _pallas(lengths, PAGE_TOKENS, dry),
    }
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
    read = 2 * 2 * KV_HEADS * HEAD_SIZE * sum(lengths)
    found["in place"] |= part.rounded({"floor_ms": 1e3 * read / random_qwen.bandwidth()})
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
    """Attention over a copy of all pages, in rows of the longest sequence."""
    import jax
    import jax.numpy as jnp

    from rollout.slots import PAGE_TOKENS
    from sharding.kernels.paged import gathered

    (k_CKSH, v_CKSH), table = _pages(lengths, PAGE_TOKENS)
    length_B, queries_BNH = jnp.asarray(lengths, jnp.int32), _queries(len(lengths))

    def rows(k_CKSH: Any, v_CKSH: Any, table: Any) -> tuple[Any, Any]:
        return gathered(k_CKSH[None], table, 0), gathered(v_CKSH[None], table, 0)

    def attend(queries_BNH: Any, rows: tuple[Any, Any]) -> Any:
        k_BKSH, v_BKSH = rows
        queries_BKGH = queries_BNH.reshape(len(lengths), KV_HEADS, -1, HEAD_SIZE)
        scores = jnp.einsum("BKGH,BKSH->BKGS", queries_BKGH, k_BKSH, preferred_element_type=jnp.float32)
        real_BS = jnp.arange(k_BKSH.shape[2])[None, :] < length_B[:, None]
        scores = jnp.where(real_BS[:, None, None], scores * HEAD_SIZE**-0.5, -1e30)
        probs = jax.nn.softmax(scores, axis=-1).astype(queries_BNH.dtype)
        return jnp.einsum("BKGS,BKSH->BKGH", probs, v_BKSH).reshape(queries_BNH.shape)

    if alone:
        return attend, (queries_BNH, jax.jit(rows)(k_CKSH, v_CKSH, table))
    return lambda queries_BNH, *pages: attend(queries_BNH, rows(*pages)), (queries_BNH, k_CKSH, v_CKSH, table)


def _in_place(lengths: list[int], *, portable: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import jax.numpy as jnp

    from rollout.slots import PAGE_TOKENS
    from sharding.kernels.paged import paged_attention
    from sharding.mesh import Target, compiling_for, target

    (k_CKSH, v_CKSH), table = _pages(lengths, PAGE_TOKENS)
    length_B = jnp.asarray(lengths, jnp.int32)
    chosen = Target(target().platform) if portable else target()  # without capability, no kernel is chosen

    def attend(queries_BNH: Any, k_CKSH: Any, v_CKSH: Any, table: Any) -> Any:
        with compiling_for(chosen):
            return paged_attention(queries_BNH, k_CKSH[None], v_CKSH[None], table, length_B, 0)

    return attend, (_queries(len(lengths)), k_CKSH, v_CKSH, table)


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
