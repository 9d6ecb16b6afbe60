"""Tiled attention is plain attention, and only tiles with work in them are computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from turns import third_of

from sharding.kernels.attention import Mask, attention
from sharding.kernels.tiles import tile_attention, tile_list, tile_size
from sharding.mesh import make_mesh

S = 45  # no multiple of any tile
TILE = 8


@st.composite
def streams(draw, contiguous=True):
    """(segments, branches) `[S]`: prompts with or without responses, numbered in any order, padding anywhere."""
    segments, branches = np.zeros(0, int), np.zeros(0, int)
    for number in draw(st.permutations(range(1, draw(st.integers(1, 6)) + 1))):
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        segments = np.append(segments, np.full(sum(lengths), number))
        branches = np.append(branches, np.repeat(np.arange(len(lengths)), lengths))
    if not contiguous:
        order = draw(st.permutations(range(len(segments))))
        segments, branches = segments[order], branches[order]
    for place in draw(st.lists(st.integers(0, S), max_size=4)):
        width = draw(st.integers(1, 12))
        segments, branches = (np.insert(x, min(place, len(x)), np.zeros(width, int)) for x in (segments, branches))
    segments, branches = (np.pad(x, (0, S))[:S].astype(np.int32) for x in (segments, branches))
    return segments, branches


def dense(q, k, v, segments, branches):
    return attention(q[None], k[None], v[None], Mask(segments[None], branches[None]))[0]


def tiled(q, k, v, segments, branches):
    return tile_attention(q, k, v, tile_list(segments, branches, TILE))


def inputs(N, K, H=8, dtype=jnp.float32, tokens=S):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(tokens, heads, H)), dtype) for heads in (N, K, K, N)]


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(f, qkvd, segments, branches):
    *qkv, dout = qkvd
    out, pull = jax.vjp(lambda *x: f(*x, segments, branches), *qkv)
    return out, *pull(dout)


def needed(segments, branches, tile=TILE):
    """`[tiles, tiles]`: tiles in which the plain mask has any entry."""
    tiles = -(-len(segments) // tile)
    segments, branches = (np.pad(x, (0, tiles * tile - len(x)))[None] for x in (segments, branches))
    mask = np.asarray(Mask(jnp.asarray(segments), jnp.asarray(branches)).dense())[0]
    return mask.reshape(tiles, tile, tiles, tile).any((1, 3))


def active(segments, branches, tile=TILE):
    found = jax.jit(tile_list, static_argnums=2)(jnp.asarray(segments), jnp.asarray(branches), tile)
    table = np.zeros((len(found.segments),) * 2, bool)
    table[tuple(np.asarray(found.pairs)[: int(found.count)].T)] = True
    assert table.sum() == found.count
    return table


@pytest.mark.parametrize("heads", [(4, 2), *(pytest.param(more, marks=pytest.mark.slow) for more in ((3, 1), (2, 2)))])
@settings(deadline=None, max_examples=third_of(15))
@given(stream=streams(), scattered=streams(contiguous=False))
def test_values_and_gradients_equal_plain_attention(heads, stream, scattered):
    qkvd = inputs(*heads)
    for numbers in (stream, scattered):
        got, want = (value_and_grads(f, qkvd, *numbers) for f in (tiled, dense))
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@given(stream=streams(), scattered=streams(contiguous=False))
def test_no_needed_tile_is_missing_and_none_is_foreign(stream, scattered):
    assert not (needed(*scattered) & ~active(*scattered)).any()
    segments, branches = stream
    assert not (needed(segments, branches) & ~active(segments, branches)).any()
    alone = np.zeros_like(branches)
    np.testing.assert_array_equal(active(segments, alone), needed(segments, alone))


@pytest.mark.medium
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), gap=st.integers(0, S), width=st.integers(0, 12))
def test_within_one_segment_no_tile_of_a_foreign_branch_is_active(lengths, gap, width):
    branches = np.repeat(np.arange(len(lengths)), lengths)[:S]
    one_branch = np.full_like(branches, 9)
    padded = (np.insert(x, min(gap, len(x)), np.zeros(width, int)) for x in (one_branch, branches))
    segments, branches = (np.pad(x, (0, S))[:S].astype(np.int32) for x in padded)
    np.testing.assert_array_equal(active(segments, branches), needed(segments, branches))


def test_a_stream_of_padding_gives_zeros_and_no_gradient():
    nothing = jnp.zeros(S, jnp.int32)
    for x in value_and_grads(tiled, inputs(4, 2), nothing, nothing):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.slow
def test_bfloat16_sums_in_float32():
    tokens = 1024
    segments, branches = jnp.ones(tokens, jnp.int32), jnp.zeros(tokens, jnp.int32)
    exact = value_and_grads(dense, inputs(4, 2, tokens=tokens), segments, branches)
    got = value_and_grads(tiled, inputs(4, 2, dtype=jnp.bfloat16, tokens=tokens), segments, branches)
    for ours, theirs in zip(got, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        error = np.abs(np.asarray(ours, np.float32) - theirs).max() / np.abs(theirs).max()
        assert error < 0.012  # 3 units in the last place of bfloat16; sums of 1024 in bfloat16 would be off by 10 times


@pytest.mark.slow
def test_scan_and_checkpoint_take_it():
    segments = jnp.asarray(np.repeat([2, 1, 0], 15), jnp.int32)
    branches = jnp.zeros_like(segments)
    q, k, v, dout = inputs(2, 2)

    def through(f, wrap):
        def layer(x, _):
            return x + f(x, k, v), None

        def run(x):
            return jnp.sum(jax.lax.scan(wrap(layer), x, None, length=2)[0] * dout)

        return jax.jit(jax.grad(run))(q)

    tiles = tile_list(segments, branches, TILE)
    want = through(lambda q, k, v: dense(q, k, v, segments, branches), lambda f: f)
    for wrap in (lambda f: f, jax.checkpoint):
        got = through(lambda q, k, v: tile_attention(q, k, v, tiles), wrap)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_every_device_has_its_own_tiles():
    mesh = make_mesh(8)
    rows = P(mesh.axis_names)
    rng = np.random.default_rng(1)
    segments = np.where(np.arange(S) < rng.integers(0, S, (8, 1)), 1, 0).astype(np.int32)
    q, k, v, dout = (jnp.stack([jnp.roll(x, d, 0) for d in range(8)]) for x in inputs(2, 1))

    def local(q, k, v, segments):
        return tile_attention(q[0], k[0], v[0], tile_list(segments[0], jnp.zeros(S, jnp.int32), TILE))[None]

    def objective(f):
        return jax.jit(jax.grad(lambda q, k, v: jnp.sum(f(q, k, v) * dout), (0, 1, 2)))(q, k, v)

    spread = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=True)
    got = objective(lambda q, k, v: spread(q, k, v, jnp.asarray(segments)))
    want = objective(lambda q, k, v: attention(q, k, v, Mask(jnp.asarray(segments))))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@given(tokens=st.integers(1, 1 << 22))
def test_the_list_of_tiles_stays_short(tokens):
    size = tile_size(tokens)
    assert -(-tokens // size) <= 256
    assert size < tokens + 8  # a tiny stream is not filled up to a whole tile
