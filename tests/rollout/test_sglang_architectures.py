"""Real SGLang serves Qwen3-VL and Qwen3.5 with the log-probs of `transformers`: text, images, videos, prefixes, pauses.

The trainer's models have them, too.

Every test needs `bash scripts/test_sglang.sh`, which runs this file.
"""

from __future__ import annotations

import asyncio
import pathlib
import re
from collections.abc import Iterator

import numpy as np
import pytest
import rollout_cases
from architecture_cases import (
    PROMPTS,
    PromptArrays,
    Reply,
    Serving,
    TrainerModel,
    TransformersModel,
    prompt,
    serving,
    sums_of,
    token_ids,
)
from protocol_cases import LONGEST, client_at, sglang_python
from safetensors.numpy import load_file, save_file

from models.hf import SINGLE
from rollout.engine import WeightsMismatch
from rollout.sglang import PauseMode

pytestmark = [pytest.mark.slow, pytest.mark.long]
GAP = 1e-4  # absolute, float32
ARCHITECTURES = [
    pytest.param("Qwen3VL", marks=pytest.mark.turn(2)),
    pytest.param("Qwen3_5", marks=pytest.mark.turn(1)),
]
hybrid = pytest.mark.parametrize("server", ARCHITECTURES[1:], indirect=True, scope="module")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    sglang_python()  # skips where there is none, before PyTorch is imported
    pytest.importorskip("transformers", reason="parity lane: needs torch and transformers")
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


def assert_right(reference: TransformersModel | TrainerModel, asked: PromptArrays, reply: Reply) -> None:
    assert not set(reply.ids) & set(token_ids().values())
    np.testing.assert_allclose(reply.logprobs, reference.logprobs(asked, reply.ids), rtol=0, atol=GAP)


async def test_log_probs_of_text_and_media_before_and_after_an_update(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of prompts that were seen before: neither features nor cached states outlive their weights."""
    monkeypatch.setattr(rollout_cases, "LONGEST", LONGEST)  # of the trainer's forward pass
    async with client_at(server.address) as client:
        for seed in (1, 2):
            await client.pause("retract")
            await server.update(client, seed)
            await client.resume()
            trained = TrainerModel(server.checkpoint)
            tasks = [server.ask(client, f"{name}-{seed}", asked, max_new_tokens=12) for name, asked in PROMPTS.items()]
            for asked, reply in zip(PROMPTS.values(), await asyncio.gather(*tasks), strict=True):  # a batch mixes them
                assert_right(server.reference, asked, reply)
                assert_right(trained, asked, reply)
                for ours, theirs in zip(trained.positions(asked), server.reference.positions(asked), strict=True):
                    np.testing.assert_array_equal(ours, theirs)
                assert reply.meta["weight_version"] == str(seed)


async def test_other_weights_are_noticed(server: Serving, tmp_path: pathlib.Path) -> None:
    """Each by its name, if one bit of it differs."""
    async with client_at(server.address) as client:
        held = await client.checksums()
    sums_of(server.checkpoint).check(held, server.address)
    whole = load_file(server.checkpoint / SINGLE)
    for name in np.random.default_rng().permutation(sorted(whole))[:12].tolist():
        changed = whole[name].copy()
        changed.flat[-1] = np.nextafter(changed.flat[-1], np.float32(9))
        save_file(whole | {name: changed}, tmp_path / SINGLE)
        sums = sums_of(tmp_path)
        with pytest.raises(WeightsMismatch, match=re.escape(sums._served_name(name))):
            sums.check(held, server.address)


async def test_a_second_turn_goes_on_from_the_first(server: Serving) -> None:
    """What the server keeps of the first turn is used again, and does not show. The second turn may have media."""
    async with client_at(server.address) as client:
        for number, (name, first) in enumerate(PROMPTS.items()):
            reply = await server.ask(client, f"first-{name}", first, max_new_tokens=10)
            for kept, further in ((10, prompt(4, seed=number)), (6, prompt(2, ("image", (1, 2, 4)), 3, seed=number))):
                second = first + PromptArrays(tuple(reply.ids[:kept])) + further
                turn = await server.ask(client, f"second-{name}-{kept}", second, max_new_tokens=10)
                assert_right(server.reference, second, turn)
                assert turn.meta["cached_tokens"] >= len(first.ids)


@hybrid
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_pause_costs_no_state(server: Serving, mode: PauseMode) -> None:
    """A greedy response that is paused, and goes on, has the tokens of one that is not."""
    asked = PROMPTS["mixed"]
    async with client_at(server.address) as client:
        whole = await server.ask(client, f"whole-{mode}", asked, max_new_tokens=120)
        task = asyncio.create_task(server.ask(client, f"paused-{mode}", asked, max_new_tokens=120))
        beside = asyncio.create_task(server.ask(client, f"beside-{mode}", PROMPTS["text"], max_new_tokens=120))
        while (await client.load())["running"] < 2:
            assert not task.done(), "its response ended before anybody saw it run: ask for a longer one"
        await client.pause(mode)
        await asyncio.sleep(0.5)
        assert task.done() == (mode == "abort")
        await client.resume()
        paused = await task
        assert_right(server.reference, asked, paused)
        assert_right(server.reference, PROMPTS["text"], await beside)
        if mode == "abort":
            begun = asked + PromptArrays(tuple(paused.ids))
            rest = await server.ask(client, "rest", begun, max_new_tokens=120 - len(paused.ids))
            assert rest.meta["cached_tokens"] >= len(asked.ids)
            paused.ids.extend(rest.ids)
    assert paused.ids == whole.ids


@hybrid
async def test_a_response_goes_on_under_new_weights(server: Serving) -> None:
    """Its state is computed again: a state of the old weights would show in every later token."""
    asked, old = PROMPTS["mixed"], server.reference
    async with client_at(server.address) as client:
        task = asyncio.create_task(server.ask(client, "across", asked, max_new_tokens=120))
        while not (await client.load())["running"]:
            assert not task.done(), "its response ended before anybody saw it run: ask for a longer one"
        await client.pause("retract")
        await server.update(client, 3)
        await client.resume()
        reply = await task
    first = reply.meta["weight_versions"][0]["end"]
    assert 0 < first < 120
    parts = [reference.logprobs(asked, reply.ids) for reference in (old, server.reference)]
    expected = np.concatenate([parts[0][:first], parts[1][first:]])
    np.testing.assert_allclose(reply.logprobs, expected, rtol=0, atol=GAP)
