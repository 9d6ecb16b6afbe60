"""Training before a round is over, with real engines and a real learner: half of the engines are lent each round, or
what is complete is trained on early, and the run is that of the same configuration without it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator

import jax
import numpy as np
import pytest
from run_cases import Diary, flags, letters

from fluxjax.config.cli import load
from fluxjax.coordinator import PromptStage
from fluxjax.coordinator.policies import early_training
from fluxjax.coordinator.policies.early_training import StreamTrainer
from fluxjax.coordinator.policies.rounds import Rounds
from fluxjax.learner.learner import GAP
from fluxjax.run.trainer import FluxTrainer
from rollout.engine import FinishReason, GenerateRequest, TokenChunk
from rollout.jax_engine import JaxEngine

pytestmark = pytest.mark.long

STEPS, PROMPTS = 3, 8


def responses(diary: Diary, step: int) -> dict[tuple[int, int], tuple]:
    found = [sample.response for group in diary.groups[step] for sample in group.samples]
    return {(one.draw, one.sample): (one.token_ids, one.versions, one.logprobs) for one in found}


def held_back(trainer: FluxTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of each step's prompts does not end before a group is trained on, however busy the machine is.

    Their last chunk waits for that; if the request is aborted meanwhile, as it is when its engine is lent, the response
    is cut off before that chunk and goes on elsewhere.
    """

    def hold(engine: JaxEngine) -> None:
        generate, abort, aborted = engine.generate, engine.abort, set()

        async def generate_held(request: GenerateRequest) -> AsyncIterator[TokenChunk]:
            draw, of_training, _ = request.rid.partition(".")  # not of an evaluation
            held = of_training and int(draw) % PROMPTS >= 3 * PROMPTS // 4
            async for chunk in generate(request):
                while held and chunk.finish not in (None, FinishReason.ABORT):
                    if trainer.coordinator.ledger.count(PromptStage.TRAINING):
                        break
                    if request.rid in aborted:
                        chunk = TokenChunk(chunk.rid, chunk.sample, (), (), (), FinishReason.ABORT)
                    await asyncio.sleep(0.001)
                yield chunk

        async def abort_noted(rid: str) -> None:
            aborted.add(rid)
            await abort(rid)

        monkeypatch.setattr(engine, "generate", generate_held)
        monkeypatch.setattr(engine, "abort", abort_noted)

    for engine in trainer.engines:
        assert isinstance(engine, JaxEngine)
        hold(engine)


def run(folder, *, hold: pytest.MonkeyPatch | None = None, **changes):
    """Four devices train, the first two of them also generate. `hold`: see `held_back`."""
    # Rounds are so long that groups end one by one, on two cores at least: engines and trainer must run side by side.
    settings = {"steps": STEPS, "rollout__engines": 2, "rollout__max_new_tokens": 64}
    settings |= {"rollout__prompts_per_step": PROMPTS}
    settings |= {"warm_start__steps": 2, "checkpoint__every": 0, "evaluation__every": 0, "rollout__slots": 64}
    settings |= {"sharding__devices": 4, "optim__eps": 1e-2, "rollout__max_sequence_tokens": 112}
    settings |= letters(folder, count=60) | {"packing__tokens_per_row": 128} | changes
    folder.mkdir(exist_ok=True)
    config = load(["--config=configs/text.py", f"--config.run_dir={folder / 'run'}", *flags(**settings)])
    diary = Diary()
    with FluxTrainer(config) as trainer:
        if hold:
            held_back(trainer, hold)
        assert trainer.fit(callbacks=[diary]).summary.complete
        prefilled = sum(engine.stats().tokens_prefilled for engine in trainer.engines)
        return diary, trainer.learner.params, trainer.coordinator, prefilled


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"))


def check_same(plain, diary, params) -> None:
    """Token for token; the weights to float tolerance."""
    for step in range(1, STEPS + 1):
        one, other = responses(diary, step), responses(plain[0], step)
        assert one.keys() == other.keys()
        for key, (tokens, versions, logprobs) in one.items():
            assert tokens == other[key][0] and set(versions) == {step - 1}
            np.testing.assert_allclose(logprobs, other[key][2], atol=1e-5, rtol=0)
        assert diary.metrics[step][GAP] < 1e-5
    difference = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), params, plain[1])
    assert max(jax.tree.leaves(difference)) < 1e-5, "after several steps, from 1e-6 each"


def test_stream_trainer(plain, tmp_path, monkeypatch) -> None:
    """Responses that were moved in the middle are those never moved."""
    monkeypatch.setattr(early_training, "StreamTrainer", functools.partial(StreamTrainer, chunk=1, last=0.8))
    diary, params, coordinator, prefilled = run(tmp_path, hold=monkeypatch, stream_trainer=True)
    assert isinstance(coordinator.policy, Rounds) and coordinator.policy.stream is not None
    assert coordinator.policy.stream.lent == STEPS
    assert all(metrics["stream/groups"] >= 1 for metrics in diary.metrics.values())
    assert prefilled > plain[3], "prefixes were computed again"
    check_same(plain, diary, params)


def test_speculative_sync(plain, tmp_path) -> None:
    """The pace is measured in the run, so nothing begins early in its first step."""
    diary, params, coordinator, _ = run(tmp_path, speculative_sync=1e-6)
    assert isinstance(coordinator.policy, Rounds) and coordinator.policy.speculative is not None
    assert coordinator.policy.speculative.begun >= 1
    assert "stream/groups" not in diary.metrics[1]
    assert any("stream/groups" in metrics for metrics in diary.metrics.values())
    check_same(plain, diary, params)
