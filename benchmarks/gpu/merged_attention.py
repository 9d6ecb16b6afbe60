"""Attention over a packed row with shared prompts in two calls of a library's attention, merged by log-sum-exp.

Libraries know batches of sequences, each under a causal mask or none. The first call computes every run (a prompt, or a
branch) as a causal sequence of its own; the second lets the branches of each prompt look at their prompt. A query of a
branch has an output and a log of the sum of exponentiated scores (lse) from each, `o` and `l`: the whole is
`(exp(l1) o1 + exp(l2) o2) / (exp(l1) + exp(l2))`. Sequences are filled up to the longest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

# (q [B, T, N, H], k, v [B, S, K, H], real queries [B], real keys [B], causal) -> out [B, T, N, H], lse [B, T, N]
Call = Callable[[jax.Array, jax.Array, jax.Array, np.ndarray, np.ndarray, bool], tuple[jax.Array, jax.Array]]
EMPTY = -1e30  # the lse of a query that a call does not compute


@dataclasses.dataclass(frozen=True)
class Layout:
    """The columns of a row in the sequences of the two calls, -1 behind a sequence's end."""

    runs: np.ndarray  # i32 [runs, longest run]
    prompts: np.ndarray  # i32 [prompts with branches, longest prompt]
    branches: np.ndarray  # i32 [prompts with branches, most tokens of a prompt's branches]


def layout_of(segments: np.ndarray, branches: np.ndarray) -> Layout:
    """The sequences of a row, by the segment and the branch of each token, `[T]`; a prompt is before its branches."""
    runs, prompts, theirs = [], [], []
    for segment in np.unique(segments[segments != 0]):
        columns = np.flatnonzero(segments == segment)
        of = branches[columns]
        runs += [columns[of == branch] for branch in np.unique(of)]
        if (of == 0).any() and (of != 0).any():
            prompts.append(columns[of == 0])
            theirs.append(columns[of != 0])
    return Layout(_filled(runs), _filled(prompts), _filled(theirs))


def _filled(sequences: Sequence[np.ndarray]) -> np.ndarray:
    table = np.full((len(sequences), max(map(len, sequences), default=0)), -1, np.int32)
    for line, columns in zip(table, sequences, strict=True):
        line[: len(columns)] = columns
    return table


def merged(q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout, call: Call) -> jax.Array:
    """The outputs `[T, N, H]` of q `[T, N, H]`, k and v `[T, K, H]`; padding gives zeros."""
    out, lse = _of_row(q, k, v, layout.runs, layout.runs, call, True)
    if not layout.prompts.size:
        return out.astype(q.dtype)
    more, more_lse = _of_row(q, k, v, layout.branches, layout.prompts, call, False)
    peak = jnp.maximum(lse, more_lse)
    share, more_share = jnp.exp(lse - peak), jnp.exp(more_lse - peak)
    out = (out * share[..., None] + more * more_share[..., None]) / (share + more_share)[..., None]
    return out.astype(q.dtype)


def _of_row(
    q: jax.Array, k: jax.Array, v: jax.Array, queries: np.ndarray, keys: np.ndarray, call: Call, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """The outputs and the lse of a call in the row's order, float32; zeros and `EMPTY` for tokens without a query."""
    found, lse = call(
        q[queries], k[keys], v[keys], (queries >= 0).sum(1, dtype=np.int32), (keys >= 0).sum(1, dtype=np.int32), causal
    )
    real = queries >= 0
    out = jnp.zeros(q.shape, jnp.float32).at[queries[real]].set(found[real].astype(jnp.float32))
    return out, jnp.full(q.shape[:2], EMPTY, jnp.float32).at[queries[real]].set(lse[real].astype(jnp.float32))


def library(implementation: Literal["xla", "cudnn"]) -> Call:
    """The call of `jax.nn.dot_product_attention`, by "xla" or "cudnn". JAX 0.10 returns cuDNN's lse in the dtype of the
    output, and the gradient of cuDNN's call ignores the lse: only the forward pass can be merged."""

    def call(
        q: jax.Array, k: jax.Array, v: jax.Array, queries: np.ndarray, keys: np.ndarray, causal: bool
    ) -> tuple[jax.Array, jax.Array]:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, query_seq_lengths=queries, key_value_seq_lengths=keys,
            implementation=implementation, return_residual=True,
        )  # fmt: skip

    return call
