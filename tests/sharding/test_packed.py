"""Long packed rows are attended to by tiles: the same as whole ones, and nothing as large as all scores exists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.kernels.attention import LONG_ROW, Mask, attention, packed_attention

B, N, K, H = 2, 4, 2, 8


def rows(tokens):
    """Segments and branches `[B, tokens]`: prompts with responses, the same numbers in both rows, padding."""
    rng = np.random.default_rng(0)
    segments, branches = np.zeros((2, B, tokens), np.int32)
    for row in range(B):
        column, number = 5 * row, 1
        while column + 60 < tokens:
            for branch in range(rng.integers(1, 5)):
                end = column + rng.integers(1, 15)
                segments[row, column:end], branches[row, column:end] = number, branch
                column = end
            number += 1
    return jnp.asarray(segments), jnp.asarray(branches)


def grads(attend, tokens):
    rng = np.random.default_rng(1)
    qkv = [jnp.asarray(rng.normal(size=(B, tokens, heads, H)), jnp.float32) for heads in (N, K, K)]
    loss = lambda *qkv: (jnp.sum(jnp.sin(out := attend(*qkv))), out)  # noqa: E731
    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*qkv)
    return out, *grads


@pytest.mark.parametrize("tokens", [LONG_ROW - 1, LONG_ROW + 61])
def test_equals_whole_rows(tokens):
    segments, branches = rows(tokens)
    want = grads(lambda q, k, v: attention(q, k, v, Mask(segments, branches)), tokens)
    got = grads(lambda q, k, v: packed_attention(segments, branches)(q, k, v), tokens)
    for have, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(have, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert not np.asarray(got[0])[np.asarray(segments) == 0].any()


def test_long_rows_have_no_whole_scores():
    tokens = 2 * LONG_ROW
    segments, branches = rows(tokens)
    qkv = [jax.ShapeDtypeStruct((B, tokens, heads, H), jnp.float32) for heads in (N, K, K)]

    def loss(q, k, v):
        return jnp.sum(packed_attention(segments, branches)(q, k, v))

    temporaries = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*qkv).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 4 * B * N * tokens * tokens / 4
