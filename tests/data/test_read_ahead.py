"""What is read ahead: in order, no further than it may, errors where they belong, and nothing begun by who takes."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.data.prepare import ReadAhead


class Making:
    """Makes the double of a number; those in `held` only when they are let go."""

    def __init__(self, held=(), fails=()):
        self.begun, self.gates, self.fails = [], {number: threading.Event() for number in held}, fails
        self.changed = threading.Condition()

    def __call__(self, number):
        with self.changed:
            self.begun.append(number)
            self.changed.notify_all()
        if number in self.gates:
            assert self.gates[number].wait(60)
        if number in self.fails:
            raise ValueError(f"number {number}")
        return 2 * number

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, 60)


@given(
    st.integers(0, 5),
    st.integers(1, 7),
    st.integers(1, 4),
    st.lists(st.integers(0, 9), max_size=8),
    st.sets(st.just(3)),
)
def test_items_come_in_order_whatever_is_taken_at_once(first, ahead, threads, counts, held):
    heard = []
    reading = ReadAhead(lambda number: 2 * number, first, ahead=ahead, threads=threads, ready=heard.append)
    items = [item for count in counts for item in reading.take(count)]
    assert items == [2 * number for number in range(first, first + sum(counts))]
    rest = reading.close()
    assert heard == items + rest and len(rest) <= ahead


def test_it_goes_as_far_as_it_may_and_begins_nothing_more_while_some_are_taken():
    making = Making(held=[4, 5, 6])
    reading = ReadAhead(making, 0, ahead=4, threads=2)
    making.wait_for(4)
    while not reading.there(4):
        time.sleep(0.01)
    assert sorted(making.begun) == [0, 1, 2, 3] and not reading.there(5)
    assert reading.take(2) == [0, 2]
    making.wait_for(6)
    assert sorted(making.begun) == list(range(6)), "two were taken, two were begun"
    assert reading.take(2) == [4, 6], "they are there, although the next ones are not"
    for gate in making.gates.values():
        gate.set()
    assert reading.take(4) == [8, 10, 12, 14]
    reading.close()


def test_a_slow_one_holds_up_those_behind_it_and_none_before():
    making, heard = Making(held=[1]), []
    reading = ReadAhead(making, 0, ahead=3, threads=3, ready=heard.append)
    making.wait_for(3)
    assert reading.take(1) == [0]
    assert heard == [0]
    making.gates[1].set()
    assert reading.take(2) == [2, 4]
    reading.close()


def test_an_error_is_raised_where_it_is_come_to_and_ever_after():
    reading = ReadAhead(Making(fails=[3]), 0, ahead=5, threads=2)
    assert reading.take(3) == [0, 2, 4]
    for _ in range(2):
        with pytest.raises(ValueError, match="number 3"):
            reading.take(1)
    reading.close()


def test_closing_ends_threads_and_whoever_takes():
    making, before = Making(held=[1]), set(threading.enumerate())
    reading = ReadAhead(making, 0, ahead=3, threads=1)
    making.wait_for(2)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 1 and reading.close() == [0]
    with pytest.raises(RuntimeError, match="closed"):
        reading.take(2)
    making.gates[1].set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert making.begun == [0, 1]
