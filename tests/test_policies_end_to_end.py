"""Every policy with real engines and a real learner, on a tiny text task: what is special about each shows in what it
trained on, and a run that is stopped goes on with what it had begun."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from run_cases import POLICIES, Diary, assert_same_bits, flags, letters, model_arrays
from turns import by_turns

from fluxjax.config.cli import load
from fluxjax.coordinator.policies.tail_batching import TailBatching
from fluxjax.data.prepare import Preparer
from fluxjax.learner.learner import GAP
from fluxjax.rewards.scorer import Scorer
from fluxjax.run.trainer import FluxTrainer
from rollout.jax_engine import JaxEngine

pytestmark = pytest.mark.long

STEPS = 4
OPTIONS = POLICIES | {
    "tail_batching": POLICIES["tail_batching"]
    | {"rollout__temperature": "reverse: linear(1.3, 0.8)", "policy__max_staleness": 0},
    "adaptive_async": POLICIES["adaptive_async"] | {"algorithm__importance__decoupled": True},
}


def configuration(folder, policy: str):
    data = letters(folder, count=60)
    # The policy ends when it happens to, so lengths have a long tail, and room enough that groups end one by one.
    settings = {"steps": STEPS, "policy": policy, "rollout__engines": 2, "rollout__max_new_tokens": 64}
    settings |= {"rollout__max_sequence_tokens": 112, "packing__tokens_per_row": 128}
    settings |= {"warm_start__steps": 2, "checkpoint__every": 0, "evaluation__every": 0, "rollout__slots": 64}
    settings |= data | OPTIONS[policy]
    return load(["--config=configs/text.py", f"--config.run_dir={folder / 'run'}", *flags(**settings)])


@pytest.mark.medium
@pytest.mark.parametrize("policy", by_turns(["april", "tail_batching", "adaptive_async"]))
def test_stopped_and_resumed(policy: str, tmp_path) -> None:
    first, second = Diary(stop_after=2), Diary()
    for diary in (first, second):
        with FluxTrainer(configuration(tmp_path, policy)) as trainer:
            result = trainer.fit(callbacks=[diary])
            ledger = trainer.coordinator.ledger
    assert result.summary.steps == STEPS and result.summary.complete
    steps = first.groups | second.groups
    assert sorted(steps) == list(range(1, STEPS + 1))
    draws = [group.prompt.draw for groups in steps.values() for group in groups]
    assert len(set(draws)) == len(draws) == 4 * STEPS, "no prompt is trained on twice"
    assert set(draws) | set(ledger.entries) == set(range(ledger.last_draw + 1)), "and none is lost"

    metrics = first.metrics | second.metrics
    gaps = [one[GAP] for one in metrics.values() if GAP in one]
    assert gaps and max(gaps) < 1e-5, "what these very weights generated has the trainer's log-probs, prefix or not"
    lags = [metrics[step]["staleness/lag_max"] for step in sorted(metrics)]
    responses = [sample.response for groups in steps.values() for group in groups for sample in group.samples]
    mixed = [response for response in responses if len(set(response.versions)) > 1]
    if policy == "tail_batching":
        assert max(lags) == 0 and not mixed
        assert isinstance(trainer.coordinator.policy, TailBatching)
        rounds = trainer.coordinator.policy.rounds
        assert rounds["long"] and rounds["short"] + rounds["long"] == STEPS
        temperatures = [groups[0].samples[0].response.temperature for _, groups in sorted(steps.items())]
        assert temperatures == pytest.approx(np.linspace(1.3, 0.8, STEPS))
    else:  # whether a response is of several versions is a matter of timing; that its tokens fit is not, see above
        assert 0 < max(lags) <= 4


TIMED: dict[str, list[str]] = {
    "synchronous": ["--config.policy=synchronous"],
    # a long round, whose deferred prompts would begin before its new ones are drawn
    "tail_batching": ["--config.policy=tail_batching"],
    # samples that wait for the slots of those that are not needed
    "surplus": ["--config.policy=tail_batching", "--config.policy.prompts=1.25", "--config.policy.responses=1.25"],
}


def late(method: Any, seconds: float) -> Any:
    """Every second call of a method begins so much later."""
    calls = itertools.count()

    async def waits(*args: Any) -> Any:
        await asyncio.sleep(seconds * (next(calls) % 2))
        return await method(*args)

    return waits


@pytest.mark.slow
@pytest.mark.parametrize("case", by_turns(TIMED))
def test_timing_changes_nothing(case: str, tmp_path, monkeypatch) -> None:
    """On one embedded engine, runs have the same bits whenever prompts are drawn, aborts heard and responses scored."""
    settings = [*TIMED[case], "--config.steps=2", "--config.evaluation.samples=4", "--config.checkpoint.every=0"]
    diaries = []
    for run in ("straight", "late"):
        if run == "late":
            for kind, method, seconds in ((Preparer, "draw", 0.1), (Scorer, "score", 0.02), (JaxEngine, "abort", 0.1)):
                monkeypatch.setattr(kind, method, late(getattr(kind, method), seconds))
        diaries.append(Diary())
        config = load(["--config=configs/text.py:debug", f"--config.run_dir={tmp_path / run}", *settings])
        with FluxTrainer(config) as trainer:
            trainer.fit(callbacks=[diaries[-1]])
    straight, other = (diary.groups for diary in diaries)
    different = [step for step in straight if straight[step] != other[step]]
    assert not different, f"other groups, tokens or log-probs in steps {different}"
    assert_same_bits(model_arrays(tmp_path / "straight"), model_arrays(tmp_path / "late"))
