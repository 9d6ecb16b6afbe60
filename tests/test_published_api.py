"""Flux's API as published: what it is called there, and that it works here."""

import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from run_cases import flags, letters

import fluxjax
from fluxjax import FluxConfig, FluxTrainer, RewardConfig, RewardFunction
from fluxjax.base.errors import ConfigError, DataError
from fluxjax.config import Config
from fluxjax.config.cli import load
from fluxjax.report.metrics import read
from fluxjax.run.checkpoint import ResumeError


class Short(RewardFunction):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def compute(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        self.seen += zip(prompts, responses, strict=True)
        return [1.0 - len(text) / 100 for text in responses]


class PlainLoss:
    """The policy gradient without clipping."""

    def compute_loss(self, batch: Any, weights_BT: Any) -> Any:
        return -weights_BT * batch.advantages_BT


def small(folder: pathlib.Path, **changes: Any) -> Config:
    settings = letters(folder) | {"steps": 2, "warm_start__steps": 2, "warm_start__batch_size": 4} | changes
    return load(["--config=configs/text.py:debug", *flags(**settings, run_dir=folder / "run")])


def published(config: Config, **settings: Any) -> FluxConfig:
    return FluxConfig(**settings, **{name: getattr(config, name) for name in config.__dataclass_fields__})


def losses(folder: pathlib.Path) -> list[float]:
    return [line["loss"] for line in read(folder / "run" / "metrics.jsonl") if line["phase"] == "rl"]


def test_names_are_there_and_load_no_jax():
    assert {"FluxTrainer", "FluxConfig", "RewardConfig", "RewardFunction"} <= set(dir(fluxjax))
    code = "import sys, fluxjax; fluxjax.FluxConfig, fluxjax.RewardFunction; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    with pytest.raises(AttributeError, match="Flux"):
        fluxjax.FluxTrainers  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"learning_rate": 1e-6}, "no learning_rate: it is optim.lr here"),
        ({"batch_size": 32}, "no batch_size: it is rollout.prompts_per_step here"),
        ({"nosuch": 1}, "no nosuch: it has algorithm"),
        ({"reward": Short()}, "reward is Short; use RewardConfig"),
    ],
)
def test_published_fields_are_answered_with_the_names_here(settings: dict[str, Any], expected: str):
    with pytest.raises(ConfigError) as caught:
        FluxConfig(**settings)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_reward_function_must_compute():
    with pytest.raises(NotImplementedError, match=r"compute\(prompts, responses\)"):
        RewardFunction().compute([], [])


@pytest.mark.slow
def test_texts_and_an_own_reward_train_and_a_checkpoint_moves(tmp_path: pathlib.Path):
    reward, texts = Short(), [f"Say {letter}:" for letter in "abcdabcd"]
    (tmp_path / "first").mkdir()
    config = published(small(tmp_path / "first"), reward=RewardConfig(impl=reward))
    with FluxTrainer(config) as trainer:
        result = trainer.fit(texts, num_steps=2)
        trainer.save_checkpoint(tmp_path / "copy")
        with pytest.raises(DataError, match="is of type int"):
            trainer.fit([3])  # type: ignore[list-item]
    assert result.summary.complete and {prompt for prompt, _ in reward.seen} <= set(texts)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["2"]
    with FluxTrainer(config) as trainer:
        again = trainer.fit(texts, num_steps=3)
    (tmp_path / "second").mkdir()
    other = published(small(tmp_path / "second"), reward=RewardConfig(impl=Short()))
    with FluxTrainer(other) as trainer:
        with pytest.raises(ResumeError, match="0 checkpoints"):
            trainer.load_checkpoint(str(tmp_path / "second"))
        assert trainer.load_checkpoint(str(tmp_path / "copy")) == 2
        moved = trainer.fit(texts, num_steps=3)
    assert again.summary.complete and moved.summary.complete
    assert losses(tmp_path / "first")[-1] == losses(tmp_path / "second")[-1]


@pytest.mark.slow
def test_a_loss_alone_is_an_algorithm(tmp_path: pathlib.Path):
    """Without clipping, at one optimizer step a training step, GRPO has the same loss."""
    found = []
    for name, algorithm in (("own", PlainLoss()), ("grpo", None)):
        (tmp_path / name).mkdir()
        with FluxTrainer(small(tmp_path / name), algorithm=algorithm) as trainer:
            trainer.fit()
        found.append(losses(tmp_path / name))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


@pytest.mark.slow
def test_a_loss_of_another_shape_is_refused(tmp_path: pathlib.Path):
    class Summed:
        def compute_loss(self, batch: Any, weights_BT: Any) -> Any:
            return jnp.sum(weights_BT)

    with (
        pytest.raises(ValueError, match=r"compute_loss returned the shape \(\), not a loss of each token"),
        FluxTrainer(small(tmp_path), algorithm=Summed()) as trainer,
    ):
        trainer.fit()
