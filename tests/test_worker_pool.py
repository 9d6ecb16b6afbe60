"""Calls in other processes: results come back, and one that hangs, dies or needs too much costs its own call."""

import asyncio
import contextlib
import os
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_cases import gone, until
from turns import third_of

from fluxjax.base.worker_pool import WorkerDied, WorkerError, WorkerPool, WorkerTimeout


@contextlib.contextmanager
def pool(function, workers=1, seconds=60.0, memory_gib=0.25):
    subject = WorkerPool(f"worker_functions:{function}", workers, seconds=seconds, memory_gib=memory_gib, name="test")
    with contextlib.closing(subject):
        yield subject


@pytest.fixture(scope="module")
def bad():
    with pool("misbehaves") as subject:
        yield subject


@pytest.fixture(scope="module")
def good():
    with pool("doubled") as subject:
        yield subject


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)


@pytest.mark.medium
@settings(max_examples=third_of(30))
@given(st.lists(VALUES))
def test_results_come_back(good, values):
    assert good.call(values) == values * 2


def test_jax_is_not_there():
    with pool("has_jax") as subject:
        assert subject.call(None) is False


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raises", WorkerError, "KeyError: 'nothing here'"),
        ("exits", WorkerError, "SystemExit: 3"),
        ("exits at once", WorkerDied, "ended its process (exit code 3)"),
        ("kills itself", WorkerDied, "ended its process (signal 9)"),
        ("allocates", WorkerDied, "needs more than 0.25 GiB of memory"),
        ("recurses", WorkerError, "RecursionError: maximum recursion depth exceeded"),
        ("returns an object", WorkerError, "returned a value that can't be sent: "),
    ],
)
def test_what_goes_wrong_is_said_and_the_next_call_goes_on(bad, how, error, text):
    with pytest.raises(error) as caught:
        bad.call(how)
    assert str(caught.value).startswith(text)
    assert bad.call("good") == "good"


def test_a_function_that_answers_twice_answers_once(bad):
    for text in ("forks", "good", "forks", "better"):
        assert bad.call(text) == text


@pytest.mark.parametrize("function", ["spins", "leaves_a_child"])
def test_a_call_that_takes_too_long_is_killed(function):
    with pool(function, seconds=0.3) as subject, pytest.raises(WorkerTimeout, match=r"timed out after 0\.3 s"):
        subject.call(None)


def test_no_signal_mask_saves_a_process_and_its_children_go_along(tmp_path):
    with pool("misbehaves") as subject, pytest.raises(WorkerTimeout):
        subject.call("stops the alarm and hangs", seconds=0.3)
    with pool("leaves_a_child") as subject, pytest.raises(WorkerTimeout):
        subject.call(str(tmp_path / "child"), seconds=1.5)
    until(lambda: gone(int((tmp_path / "child").read_text())))


@pytest.mark.medium
def test_calls_run_side_by_side_where_they_have_to(tmp_path):
    async def both(subject):
        return await asyncio.gather(*(subject.acall([str(tmp_path), 2]) for _ in range(2)))

    with pool("meets", workers=2) as subject:
        assert len(set(asyncio.run(both(subject)))) == 2
        assert subject.load().waiting == subject.load().busy == 0


def test_quick_calls_share_a_process():
    async def all_of_them(subject):
        return await asyncio.gather(*(subject.acall(0) for _ in range(32)))

    with pool("sleeps", workers=4) as subject:
        assert len(set(asyncio.run(all_of_them(subject)))) == 1


def test_others_go_on_while_one_hangs():
    async def both(subject):
        hung = asyncio.ensure_future(subject.acall(600, seconds=600.0))
        await asyncio.sleep(0.1)
        quick = [await subject.acall(0) for _ in range(3)]
        assert not hung.done() and len(set(quick)) == 1
        subject.close()
        with pytest.raises(WorkerDied):
            await hung

    with pool("sleeps", workers=2) as subject:
        asyncio.run(both(subject))


def test_closing_ends_what_is_under_way():
    with pool("sleeps") as subject:
        subject.call(0)
        raised = []

        def call():
            try:
                subject.call(600)
            except Exception as error:
                raised.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        while subject.load().waiting < 2:
            time.sleep(0.001)
        subject.close()
        for thread in threads:
            thread.join(60)
        assert sorted(type(error).__name__ for error in raised) == ["RuntimeError", "RuntimeError", "WorkerEnded"]
        with pytest.raises(RuntimeError, match="the workers of test are closed"):
            subject.call(0)


def test_a_process_that_dies_idle_is_replaced():
    with pool("sleeps") as subject:
        first = subject.call(0)
        os.kill(first, 9)
        while subject._idle[0].lives:  # its threads end one after the other
            time.sleep(0.001)
        assert subject.call(0) != first


@pytest.mark.parametrize(
    ("function", "text"),
    [("no_such_module:f", "ModuleNotFoundError"), ("worker_functions:no_such_function", "AttributeError")],
)
def test_a_function_that_is_not_there_is_said(function, text):
    with (
        contextlib.closing(WorkerPool(function, 1, seconds=1.0, memory_gib=1.0, name="test")) as subject,
        pytest.raises(WorkerDied, match=f"a process for test can't be started: importing '{function}' raised {text}"),
    ):
        subject.call(None)
