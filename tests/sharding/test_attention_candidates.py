"""What the candidates for attention on Hopper (benchmarks/gpu) compute outside their kernels: intervals, merging."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tiles import inputs
from turns import third_of

from sharding.kernels.attention import Mask, attention

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))  # not a package

from gpu.merged_attention import layout_of, library, merged
from gpu.mosaic_attention import intervals, visits_of

TOLERANCE = 2e-6  # float32, of the largest value
TOKENS = 300  # of a row, of which each length would be compiled anew


@st.composite
def rows(draw):
    """(segments, branches) of a packed row: padding is between segments, and at the end."""
    segments, branches = [], []
    for number in range(1, draw(st.integers(1, 5)) + 1):
        lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
        pad = draw(st.integers(0, 9))
        segments += [number] * sum(lengths) + [0] * pad
        branches += [branch for branch, length in enumerate(lengths) for _ in range(length)] + [0] * pad
    return tuple(np.pad(np.asarray(x, np.int32), (0, TOKENS))[:TOKENS] for x in (segments, branches))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@settings(deadline=None, max_examples=third_of(60))
@given(row=rows())
def test_each_key_is_seen_by_one_interval_of_queries(causal, row):
    segments, branches = (jnp.asarray(x)[None] for x in row)
    branches = branches if causal else jnp.zeros_like(branches)
    visits = visits_of(segments, branches, causal, 128)
    first, last = (np.asarray(x)[:, None, :] for x in intervals(visits))
    filled = visits.segments.shape[1]
    query = np.arange(filled)[None, :, None]
    want = np.asarray(Mask(visits.segments, visits.branches, causal).dense())
    np.testing.assert_array_equal((query >= first) & (query < last), want)
    assert filled == 384
    # Every tile with an allowed pair is listed for each kernel.
    for (tiles, counts), tiling, transposed in zip(visits.lists, visits.tilings, (False, False, True), strict=True):
        queries, keys = tiling.sizes
        needed = want[0].reshape(filled // queries, queries, filled // keys, keys).any((1, 3))
        lines = zip(np.asarray(tiles)[0], np.asarray(counts)[0, :, 1], needed.T if transposed else needed, strict=True)
        for line, several, wanted in lines:
            assert set(np.flatnonzero(wanted).tolist()) <= set(line[:several].tolist())


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
