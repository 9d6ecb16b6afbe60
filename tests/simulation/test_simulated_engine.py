"""The simulated engine: equal to a token-by-token simulation, conserving tokens, within its cache."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import BEFORE, Cost, NaiveEngine
from turns import third_of

from fluxjax.simulation.clock import Clock
from fluxjax.simulation.continuous_batch import SampleProgress
from fluxjax.simulation.simulated_engine import SimulatedEngine

TIMES = st.integers(0, 1500).map(lambda ticks: ticks / 1024)
NAMES = st.sampled_from("abcdef")


def sizes(limit: int):
    total = st.integers(1, limit // 2)
    prompt = st.integers(0, limit // 2)
    return st.tuples(prompt, total).flatmap(lambda two: st.tuples(st.just(two), st.integers(0, two[1] - 1)))


@st.composite
def stories(draw):
    limit = draw(st.integers(8, 130))
    events = []
    for rid in "abcdef":
        at = draw(TIMES)
        for sample in range(draw(st.integers(0, 3))):
            (prompt, total), begun = draw(sizes(limit))
            events.append((at, "submit", rid, sample, prompt, total, begun))
    for at in draw(st.lists(TIMES, max_size=6)):
        name = draw(NAMES) + draw(st.sampled_from(["", "/0", "/1", "/2"]))
        events.append((at, "abort", name))
    if draw(st.booleans()):
        first, last = sorted([draw(TIMES), draw(TIMES)])
        events += [(first, "pause"), (last, "resume")]
    for version in range(draw(st.integers(0, 3))):
        seconds = draw(st.sampled_from([0.0, 1 / 256, 1 / 8]))
        events.append((draw(TIMES), "update", seconds, version + 1, draw(st.booleans())))
    for at in draw(st.lists(TIMES, max_size=2)):
        events.append((at, "slow_down", draw(st.sampled_from([1.0, 1.5, 4.0]))))
    if draw(st.booleans()):
        first, last = sorted([draw(TIMES), draw(TIMES)])
        events += [(first, "crash"), (last, "recover")]
    events.sort(key=lambda event: event[0])
    return limit, draw(st.integers(1, 6)), events


def simulate(limit: int, max_running: int, events: list[tuple]):
    clock, finished, answers = Clock(), [], []
    engine = SimulatedEngine(
        clock, Cost(limit=limit), 1, lambda what: finished.append((clock.now, *what)), max_running=max_running
    )

    def act(name: str, *arguments) -> None:
        assert engine.kv_tokens <= limit
        if name == "submit":
            arguments = (*arguments[:-1], ((BEFORE, arguments[-1]),) if arguments[-1] else ())
        answer = getattr(engine, name)(*arguments)
        if name == "abort":
            answers.append([tuple(one) for one in answer])
        elif name == "crash":
            answers.append(sorted(answer))

    for time, name, *arguments in events:
        clock.at(time, lambda name=name, arguments=arguments: act(name, *arguments))
    clock.run()
    return engine, finished, answers


@pytest.mark.slow
@settings(deadline=None, max_examples=third_of(200))
@given(stories())
def test_jumps_equal_one_token_at_a_time(story):
    limit, max_running, events = story
    naive = NaiveEngine(limit, max_running)
    naive.run(events)
    engine, finished, answers = simulate(limit, max_running, events)
    assert sorted(finished) == sorted(naive.finished)
    assert [time for time, *_ in finished] == sorted(time for time, *_ in finished)
    assert answers == naive.answers
    assert naive.highest <= limit
    assert (engine.batch.preemptions, engine.decoded, engine.prefilled, engine.busy_seconds, engine.version) == (
        naive.preemptions, naive.decoded, naive.prefilled, naive.busy, naive.version,
    )  # fmt: skip


@settings(deadline=None, max_examples=third_of(50))
@given(stories())
def test_tokens_are_conserved(story):
    """What was decoded is what came out: finished, aborted or lost, less what had begun elsewhere."""
    limit, max_running, events = story
    crashes = [at for at, name, *_ in events if name == "crash"]
    events = [event for event in events if not (crashes and event[0] == crashes[0])]
    events = [event for event in events if event[1] not in ("pause", "crash", "recover")]
    engine, finished, answers = simulate(limit, max_running, events)
    begun = sum(event[6] for event in events if event[1] == "submit")
    ended = [(rid, sample, tokens) for _, rid, sample, tokens, _ in finished]
    aborted = [(rid, sample, tokens) for answer in answers for rid, sample, tokens, _ in answer]
    assert engine.decoded == sum(tokens for *_, tokens in ended + aborted) - begun
    total = {(event[2], event[3]): event[5] for event in events if event[1] == "submit"}
    assert all(total[rid, sample] == tokens for rid, sample, tokens in ended)
    assert len(ended) + len(aborted) == len(total)
    assert len(engine.batch.running) == engine.batch.waiting == engine.kv_tokens == 0


def test_preempted_samples_end_with_the_right_length():
    events = [(0.0, "submit", "a", sample, 10, 80, 0) for sample in range(5)]
    engine, finished, _ = simulate(200, 8, events)
    assert engine.batch.preemptions > 0
    assert engine.prefilled > 50
    assert engine.decoded == 5 * 80
    assert [(rid, sample, tokens) for _, rid, sample, tokens, _ in finished] == [("a", i, 80) for i in range(5)]


def test_segments_say_which_weights_made_which_tokens():
    events = [(0.0, "submit", "a", 0, 10, 40, 5), (0.25, "update", 0.125, 3, True), (0.5, "update", 0.0, 3, False)]
    _, finished, _ = simulate(100, 8, events)
    ((_, _, _, tokens, segments),) = finished
    assert tokens == 40
    assert [version for version, _ in segments] == [BEFORE, 0, 3] and segments[0] == (BEFORE, 5)
    assert sum(count for _, count in segments) == 40


def test_callbacks_may_submit_abort_and_crash():
    clock, seen = Clock(), []

    def on_finish(progress: SampleProgress) -> None:
        rid = progress.rid
        seen.append(progress[:3])
        if rid == "a":
            assert [one[:3] for one in engine.abort("b")] == [("b", 0, 10)]
            engine.submit("c", 0, 1, 20)
        if rid == "c":
            engine.submit("d", 0, 1, 5)
            assert engine.crash() == ["d"]
            engine.update(1.0, 4, False)
            engine.recover()
            engine.submit("e", 0, 1, 5)

    engine = SimulatedEngine(clock, Cost(limit=1000), 1, on_finish)
    engine.submit("a", 0, 1, 10)
    engine.submit("b", 0, 1, 90)
    clock.run()
    assert seen == [("a", 0, 10), ("c", 0, 20), ("e", 0, 5)]
    assert engine.version == 4


def test_what_cannot_be_generated_is_refused():
    engine = SimulatedEngine(Clock(), Cost(limit=100), 1, print)
    for prompt, total, begun in [(50, 51, 0), (1, 0, 0), (1, 5, 5), (1, 5, 9)]:
        with pytest.raises(ValueError, match="the cache holds"):
            engine.submit("a", 0, prompt, total, ((0, begun),))
    engine.submit("b", 0, 1, 5)
    with pytest.raises(ValueError, match="already"):
        engine.submit("b", 0, 1, 5)
    engine.crash()
    assert engine.abort("nobody") == engine.abort("b/7") == engine.abort("b") == []


def test_clock_keeps_order_and_cancels():
    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append("c"))
    gone = clock.at(1.0, lambda: seen.append("never"))
    clock.at(1.0, lambda: (seen.append("a"), clock.after(0.0, lambda: seen.append("b"))))
    clock.cancel(gone)
    clock.at(1.5, lambda: seen.append(clock.now))
    clock.run()
    assert (clock.now, seen) == (2.0, ["a", "b", 1.5, "c"])
    for time in (1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the clock is at"):
            clock.at(time, print)
