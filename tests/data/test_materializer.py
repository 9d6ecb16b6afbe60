"""Pixels come before it is their turn, a bounded number of batches ahead, and are right whatever the order of reads."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.base.errors import DataError
from fluxjax.data.materializer import Materializer
from models.processing import MediaError
from models.shadow import ShadowTensor

DATA = {name: np.arange(40, dtype=np.float32).reshape(20, 2) + 100 * k for k, name in enumerate("abcdef")}


def fetch(rows):
    return [DATA[row.ticket][row.start : row.stop] for row in rows]


def batch_of(name, start=0, stop=20):
    shadow = ShadowTensor.of(name, (20, 2), np.float32)[start:stop]
    return {"pixels": np.concatenate([shadow, np.zeros((2, 2), np.float32)]), "tokens": np.ones(3)}


def expected(name, start=0, stop=20):
    return np.concatenate([DATA[name][start:stop], np.zeros((2, 2), np.float32)])


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.integers(10, 20)), max_size=8),
    st.integers(1, 3),
    st.data(),
)
def test_whatever_is_read_is_right(slices, ahead, data):
    """Expected or not, once or twice, in any order, forgotten in between."""
    batches = [batch_of(*where) for where in slices]
    expected_ones = data.draw(st.integers(0, len(batches)))
    reads = st.tuples(st.integers(0, max(len(batches) - 1, 0)), st.booleans())
    # All is drawn before there are threads: beartype uses `random` in them, which Hypothesis does not allow meanwhile.
    order = data.draw(st.lists(reads, max_size=2 * len(batches)))
    materializer = Materializer(fetch, ahead)
    materializer.expect(batches[:expected_ones])
    for k, forgotten in order:
        if forgotten:
            materializer.forget([batches[k]])
        read = materializer.read(batches[k])
        np.testing.assert_array_equal(read["pixels"], expected(*slices[k]))
        assert read["tokens"] is batches[k]["tokens"]
    materializer.close()


def test_batches_come_ahead_of_their_turn_but_not_all_of_them():
    asked, came = [], threading.Semaphore(0)

    def slow(rows):
        asked.append(rows[0].ticket)
        came.release()
        return fetch(rows)

    batches = [batch_of(name) for name in "abcdef"]
    materializer = Materializer(slow, ahead=2)
    materializer.expect(batches)
    assert all(came.acquire(timeout=10) for _ in range(2)), "nobody had read them"
    assert not came.acquire(timeout=0.2) and asked == ["a", "b"], "no more than two ahead"
    for k, name in enumerate("abcdef"):
        np.testing.assert_array_equal(materializer.read(batches[k])["pixels"], expected(name))
        if k < 4:
            assert came.acquire(timeout=10)
        assert asked == list("abcdef")[: min(k + 3, 6)]
    materializer.read(batches[0])
    assert asked == list("abcdef"), "what was read stays until it is forgotten"
    materializer.forget(batches)
    materializer.read(batches[0])
    assert asked == [*"abcdef", "a"]
    assert materializer.totals.bytes == 7 * 20 * 2 * 4
    materializer.close()


def test_what_cannot_be_fetched_is_told_to_the_reader_of_it_alone():
    def failing(rows):
        if rows[0].ticket == "b":
            raise MediaError("b.mp4", "has changed since it was preprocessed")
        return fetch(rows)

    batches = [batch_of(name) for name in "abc"]
    materializer = Materializer(failing)
    materializer.expect(batches)
    np.testing.assert_array_equal(materializer.read(batches[0])["pixels"], expected("a"))
    with pytest.raises(DataError, match=r"b\.mp4: has changed since it was preprocessed; media must stay as they are"):
        materializer.read(batches[1])
    np.testing.assert_array_equal(materializer.read(batches[2])["pixels"], expected("c"))
    materializer.close()
