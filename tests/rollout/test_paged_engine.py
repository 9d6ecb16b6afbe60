"""The paged cache on tiny real models: what is computed in chunks, again, or from shared pages is the same (22, 23).

Numbers of rules: `test_pages.py`.
"""

import asyncio

import jax
import numpy as np
import pytest
from paged_device import small_chunks
from rollout_cases import (
    LONGEST,
    QWEN3_VL,
    TEXT,
    VL,
    assert_equal,
    assert_logprobs,
    build,
    engine,
    media_prompt,
    request,
    run,
)
from rollout_cases import text_prompt as text
from turns import by_turns

from rollout import turns
from rollout.jax_engine import JaxEngine
from rollout.slots import PAGE_TOKENS, pages_for
from sharding.kernels import paged

pytestmark = pytest.mark.slow

COMPANY = [
    request(f"r{i}", text(4 + 5 * i, seed=i), n=3, seed=i, max_new_tokens=36 - 4 * i, stop_ids=(i,)) for i in range(5)
]


def assert_empty(serving: JaxEngine) -> None:
    pool = serving._scheduler.pool
    assert pool.free == pool.total and not any(pool.holders)


@pytest.fixture(scope="module")
def expected():
    """The answers to the company with room for everybody, which are right."""
    answers = run(engine(build(TEXT)), *COMPANY)
    for asked, group in zip(COMPANY, answers, strict=True):
        for answer in group:
            assert_logprobs(build(TEXT), asked.prompt, answer)
    return answers


@pytest.mark.medium
def test_22_a_group_needs_little_more_than_its_prompt():
    serving = engine(build(TEXT))
    (answers,) = run(serving, request("r", text(48), n=12, max_new_tokens=12))
    for answer in answers:
        assert_logprobs(build(TEXT), text(48), answer)
    usage = serving.cache_usage
    assert usage.peak_pages == 3 + 12, "the prompt's pages once, and one for each response"
    assert usage.pages == 16 * LONGEST // PAGE_TOKENS
    assert usage.bytes == 2 * TEXT.text.num_layers * 16 * LONGEST * 2 * 8 * 4
    assert_empty(serving)


@pytest.mark.slow
@pytest.mark.parametrize("kv_tokens", [64, pytest.param(96, marks=pytest.mark.long)])
def test_23_a_small_pool_gives_everybody_the_same_tokens(expected, kv_tokens):
    small = engine(build(TEXT), kv_tokens=kv_tokens)
    assert_equal(run(small, *COMPANY), expected)
    assert small.cache_usage.pages == kv_tokens // PAGE_TOKENS and small.cache_usage.peak_pages <= kv_tokens // 16
    assert kv_tokens != 96 or small.stats().preemptions > 0  # the other lets in fewer
    assert_empty(small)


@pytest.mark.slow
def test_22_a_prompt_in_chunks_is_the_prompt(monkeypatch):
    model = build(TEXT)
    prefixes = ((), (3, 4, 5), tuple(range(2, 22)))
    asked = [
        request("a", text(44, seed=1), n=3, seed=1, max_new_tokens=20),
        request("b", text(33, seed=2), n=3, seed=2, prefix=prefixes, max_new_tokens=24),
        request("c", text(7, seed=3), n=2, seed=3, max_new_tokens=30),
    ]
    whole = run(engine(model), *asked)
    for answer in whole[0]:
        assert_logprobs(model, asked[0].prompt, answer)
    for chunk in (16, 32):
        small_chunks(monkeypatch, chunk)
        serving = engine(model)
        assert_equal(run(serving, *asked), whole)
        assert {"fill", "continue"} <= {name for name, _ in serving.compiled_shapes}
        assert max(sizes[1] for name, sizes in serving.compiled_shapes if name in ("prefill", "continue")) <= chunk
        assert_empty(serving)


@pytest.mark.slow
@pytest.mark.parametrize("config", by_turns([VL, QWEN3_VL], first=1))
def test_22_a_prompt_with_an_image_is_cut_behind_it(monkeypatch, config):
    model = build(config)
    prompt = media_prompt(2, ("image", (1, 4, 8)), 40, seed=1)
    asked = request("r", prompt, n=3, seed=4, max_new_tokens=9, forbidden_ids=(36, 37, 38, 39))
    expected = run(engine(model), asked)
    small_chunks(monkeypatch, 16)
    serving = engine(model, slots=2)
    assert_equal(run(serving, asked), expected)
    assert any(name == "continue" for name, _ in serving.compiled_shapes)
    assert_empty(serving)


def test_22_blocks_of_one_page_give_the_same_tokens(monkeypatch, expected):
    monkeypatch.setattr(paged, "BLOCK", PAGE_TOKENS)
    assert_equal(run(engine(build(TEXT), steps_per_sync=6), *COMPANY), expected)  # programs are shared by their steps


@pytest.mark.slow
async def test_18_a_thousand_drawn_steps_compile_at_most_eight_rounds(monkeypatch):
    """Lengths, numbers of samples and arrivals are drawn. Programs are counted by the shapes of their inputs."""
    monkeypatch.setattr(turns, "SMALL_MODEL", 0)  # rows of a round are not filled up to 32
    serving, rng = engine(build(TEXT), slots=40, steps_per_sync=2), np.random.default_rng(0)
    rounds, inputs, decode = [], set(), serving._device.decode

    def counted(plan):
        rounds.append(len(plan[0]))
        inputs.add(tuple((x.shape, x.dtype.str) for x in jax.tree.leaves(plan[1])))
        return decode(plan)

    async def finish(stream):
        async for _ in stream:
            pass

    monkeypatch.setattr(serving._device, "decode", counted)
    async with asyncio.TaskGroup() as group:
        while len(rounds) < 1000:
            prompt, samples, more = (int(x) for x in (rng.integers(1, 33), rng.geometric(0.2), rng.geometric(0.3)))
            new, number = min(int(rng.geometric(0.15)), LONGEST - prompt), len(rounds)
            asked = request(f"{rng.random()}", text(prompt, seed=number), n=samples, max_new_tokens=new)
            group.create_task(finish(serving.generate(asked)))
            while len(rounds) < number + more and serving._scheduler.jobs:
                await asyncio.sleep(0.0005)
    assert min(rounds) == 1 and max(rounds) > 32, "rounds of all sizes"
    assert len(inputs) <= 8
    assert len([name for name, _ in serving.compiled_shapes if name == "decode"]) == len(inputs)


@pytest.mark.slow
async def test_23_streams_that_are_dropped_leave_no_pages():
    serving, rng = engine(build(TEXT), slots=6, kv_tokens=128), np.random.default_rng(0)
    for turn in range(12):
        streams = [
            serving.generate(request(f"{turn}.{i}", text(3 + 11 * i, seed=i), n=3, max_new_tokens=25)) for i in range(3)
        ]
        for stream in streams:
            for _ in range(rng.integers(0, 4)):
                await anext(stream)
            await stream.aclose()
    async with serving._between_turns():
        pass
    assert_empty(serving)
    assert serving.stats().running == serving.stats().waiting == 0


def test_the_cache_takes_its_share_of_the_memory_that_is_free(monkeypatch):
    """Devices of this test tell of 64 kB of 100 as free; a token takes 256 bytes."""
    serving = engine(build(TEXT), kv_fraction=0.5)

    class Told:
        def memory_stats(self):
            return {"bytes_limit": 100_000, "bytes_in_use": 36_000}

    class Layout:
        devices = (Told(), Told())

    layout = serving._device.layout
    monkeypatch.setattr(serving._device, "layout", Layout())
    assert serving._device.room(0.5, 1) == 32_000 // 256
    monkeypatch.setattr(serving._device, "layout", layout)
    monkeypatch.setattr(serving._device, "room", lambda share, unknown: int(share * 640))
    run(serving, request("r", text(5), max_new_tokens=4))
    assert serving.cache_usage.pages == 20


def test_the_longest_sequence_has_room_however_little_is_free(monkeypatch):
    serving = engine(build(TEXT))
    monkeypatch.setattr(serving._device, "room", lambda share, unknown: 0)
    run(serving, request("r", text(5), max_new_tokens=4))
    assert serving.cache_usage.pages == pages_for(serving._limits.max_sequence_tokens)
