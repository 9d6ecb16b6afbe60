"""Turns that are dispatched before the tokens of the turn before are read. The rules, each tested under its number:

25. Between two turns a device that is slower than the host never waits for it.
26. Tokens and ends are those of an engine that is not ahead, whatever the length of a round; log-probs up to rounding.
27. Everything that depends on unread tokens waits for them: aborts, pauses, new weights, blame. No token is lost, and
    tokens behind a stop id are dropped.
28. Rounds are long while no sample waits or is near its limit, and pages are free; they have few lengths.
"""

import asyncio
import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from rollout_cases import TEXT, assert_equal, build, collect, engine, full_logprobs, request, run, serve, text_prompt

import models
from rollout.device import NewTokens
from rollout.engine import EngineError, FinishReason
from rollout.requests import EngineLimits
from rollout.scheduler import Scheduler

PROMPT = text_prompt(7)
COMPANY = [
    request(f"r{i}", text_prompt(4 + 5 * i, seed=i), n=3, seed=i, max_new_tokens=36 - 4 * i, stop_ids=(i, i + 5))
    for i in range(5)
]
TURN, HOST = 10.0, 6.0  # seconds of a fake clock: a turn on the device, and the host's work between two turns


class SlowDevice:
    """A device on a fake clock: it does a turn behind the other, each in `TURN` seconds. The host then reads, plans and
    dispatches in `HOST` seconds."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.turns: list[tuple[str, float, float]] = []  # kind, begin and end
        self.cache = self.pixels = None

    def dispatch(self, kind: str, slots_B: np.ndarray, count_B: np.ndarray) -> "Pending":
        begin = max(self.now, self.free)
        self.free = begin + TURN
        self.turns.append((kind, begin, self.free))
        return Pending(self, self.free, slots_B, count_B)

    def start(self, plan):
        slots_B = np.concatenate([step.slots_B for step in plan])
        for step in plan:
            step.batch.outputs = step.batch.outputs or ()
        return self.dispatch("start", slots_B, np.ones_like(slots_B))

    def decode(self, plan):
        slots_B, batch = plan
        count_B = np.minimum(batch.steps, batch.remaining_B[: len(slots_B)])
        return self.dispatch("round", slots_B, count_B)


@dataclasses.dataclass
class Pending:
    device: SlowDevice
    end: float
    slots_B: np.ndarray
    count_B: np.ndarray

    def read(self) -> NewTokens:
        self.device.now = max(self.device.now, self.end) + HOST
        shape = len(self.slots_B), max(self.count_B, default=1)
        return NewTokens(self.slots_B, np.ones(shape, np.int32), np.zeros(shape, np.float32), self.count_B)


@pytest.mark.parametrize("ahead", [True, False])
def test_25_a_slow_device_never_waits_for_the_host(ahead):
    """There are more samples than slots, so that starts come between the rounds."""
    serving, device = engine(models.abstract(TEXT), slots=4, kv_tokens=512, ahead=ahead), SlowDevice()
    serving._device.params = {}
    serving._device.start, serving._device.decode = device.start, device.decode  # type: ignore[method-assign]
    asked = [request(f"r{i}", text_prompt(3 + i), n=2, max_new_tokens=9 + 4 * i) for i in range(6)]
    answers = run(serving, *asked)
    for each, group in zip(asked, answers, strict=True):
        assert [(len(a.ids), a.finish) for a in group] == [(each.sampling.max_new_tokens, FinishReason.LENGTH)] * 2
    kinds = [kind for kind, _, _ in device.turns]
    assert kinds.count("start") > 2 and kinds.count("round") > 8
    waits = [after[1] - before[2] for before, after in zip(device.turns, device.turns[1:], strict=False)]
    assert waits == [0.0 if ahead else HOST] * len(waits)


@pytest.fixture(scope="module")
def expected():
    """The answers of an engine that is not ahead."""
    return run(engine(build(TEXT)), *COMPANY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"slots": 4}, {"slots": 15, "steps_per_sync": 0}, {"kv_tokens": 96}],
    ids=["slots are short", "adaptive", "pages are short"],
)
def test_26_tokens_are_those_of_an_engine_that_is_not_ahead(expected, how):
    serving, lengths = engine(build(TEXT), ahead=True, **how), set()
    decode = serving._device.decode
    serving._device.decode = lambda plan: (lengths.add(int(plan[1].steps)), decode(plan))[1]
    assert_equal(run(serving, *COMPANY), expected)
    pool = serving._scheduler.pool
    assert pool.free == pool.total and not serving._flights
    assert lengths == ({4, 16} if "steps_per_sync" in how else {3})


@pytest.mark.slow
async def test_27_weights_pauses_and_aborts_wait_for_unread_tokens():
    old, new = build(TEXT), build(TEXT, seed=1)
    serving = engine(old, slots=3, ahead=True)
    stream = serving.generate(request("r", PROMPT, n=4, seed=3, max_new_tokens=30))
    other = asyncio.create_task(collect(serving.generate(request("s", PROMPT, n=2, max_new_tokens=40)), 2))
    chunks = [await anext(stream) for _ in range(4)]
    await serving.update_weights(1, models.split(new)[1])
    assert not serving._flights
    chunks += [await anext(stream) for _ in range(4)]
    await serving.pause()
    before = serving.stats().tokens_generated
    assert not serving._flights
    await serving.abort("r/0")
    assert serving._task is not None
    await asyncio.wait([serving._task])
    assert serving.stats().tokens_generated == before
    await serving.resume()

    async def all_chunks():
        for chunk in chunks:
            yield chunk
        async for chunk in stream:
            yield chunk

    answers = await collect(all_chunks(), 4)
    assert [a.finish for a in answers] == [FinishReason.ABORT] + [FinishReason.LENGTH] * 3
    for answer in [*answers, *await other]:
        before, after = full_logprobs(old, PROMPT, answer.ids), full_logprobs(new, PROMPT, answer.ids)
        right = np.where(np.array(answer.versions) == 0, before, after)
        np.testing.assert_allclose(answer.logprobs, right, rtol=0, atol=1e-5)
    assert set(answers[1].versions) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["dispatch", "read"])
async def test_27_a_failure_costs_the_culprit_only(expected, fails):
    """The device refuses a turn (`dispatch`), or fails while it computes the turn (`read`)."""
    serving = engine(build(TEXT), ahead=True)
    work = serving._device.decode

    class Broken:
        def __init__(self, slots_B):
            self.slots_B = slots_B

        def read(self):
            raise MemoryError("RESOURCE_EXHAUSTED")

    def fail(plan):
        tokens = work(plan)
        if "bad" not in {job.request.rid for job in serving._scheduler.holders(plan[0])}:
            return tokens
        if fails == "dispatch":
            raise MemoryError("RESOURCE_EXHAUSTED")
        return Broken(tokens.slots_B)

    serving._device.decode = fail  # type: ignore[method-assign]
    bad = request("bad", PROMPT, n=2, max_new_tokens=9)
    *rest, lost = await serve(serving, [*COMPANY[:3], bad], lossy=True)
    assert isinstance(lost, EngineError) and "'bad' was lost: MemoryError" in str(lost)
    assert_equal(rest, expected[:3])
    assert not serving._flights and not serving._scheduler.jobs
    assert_equal(await serve(serving, COMPANY[3:]), expected[3:])


async def test_27_a_cancelled_caller_loses_no_tokens(expected):
    serving = engine(build(TEXT), ahead=True)
    answers = asyncio.create_task(serve(serving, COMPANY[:1]))
    while not answers.done():
        pausing = asyncio.create_task(serving.between_turns(lambda: None))
        for _ in range(3):
            await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.sleep(0)
    assert_equal(await answers, expected[:1])


async def test_27_nothing_that_is_not_finite_is_blamed_on_the_next_sample_of_a_slot(expected):
    """The cache of one sample is spoilt while its next round is dispatched already."""
    serving = engine(build(TEXT), slots=6, ahead=True)
    work, rounds = serving._device.decode, []

    def spoil(plan):
        rounds.append(len(serving._flights))
        if len(rounds) == 3:
            page = next(s.pages[-1] for s in serving._scheduler.occupant if s and s.job.request.rid == "r1")
            serving._device.cache = jax.tree.map(lambda x: x.at[:, page].set(np.nan), serving._device.cache)
        return work(plan)

    serving._device.decode = spoil  # type: ignore[method-assign]
    results = await serve(serving, COMPANY, lossy=True)
    assert isinstance(results[1], EngineError) and "not finite" in str(results[1])
    assert_equal(results[:1] + results[2:], expected[:1] + expected[2:])
    assert sum(rounds) > 3, "rounds were dispatched ahead"


def test_28_rounds_are_long_while_nobody_waits_or_is_near_the_end():
    def lengths(slots: int, pages: int, *limits: int, stop_ids=(), ahead=True, small=True) -> list[int]:
        pace = EngineLimits.pace(jax.devices()[0], 0, ahead)
        scheduler = Scheduler(EngineLimits(slots, 512, 40, kv_tokens=16 * pages, small_model=small, **pace))
        for number, limit in enumerate(limits):
            scheduler.submit(request(f"{number}", PROMPT, max_new_tokens=limit, stop_ids=stop_ids))
        found = []
        while scheduler.jobs:
            assert scheduler.next_turn()
            starting, steps = list(itertools.chain.from_iterable(scheduler.starting.values())), scheduler.steps
            slots_B = np.array([sample.slot for sample in starting]) if starting else scheduler.to_decode()
            found += [] if starting else [steps]
            left_B = (scheduler.table.limit_N - scheduler.table.produced_N)[slots_B]
            count_B = np.minimum(left_B, 1 if starting else steps)
            tokens_BR = np.ones((len(slots_B), steps), np.int32)
            flight = scheduler.dispatched(slots_B, 0)
            scheduler.record(flight, slots_B, tokens_BR, tokens_BR.astype(np.float32), count_B)
        return found

    assert lengths(2, 64, 150, 150) == [64, 64, 16, 4, 4]
    assert lengths(2, 64, 150, 23) == [16, 4, 4, 64, 16, 16, 16, 4, 4, 4, 4]
    assert lengths(1, 64, 30, 30) == [4] * 8 + [16, 4, 4, 4, 4], "while a sample waits"
    assert lengths(4, 12, *[40] * 4)[:2] == [16, 16]
    assert lengths(4, 11, *[40] * 4)[:2] == [16, 4], "11 pages have no room for 4 times 33 tokens behind 7"
    cpu = functools.partial(lengths, ahead=False)
    assert cpu(2, 64, 30, 30) == [16, 13] and cpu(2, 64, 8, 30) == [7, 16, 6], "until the first sample ends"
    assert cpu(1, 64, 8, 8) == [4, 4, 7], "while a sample waits"
    assert cpu(4, 11, *[40] * 4)[:3] == [16, 4, 4], "11 pages have no room for 4 times 33 tokens behind 7"
    assert cpu(2, 64, 8, 8, stop_ids=(3,)) == cpu(2, 64, 8, 8, small=False) == [4, 4], "a sample may end earlier"
