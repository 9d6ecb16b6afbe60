"""Pixels near the devices: right whatever was expected, asked for or passed by, and no more than there is room for."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from flight_cases import SETTINGS, PlainStore, pictures
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import until
from turns import third_of

from fluxjax.data.near_pixels import NearPixels
from models.processing import MediaError
from models.shadow import Rows


class Watched:
    """A store of real pictures that says what it was asked for, and answers when it may."""

    def __init__(self, folder, count=6):
        self.plain, self.settings, self.lost = PlainStore(SETTINGS), SETTINGS, False
        self.tickets: list[Any] = self.plain.look(pictures(folder, count))
        self.rows = [Rows(str(ticket), 0, ticket.num_patches) for ticket in self.tickets]
        self.asked: list[Rows] = []
        self.open = threading.Event()
        self.open.set()

    def fetch_bytes(self, rows):
        self.asked += rows
        assert self.open.wait(60)
        if self.lost:
            raise MediaError(rows[0].ticket, "is gone")
        return self.plain.fetch_bytes(rows)

    def size(self, *numbers):
        return sum(len(self.rows[number]) * SETTINGS.patch_bytes for number in numbers)


@pytest.fixture
def store(tmp_path):
    return Watched(tmp_path)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def near(store):
    with contextlib.ExitStack() as stack:
        yield lambda limit: stack.enter_context(contextlib.closing(NearPixels(store, limit)))
        store.open.set()


def same(got, wanted):
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_what_is_expected_is_fetched_before_it_is_asked_for_and_once(store, near):
    pixels = near(2 * store.size(*range(6)))
    pixels.expect(store.rows[:3])
    until(lambda: pixels.used == store.size(0, 1, 2))
    assert store.asked == store.rows[:3]
    same(pixels.fetch(store.rows[:3]), store.plain.fetch(store.rows[:3]))
    parts = [Rows(rows.ticket, 1, rows.stop - 1) for rows in store.rows[:3]]
    same(pixels.fetch(parts), store.plain.fetch(parts))
    assert store.asked == store.rows[:3], "who trains on them has them, too"
    same(pixels.fetch(store.rows[3:4]), store.plain.fetch(store.rows[3:4]))
    same(pixels.fetch(store.rows[3:4]), store.plain.fetch(store.rows[3:4]))
    assert store.asked == store.rows[:4], "what nobody expected is kept as well"


def test_rows_that_are_here_in_parts_are_not_fetched_again_nor_kept_twice(store, near):
    pixels, (first, second, *_) = near(2 * store.size(*range(6))), store.rows
    halves = [Rows(first.ticket, 0, 2), Rows(first.ticket, 2, first.stop)]
    for rows in ([halves[0]], [halves[1]], [first], [Rows(first.ticket, 1, first.stop - 1)]):
        same(pixels.fetch(rows), store.plain.fetch(rows))
    assert store.asked == halves
    for rows in (Rows(second.ticket, 1, 3), second):
        same(pixels.fetch([rows]), store.plain.fetch([rows]))
    assert pixels.used == store.size(0, 1)


def test_who_asks_for_what_is_on_its_way_waits_for_it(store, near):
    store.open.clear()
    pixels = near(2 * store.size(*range(6)))
    pixels.expect(store.rows[:1])
    until(lambda: store.asked)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(pixels.fetch, store.rows[:1])
        time.sleep(0.05)
        assert not asking.done()
        store.open.set()
        same(asking.result(60), store.plain.fetch(store.rows[:1]))
    assert store.asked == store.rows[:1]


def test_no_more_is_fetched_ahead_than_half_of_the_room(store, near):
    pixels = near(2 * store.size(0, 1))
    pixels.expect(store.rows)
    until(lambda: pixels.used >= store.size(0, 1))
    time.sleep(0.1)
    assert store.asked == store.rows[:2]
    pixels.fetch(store.rows[:1])
    until(lambda: len(store.asked) > 2 or store.size(2) > store.size(0))
    assert pixels.used <= 2 * store.size(0, 1)


def test_one_that_is_passed_by_frees_its_place(store, near):
    pixels = near(2 * store.size(0, 1))
    pixels.expect(store.rows)
    until(lambda: pixels.used == store.size(0, 1))
    pixels.pass_by(store.rows[:2])
    until(lambda: store.rows[2] in store.asked or store.size(2) > store.size(0, 1))
    for number in range(6):
        pixels.pass_by(store.rows[number : number + 1])
    pixels.expect(store.rows[:1])
    until(lambda: not pixels._expected)
    same(pixels.fetch(store.rows), store.plain.fetch(store.rows))
    assert pixels.used <= 2 * store.size(0, 1)


def test_what_can_not_be_fetched_ahead_is_an_error_for_who_asks(store, near):
    store.lost = True
    pixels = near(2 * store.size(*range(6)))
    pixels.expect(store.rows[:2])
    until(lambda: store.asked and not pixels.used)
    with pytest.raises(MediaError, match="is gone"):
        pixels.fetch(store.rows[:1])
    store.lost = False
    same(pixels.fetch(store.rows[:2]), store.plain.fetch(store.rows[:2]))


def test_a_medium_that_has_no_room_goes_through(store, near):
    pixels = near(8)
    pixels.expect(store.rows)
    until(lambda: not pixels._expected)
    same(pixels.fetch(store.rows), store.plain.fetch(store.rows))
    assert pixels.used == 0
    same(pixels.fetch([Rows(store.rows[0].ticket, 2, 2)]), [np.zeros((0, SETTINGS.patch_bytes), np.float32)])


STEPS = st.lists(
    st.tuples(st.sampled_from(["expect", "pass", "ask"]), st.integers(0, 5), st.integers(0, 3)), max_size=20
)


@given(STEPS, st.integers(0, 12))
@settings(max_examples=third_of(40))
def test_whatever_happens_pixels_are_right_and_room_is_kept(shared_store, steps, sixths):
    store = shared_store
    limit = store.size(*range(6)) * sixths // 6
    with contextlib.closing(NearPixels(store, limit)) as pixels:
        for what, number, cut in steps:
            rows = store.rows[number]
            if what == "expect":
                pixels.expect([rows])
            elif what == "pass":
                pixels.pass_by([rows])
            else:
                asked = [Rows(rows.ticket, cut, max(cut, rows.stop - cut)), store.rows[5 - number]]
                same(pixels.fetch(asked), store.plain.fetch(asked))
            assert pixels.used <= limit
