"""Attention against numpy loops: branches of a shared prompt, grouped heads, padding, chunks of queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.kernels.attention import Mask, attention

B, T, N, K, H = 2, 11, 6, 2, 8
SEGMENTS = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]])
BRANCHES = np.array([[0, 0, 1, 1, 2, 2, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 3]])


def draw(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype) for heads in (N, K, K)]


def mask(causal=True):
    return Mask(jnp.asarray(SEGMENTS), jnp.asarray(BRANCHES), causal)


def allowed(b, t, s, causal=True):
    same = SEGMENTS[b, s] == SEGMENTS[b, t] != 0
    return same and BRANCHES[b, s] in (0, BRANCHES[b, t]) and (s <= t or not causal)


def by_loops(q, k, v, causal):
    out = np.zeros((B, T, N, H))
    for b, t, n in np.ndindex(B, T, N):
        keys = [s for s in range(T) if allowed(b, t, s, causal)]
        if keys:
            head = n // (N // K)
            scores = np.array([np.dot(q[b, t, n], k[b, s, head]) for s in keys], np.float64) / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            out[b, t, n] = (weights / weights.sum()) @ np.asarray(v[b, keys, head], np.float64)
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("whole_scores", [1 << 26, B * N * T * 4, 1])
def test_equals_loops(causal, whole_scores):
    q, k, v = draw()
    expected = by_loops(np.asarray(q), np.asarray(k), np.asarray(v), causal)
    described = attention(q, k, v, mask(causal), whole_scores=whole_scores)
    dense = attention(q, k, v, mask(causal).dense(), whole_scores=whole_scores)
    np.testing.assert_allclose(described, expected, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(described, dense)
    assert not np.asarray(described)[SEGMENTS == 0].any()


def test_chunked_gradients_equal_whole_ones():
    def grads(whole_scores):
        loss = lambda q, k, v: jnp.sum(jnp.sin(attention(q, k, v, mask(), whole_scores=whole_scores)))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2)))(*draw())

    for got, want in zip(grads(B * N * T * 3), grads(1 << 26), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_chunks_bound_the_memory():
    tokens = 1024
    qkv = [jnp.zeros((1, tokens, 4, H))] * 3
    segments = jnp.ones((1, tokens), jnp.int32)
    scores = 4 * tokens * tokens

    def temp(whole_scores):
        loss = lambda q, k, v: jnp.sum(attention(q, k, v, Mask(segments), whole_scores=whole_scores))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*qkv).compile().memory_analysis().temp_size_in_bytes

    assert temp(scores) >= 4 * scores
    assert temp(scores // 16) < 4 * scores / 3


def test_bfloat16_scores_are_float32():
    q, k, v = draw(jnp.bfloat16)
    wide_q, wide_k, wide_v = (np.asarray(x.astype(jnp.float32)) for x in (q, k, v))
    wide = by_loops(wide_q, wide_k, wide_v, True)
    got = attention(q, k, v, mask())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), wide, rtol=0, atol=2**-6)
