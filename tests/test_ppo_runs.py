"""PPO from configuration to summary: it learns, its critic learns, and a run that was interrupted has lost nothing."""

import json

import numpy as np
import pytest
from run_cases import as_if_killed, assert_same_run, checkpoint_arrays, flags, summary

from fluxjax import evaluate
from fluxjax.config.cli import load
from fluxjax.report.metrics import read
from fluxjax.run.checkpoint import ResumeError
from fluxjax.run.trainer import FluxTrainer

pytestmark = pytest.mark.long

STEPS = 40
PPO = {"algorithm__name": "ppo", "algorithm__minibatches": 2, "critic__lr": 0.01, "critic__warmup_steps": 1}
PPO |= {"algorithm__kl_coefficient": 0.01}


def tiny(run_dir, data, **own):
    settings = {"steps": STEPS, "checkpoint__every": STEPS - 2, "evaluation__every": 0, "warm_start__steps": 4}
    settings |= {"rollout__prompts_per_step": 12} | PPO | data | own
    return load(["--config=configs/text.py", f"--config.run_dir={run_dir}", *flags(**settings)])


def records(run_dir):
    return [record for record in read(run_dir / "metrics.jsonl") if record["phase"] == "rl"]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """All steps at once: in the first one the critic alone is trained, then both."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with FluxTrainer(tiny(run_dir, data)) as trainer:
        trainer.fit()
    return run_dir


def test_it_learns_and_the_critic_foresees_more_and_more(whole):
    """From a short warm start: rewards rise, and so does the variance that values explain."""
    steps = records(whole)

    def mean(name, of):
        return np.mean([record[name] for record in of])

    assert mean("reward/mean", steps[-10:]) > mean("reward/mean", steps[:10]) + 0.1
    assert mean("critic/explained_variance", steps[-10:]) > mean("critic/explained_variance", steps[:10]) + 0.03
    first, *rest = steps
    assert "loss" not in first and first["critic/loss"] > 0
    assert all(record["loss"] and record["critic/grad_norm"] > 0 and record["updates"] == 2.0 for record in rest)


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(data, whole, tmp_path):
    run_dir = as_if_killed(whole, tmp_path / "run", STEPS - 2)
    with FluxTrainer(tiny(run_dir, data)) as trainer:
        trainer.fit()
    assert summary(run_dir)["resumed_from"] == [STEPS - 2]
    assert_same_run(run_dir, whole)
    arrays = checkpoint_arrays(run_dir, STEPS)
    assert any(name.startswith("['critic']['opt_state']") and np.any(array) for name, array in arrays.items())
    assert int(arrays["['critic']['version']"]) == int(arrays["['learner']['version']"]) == STEPS


@pytest.mark.medium
def test_whoever_only_looks_at_a_run_needs_to_know_nothing_of_its_critic(whole, capsys):
    assert evaluate.main(["--run", str(whole), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == STEPS


def test_a_checkpoint_without_a_critic_is_refused(data, whole, tmp_path):
    run_dir = tmp_path / "run"
    own = {"algorithm__name": "grpo", "critic__lr": 1e-3, "critic__warmup_steps": 0, "warm_start__steps": 1}
    with FluxTrainer(tiny(run_dir, data, **own)) as trainer:
        trainer.fit(num_steps=1)
    with FluxTrainer(tiny(run_dir, data)) as trainer, pytest.raises(ResumeError, match="critic"):
        trainer.fit()
