"""Attention against numpy loops: branches of a shared prompt, grouped heads, padding, chunks of queries; long rows by
tiles, and segments by blocks, are the same as whole ones, and nothing as large as all scores exists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from sharding.kernels.attention import LONG_ROW, Mask, attention, packed_attention, segment_attention

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


@pytest.mark.medium
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


def value_and_grads(attend, *qkv):
    """Output, and gradients of a loss that weighs every value differently."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=qkv[0].shape), jnp.float32)
    out, pull = jax.vjp(attend, *qkv)
    return out, *pull(weights)


def assert_equal(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


def temporaries(attend, *arguments):
    """Bytes of a compiled program of gradients of the first three arguments."""
    gradients = jax.grad(lambda *arguments: jnp.sum(attend(*arguments)), (0, 1, 2))
    return jax.jit(gradients).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_chunked_gradients_equal_whole_ones():
    def grads(whole_scores):
        return jax.jit(value_and_grads, static_argnums=0)(
            lambda q, k, v: attention(q, k, v, mask(), whole_scores=whole_scores), *draw()
        )

    assert_equal(grads(B * N * T * 3), grads(1 << 26))


def test_chunks_bound_the_memory():
    tokens = 1024
    qkv, segments = [jnp.zeros((1, tokens, 4, H))] * 3, jnp.ones((1, tokens), jnp.int32)
    scores = 4 * tokens * tokens

    def temp(whole_scores):
        return temporaries(lambda q, k, v: attention(q, k, v, Mask(segments), whole_scores=whole_scores), *qkv)

    assert temp(scores) >= 4 * scores
    assert temp(scores // 16) < 4 * scores / 3


def test_bfloat16_scores_are_float32():
    q, k, v = draw(jnp.bfloat16)
    wide_q, wide_k, wide_v = (np.asarray(x.astype(jnp.float32)) for x in (q, k, v))
    wide = by_loops(wide_q, wide_k, wide_v, True)
    got = attention(q, k, v, mask())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), wide, rtol=0, atol=2**-6)


# --- long rows, by tiles ----------------------------------------------------------------------------


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


@pytest.mark.medium
@pytest.mark.parametrize("tokens", [LONG_ROW - 1, LONG_ROW + 61])
def test_packed_equals_whole_rows(tokens):
    segments, branches = rows(tokens)
    rng = np.random.default_rng(1)
    qkv = [jnp.asarray(rng.normal(size=(B, tokens, heads, H)), jnp.float32) for heads in (N, K, K)]
    run = jax.jit(value_and_grads, static_argnums=0)
    got = run(lambda q, k, v: packed_attention(segments, branches)(q, k, v), *qkv)
    assert_equal(got, run(lambda q, k, v: attention(q, k, v, Mask(segments, branches)), *qkv))
    assert not np.asarray(got[0])[np.asarray(segments) == 0].any()


def test_long_rows_have_no_whole_scores():
    tokens = 2 * LONG_ROW
    qkv = [jax.ShapeDtypeStruct((B, tokens, heads, H), jnp.float32) for heads in (N, K, K)]
    segments, branches = rows(tokens)
    used = temporaries(lambda q, k, v: packed_attention(segments, branches)(q, k, v), *qkv)
    assert used < 4 * B * N * tokens * tokens / 4


# --- segments, by blocks ----------------------------------------------------------------------------

PATCHES = 64


def whole(q, k, v, segments):
    allowed = (segments[:, None] == segments[None, :]) & (segments != 0)[None, :]
    return attention(q[None], k[None], v[None], allowed[None])[0]


def example(lengths: list[int], seed: int = 0):
    """Segments of these lengths, cut or padded with 0 to `PATCHES`."""
    rng = np.random.default_rng(seed)
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:PATCHES]
    segments = np.pad(segments, (0, PATCHES - len(segments))).astype(np.int32)
    q, k, v = (jnp.asarray(rng.normal(size=(PATCHES, 2, 4)), jnp.float32) for _ in range(3))
    return q, k, v, jnp.asarray(segments)


@jax.jit
def reference(q, k, v, segments):
    return value_and_grads(lambda q, k, v: whole(q, k, v, segments), q, k, v)


@functools.partial(jax.jit, static_argnums=4)
def local(q, k, v, segments, bound):
    return value_and_grads(lambda q, k, v: segment_attention(q, k, v, segments, bound), q, k, v)


@pytest.mark.slow
@settings(max_examples=third_of(60), deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.sampled_from([0, 8, 9, 16, 64]), st.integers(0, 99))
def test_blocks_equal_the_whole_mask(lengths: list[int], bound: int, seed: int) -> None:
    """Runs up to 8 long under bounds of 8 and more, block edges falling anywhere, padding of any length."""
    arguments = example(lengths, seed)
    for ours, wanted in zip(local(*arguments, bound), reference(*arguments), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5, rtol=0)


def test_padding_is_zero_with_zero_gradients() -> None:
    arguments = example([8, 8, 5])
    for bound in (0, 8):
        for value in local(*arguments, bound):
            assert not np.asarray(value)[21:].any()


def test_a_bound_below_the_longest_run_is_wrong() -> None:
    """The reason why the bound must come from the data: this is what a lie does."""
    arguments = example([40, 24])
    assert np.abs(np.asarray(local(*arguments, 8)[0]) - reference(*arguments)[0]).max() > 1e-3


@pytest.mark.parametrize("bound", [8, 16])
def test_no_matrix_over_the_whole_axis(bound: int) -> None:
    """The compiled program of a long axis holds nothing of the size of its square."""
    length = 4096
    shapes = [jax.ShapeDtypeStruct((length, 2, 4), jnp.float32)] * 3 + [jax.ShapeDtypeStruct((length,), jnp.int32)]
    compiled = jax.jit(lambda q, k, v, s: segment_attention(q, k, v, s, bound)).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length
