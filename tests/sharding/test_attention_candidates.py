"""Outside of kernels: the merging of two calls of attention (benchmarks/gpu), a candidate for Hopper."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_tiles import inputs

from sharding.kernels.attention import Mask, attention

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))  # not a package

from gpu.merged_attention import layout_of, library, merged

TOLERANCE = 2e-6  # float32, of the largest value


@pytest.mark.medium
@pytest.mark.parametrize("seed", [0, 1])
def test_two_calls_merged_by_log_sum_exp_equal_the_whole(seed):
    draw = np.random.default_rng(seed)
    lengths = [draw.integers(1, 12, parts) for parts in (4, 1, 3, 2)]  # of a prompt and its branches
    segments = np.repeat(draw.permutation(4) + 1, [sum(parts) for parts in lengths]).astype(np.int32)
    branches = np.concatenate([np.repeat(np.arange(len(parts)), parts) for parts in lengths]).astype(np.int32)
    places = draw.integers(0, len(segments) + 1, 9)
    segments, branches = (np.insert(x, places, 0) for x in (segments, branches))  # padding
    q, k, v, _ = inputs(4, 2, tokens=len(segments))
    mask = Mask(jnp.asarray(segments)[None], jnp.asarray(branches)[None])
    want = attention(q[None], k[None], v[None], mask)[0]
    got = jax.jit(functools.partial(merged, layout=layout_of(segments, branches), call=library("xla")))(q, k, v)
    real = segments != 0
    np.testing.assert_allclose(got[real], want[real], rtol=0, atol=TOLERANCE * float(jnp.abs(want).max()))
    assert not np.asarray(got[~real]).any()


@pytest.mark.medium
def test_a_rounded_log_sum_exp_spoils_the_merge():
    segments = np.ones(300, np.int32)
    branches = np.repeat([0, 1, 2], 100).astype(np.int32)
    q, k, v, _ = inputs(2, 1, tokens=300)
    layout, exact = layout_of(segments, branches), library("xla")

    def rounded(*arguments):
        out, lse = exact(*arguments)
        return out, lse.astype(jnp.bfloat16)

    whole = attention(q[None], k[None], v[None], Mask(jnp.asarray(segments)[None], jnp.asarray(branches)[None]))[0]
    errors = [
        float(jnp.abs(jax.jit(functools.partial(merged, layout=layout, call=call))(q, k, v) - whole).max())
        for call in (exact, rounded)
    ]
    assert errors[0] < TOLERANCE < 1e-3 < errors[1]
