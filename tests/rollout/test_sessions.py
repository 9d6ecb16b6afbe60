"""Conversations whose prefixes an engine keeps between turns. The rules, each tested under its number:

26. A turn of a conversation computes only the tokens behind the kept pages, and only their media. Tokens are those of
    one request with the whole history; log-probs are those of the trainer's forward pass.
27. Nothing else depends on kept pages: eviction, preemption, new weights, aborts, sleep and other devices change no
    token, and a request that an empty cache can serve is served.
28. Kept pages are never written. When all sessions have ended, all pages are free.
"""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
import rollout_cases
from paged_device import small_chunks
from rollout_cases import QWEN3_5, QWEN3_VL, TEXT, VL, build, engine, full_logprobs
from session_cases import Episode, ask, text

from rollout import turns

TOLERANCE = 1e-4
LONG = 192
MEDIA = [
    ("image", (1, 4, 8), 1),
    ("image", (1, 4, 4), 2),
    ("video", (2, 4, 4), 3),
    ("image", (1, 8, 4), 4),
]


@pytest.fixture(autouse=True)
def long_rows(monkeypatch):
    monkeypatch.setattr(rollout_cases, "LONGEST", LONG)


def observation(turn, number, vision):
    """What comes behind a turn; every sample of a group sees something else."""
    kind, grid, seed = MEDIA[turn % len(MEDIA)]
    shown = [(kind, grid, seed + 10 * number)] if vision else []
    return [text(3, 100 * turn + number), *shown, text(2 + turn, 50 * turn + number)]


def assert_trainers(model, prompt, answer):
    expected = full_logprobs(model, prompt, answer.ids, never=(36, 37, 38, 39))
    np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)


async def play(serving, model, group=1, turns=4, vision=True, between=None, shadow=lambda prompt: prompt, **how):
    """Plays the conversations of a group. Returns the answers by turn and sample, and the tokens of all prompts."""
    first = [text(19, 7), *([MEDIA[3]] if vision else []), text(4, 8)]
    episodes = [Episode("group", number, list(first), seed=3) for number in range(group)]
    answers, tokens = [], 0
    for turn in range(turns):
        if turn == 0:
            requests = [episodes[0].request("first", group, **how)]
        else:
            requests = [each.request(f"turn {turn}.{each.number}", **how) for each in episodes]
        prompts = [each.prompt for each in requests]
        tokens += sum(map(len, prompts))
        asked = [dataclasses.replace(each, prompt=shadow(each.prompt)) for each in requests]
        came = list(itertools.chain(*await asyncio.gather(*(ask(serving, each) for each in asked))))
        for number, answer in enumerate(came):
            assert_trainers(model, prompts[number % len(prompts)], answer)
            episodes[number].add(answer, *observation(turn, number, vision))
        answers.append([answer.ids for answer in came])
        if between is not None:
            model = await between(turn) or model
    return answers, tokens


def idle(serving):
    pool = serving._scheduler.pool
    return pool.free == pool.total


ENGINES = {
    "text": (TEXT, {}),
    "ahead": (VL, {"ahead": True}),
    "media": (VL, {}),
    "deep features": (QWEN3_VL, {}),
    "chunks": (VL, {}),
    "states": (QWEN3_5, {"kept_states": 5}),
    "states in chunks": (QWEN3_5, {"kept_states": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ENGINES))
async def test_26_a_turn_computes_what_is_new(name, monkeypatch):
    config, how = ENGINES[name]
    if "chunks" in name:
        small_chunks(monkeypatch, 16)
        monkeypatch.setattr(turns, "PREFILL_PATCHES", 16)
    model, vision = build(config), config is not TEXT
    sizes = {"max_sequence_tokens": LONG, **how}
    plain, kept = engine(model, **sizes), engine(model, **sizes)
    sampling = {"temperature": 1.0, "stop_ids": (3, 5)}
    answers, _ = await play(kept, model, 3, vision=vision, **sampling)
    whole = [[] for _ in answers]
    episodes = [
        Episode("", number, [text(19, 7), *([MEDIA[3]] if vision else []), text(4, 8)], 3) for number in range(3)
    ]
    for turn, ids in enumerate(answers):
        for each in episodes:
            (answer,) = await ask(plain, each.request(f"{turn}.{each.number}", session=False, **sampling))
            whole[turn].append(answer.ids)
            each.add(answer, *observation(turn, each.number, vision))
        assert whole[turn] == ids
    print(name, kept.stats().tokens_prefilled, plain.stats().tokens_prefilled)
    assert kept.stats().tokens_prefilled < 0.6 * plain.stats().tokens_prefilled
    await kept.end_session("group")
    assert idle(kept) and not len(kept._scheduler.kept)
