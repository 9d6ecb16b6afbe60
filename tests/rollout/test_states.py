"""The engine with layers that have states (Qwen3.5): a state is one array a slot, which no page holds.

24. What an engine decodes is the full forward pass, whatever a state goes on from: a prompt's end, which a group forks,
    the chunk before, or the tokens of a response that began elsewhere or was interrupted.

`test_pages.py` has the rule for the plans, for drawn histories.
"""

import asyncio
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import rollout_cases
from paged_device import small_chunks
from rollout_cases import (
    END,
    IMAGE,
    LONGEST,
    QWEN3_5,
    START,
    VIDEO,
    build,
    engine,
    full_logits,
    full_logprobs,
    media_prompt,
    request,
    run,
)
from rollout_cases import text_prompt as text
from turns import by_turns

import models
from models import hf
from models.config import DecoderConfig
from rollout.engine import FinishReason
from rollout.engine_weights import served as served_names

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # absolute, float32 log-probs: sums through a state have another order, token by token
TEXT = DecoderConfig("qwen3_5_text", QWEN3_5.text)
WORDS: dict[str, Any] = {"forbidden_ids": (IMAGE, VIDEO, START, END)}
PREFIXES = ((), (3, 4, 5), tuple(range(2, 22)), ())
LONG = 3 * LONGEST  # more tokens than one chunk of the delta rule


def assert_full_forward(model, asked, answers):
    for sample, answer in enumerate(answers):
        before = asked.prefix_ids[sample] if asked.prefix_ids else ()
        expected = full_logprobs(model, asked.prompt, before + answer.ids, never=asked.sampling.forbidden_ids)
        np.testing.assert_allclose(answer.logprobs, expected[len(before) :], rtol=0, atol=TOLERANCE)


def assert_same(answers, expected):
    for group, other in zip(answers, expected, strict=True):
        assert [(a.ids, a.finish) for a in group] == [(b.ids, b.finish) for b in other]
        for a, b in zip(group, other, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=TOLERANCE)


def company():
    """Groups, a prompt of several chunks of the delta rule, begun responses, and an image."""
    image = media_prompt(2, ("image", (1, 4, 8)), 30, seed=1)
    return [
        request("group", text(21, seed=1), n=5, seed=1, max_new_tokens=30, **WORDS),
        request("long", text(150, seed=2), n=3, seed=2, max_new_tokens=12, **WORDS),
        request("begun", text(33, seed=3), n=4, seed=3, prefix=PREFIXES, max_new_tokens=34, **WORDS),
        request("image", image, n=2, seed=4, prefix=((), (7,) * 20), max_new_tokens=28, **WORDS),
        request("greedy", text(16, seed=5), n=2, temperature=0.0, max_new_tokens=20, **WORDS),
    ]


@pytest.fixture(scope="module")
def expected():
    """The answers to the company with room for everybody, which are those of the full forward pass."""
    model = build(QWEN3_5)
    answers = run(engine(model, max_sequence_tokens=LONG), *company())
    for asked, group in zip(company(), answers, strict=True):
        assert_full_forward(model, asked, group)
    prompt, greedy = company()[-1].prompt, answers[-1][0]
    logits = full_logits(model, prompt, greedy.ids)
    logits[:, list(WORDS["forbidden_ids"])] = -np.inf
    assert logits.argmax(axis=1).tolist() == list(greedy.ids)
    return answers


def test_24_the_state_matters(expected):
    """Else this file says nothing: what is far behind changes what comes next."""
    ids = expected[1][0].ids
    near = full_logprobs(build(QWEN3_5), text(150, seed=2), ids)
    far = full_logprobs(build(QWEN3_5), rollout_cases.prompt_of([*[1] * 90, *text(150, seed=2).token_ids_T[90:]]), ids)
    assert np.abs(near - far).max() > 100 * TOLERANCE


@pytest.mark.parametrize("chunk", by_turns([16, 32]))
def test_24_a_prompt_in_chunks_is_the_prompt(monkeypatch, expected, chunk):
    small_chunks(monkeypatch, chunk)
    serving = engine(build(QWEN3_5), max_sequence_tokens=LONG)
    assert_same(run(serving, *company()), expected)
    assert {"fill", "continue"} <= {name for name, _ in serving.compiled_shapes}


def test_24_samples_that_lost_their_pages_or_wait_for_slots_get_the_same_tokens(expected):
    small = engine(build(QWEN3_5), max_sequence_tokens=LONG, slots=6, kv_tokens=LONG + 48)
    assert_same(run(small, *company()), expected)
    assert small.stats().preemptions > 0


def test_24_two_devices_generate_what_one_does(expected):
    serving = engine(build(QWEN3_5), max_sequence_tokens=LONG, devices=jax.devices("cpu")[:2])
    assert_same(run(serving, *company()[1:3]), expected[1:3])
    states = serving._device.cache.states
    assert {shard.data.size for shard in states.heads_BVHJ.addressable_shards} == {states.heads_BVHJ.size // 2}


def test_24_a_response_goes_on_from_certain_tokens(expected):
    """As a partial rollout does: some tokens from one engine, the others from another."""
    asked = company()[0]
    cut = [answer.ids[: 4 + 7 * i] for i, answer in enumerate(expected[0])]
    (rest,) = run(engine(build(QWEN3_5)), dataclasses.replace(asked, prefix_ids=tuple(cut)))
    for before, answer, whole in zip(cut, rest, expected[0], strict=True):
        assert before + answer.ids == whole.ids
        np.testing.assert_allclose(answer.logprobs, whole.logprobs[len(before) :], rtol=0, atol=TOLERANCE)


async def test_24_new_weights_and_aborts_between_rounds():
    old, new = build(TEXT), build(TEXT, seed=1)
    serving = engine(old, slots=5, version=1)
    asked = request("r", text(20, seed=7), n=6, seed=3, max_new_tokens=24)
    stream = serving.generate(asked)
    answers = [rollout_cases.Answer() for _ in range(6)]
    chunk = await anext(stream)
    answers[chunk.sample].add(chunk)
    await serving.update_weights(2, models.split(new)[1])
    await serving.abort("r/1")
    async for chunk in stream:
        answers[chunk.sample].add(chunk)
    assert answers[1].finish is FinishReason.ABORT
    for answer in answers:
        first = answer.versions.count(1)
        by_old, by_new = (full_logprobs(model, asked.prompt, answer.ids) for model in (old, new))
        expected = np.concatenate([by_old[:first], by_new[first:]])
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)
    assert any(0 < answer.versions.count(1) < len(answer.ids) for answer in answers)
    await serving.sleep()
    await serving.wake()
    (again,) = await rollout_cases.serve(serving, [dataclasses.replace(asked, rid="s")])
    assert_full_forward(new, asked, again)


def test_24_states_are_counted_in_the_cache(monkeypatch):
    """A slot has two layers' states of 4 heads of 8 x 6 numbers, and three tokens of 56 channels."""
    serving, slots = engine(build(TEXT), slots=7), 7
    run(serving, request("r", text(5), max_new_tokens=4))
    a_slot, a_token = 2 * 4 * (4 * 8 * 6 + 3 * 56), 2 * 2 * 4 * 2 * 12
    assert serving.cache_usage.bytes == slots * (a_slot + LONGEST * a_token)
    monkeypatch.setattr(serving._device, "layout", dataclasses.replace(serving._device.layout))
    assert serving._device.room(0.5, slots * a_slot + 99 * a_token) == 99 * 1
    assert serving._device.room(0.5, a_slot) == 0


def test_24_weights_have_their_names_on_disk():
    """What servers would read is what a checkpoint has."""
    serving = engine(build(QWEN3_5))
    served = dict(asyncio.run(serving.disk_tensors()))
    saved = dict(hf.disk_tensors(served_names(QWEN3_5), models.split(build(QWEN3_5))[1]))
    assert served.keys() == saved.keys()
    for name, value in served.items():
        np.testing.assert_array_equal(value, saved[name])
