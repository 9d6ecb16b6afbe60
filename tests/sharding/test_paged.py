"""Attention of decoding over pages, in its portable form; `test_gpu_kernels.py` holds the kernel to this form."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from sharding.kernels import paged

PAGE = 4
LAYERS = 2


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(paged, "BLOCK", 3 * PAGE)


@functools.partial(jax.jit, static_argnums=5)
def attend(q, k, v, pages, length, layer):
    return paged.paged_attention(q, k, v, pages, length, layer)


def forked(rng, lengths, K, shared):
    """(k, v, pages) of sequences whose first `shared` pages are the same, as of a group's samples. Pages lie anywhere;
    page numbers behind a sequence's end are out of range."""
    counts = [-(-length // PAGE) for length in lengths]
    total = sum(counts) + 2
    pages, free = np.full((len(lengths), max(counts)), total, np.int32), rng.permutation(total).astype(np.int32)
    for row, count in enumerate(counts):
        pages[row, :count], free = free[:count], free[count:]
        common = min(shared, count, counts[0])
        pages[row, :common] = pages[0, :common]
    k, v = (jnp.asarray(rng.normal(size=(LAYERS, total, K, PAGE, 8)), jnp.float32) for _ in "kv")
    return k, v, pages


def expected(q, k, v, pages, lengths, layer):
    """The softmax of all scores at once, in numpy's float64."""
    out = np.zeros(q.shape)
    for row, length in enumerate(lengths):
        own = pages[row, : -(-length // PAGE)]
        entries = (np.asarray(x, np.float64)[layer, own].swapaxes(1, 2) for x in (k, v))
        keys, values = (x.reshape(-1, *x.shape[2:]) for x in entries)
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[2])
            scores = keys[:length, kv_head] @ np.asarray(q, np.float64)[row, head] / np.sqrt(8)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values[:length, kv_head] / weights.sum()
    return out


@pytest.mark.slow
@settings(deadline=None, max_examples=third_of(24))
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (6, 3)]),
    shared=st.integers(0, 3),
    layer=st.integers(0, LAYERS - 1),
    seed=st.integers(0, 99),
)
def test_attention_over_pages_is_attention_over_the_entries_in_their_order(lengths, heads, shared, layer, seed):
    rng, (N, K) = np.random.default_rng(seed), heads
    k, v, pages = forked(rng, lengths, K, shared)
    q = jnp.asarray(rng.normal(size=(len(lengths), N, 8)), jnp.float32)
    out = attend(q, k, v, pages, np.asarray(lengths, np.int32), layer)
    np.testing.assert_allclose(out, expected(q, k, v, pages, lengths, layer), atol=2e-6)


@pytest.mark.medium
def test_other_sequences_and_the_width_of_the_table_change_no_bit():
    rng, lengths = np.random.default_rng(0), [5, 12, 13]
    k, v, pages = forked(rng, lengths, 2, 1)
    q = jnp.asarray(rng.normal(size=(3, 4, 8)), jnp.float32)
    alone = attend(q, k, v, pages, np.asarray(lengths, np.int32), 1)
    wide = np.pad(pages, ((0, 0), (0, 7)), constant_values=k.shape[1])
    long = wide.copy()
    long[2] = np.arange(wide.shape[1]) % k.shape[1]
    beside = attend(q, k, v, long, np.asarray([5, 12, 4 * wide.shape[1]], np.int32), 1)
    np.testing.assert_array_equal(attend(q, k, v, wide, np.asarray(lengths, np.int32), 1), alone)
    np.testing.assert_array_equal(beside[:2], alone[:2])


@pytest.mark.medium
@pytest.mark.parametrize("width", [1, 3, 7])
def test_the_scores_of_a_block_are_computed_where_the_block_is_visited(width):
    """A compiler that takes the only block's scores out of the loop computes them although no sequence needs them."""
    k = jnp.zeros((LAYERS, 9, 2, PAGE, 8))
    pages = np.zeros((4, width), np.int32)
    program = attend.lower(jnp.zeros((4, 4, 8)), k, k, pages, np.ones(4, np.int32), 1).compile().as_text() or ""
    (body,) = re.findall(r"while\(.*body=%?([\w.\-]+)", program)
    (loop,) = re.findall(rf"^%?{re.escape(body)} .*?^}}", program, re.MULTILINE | re.DOTALL)
    assert "BKGH,BKSH->BKGS" in loop
