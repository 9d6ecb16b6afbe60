"""Block-local attention equals attention under the whole mask, values and gradients, for any run lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from sharding.kernels.attention import attention, segment_attention

P, N, H = 64, 2, 4
TOLERANCE = 1e-5  # float32


def whole(q, k, v, segments):
    allowed = (segments[:, None] == segments[None, :]) & (segments != 0)[None, :]
    return attention(q[None], k[None], v[None], allowed[None])[0]


def example(lengths: list[int], seed: int = 0):
    """Segments of these lengths, cut or padded with 0 to `P`."""
    rng = np.random.default_rng(seed)
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:P]
    segments = np.pad(segments, (0, P - len(segments))).astype(np.int32)
    q, k, v = (jnp.asarray(rng.normal(size=(P, N, H)), jnp.float32) for _ in range(3))
    return q, k, v, jnp.asarray(segments)


def both(function, q, k, v, segments):
    """Output, and gradients of a loss that weighs every value differently."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(P, N, H)), jnp.float32)
    out, pull = jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)
    return (out, *pull(weights))


reference = jax.jit(lambda q, k, v, segments: both(whole, q, k, v, segments))
local = jax.jit(
    lambda q, k, v, segments, bound: both(lambda q, k, v, s: segment_attention(q, k, v, s, bound), q, k, v, segments),
    static_argnums=4,
)


@pytest.mark.slow
@settings(max_examples=third_of(60), deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.sampled_from([0, 8, 9, 16, 64]), st.integers(0, 99))
def test_equals_the_whole_mask(lengths: list[int], bound: int, seed: int) -> None:
    """Runs up to 8 long under bounds of 8 and more, block edges falling anywhere, padding of any length."""
    arguments = example(lengths, seed)
    for ours, wanted in zip(local(*arguments, bound), reference(*arguments), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=TOLERANCE, rtol=0)


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
    shapes = [jax.ShapeDtypeStruct((length, N, H), jnp.float32)] * 3 + [jax.ShapeDtypeStruct((length,), jnp.int32)]
    compiled = jax.jit(lambda q, k, v, s: segment_attention(q, k, v, s, bound)).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length
