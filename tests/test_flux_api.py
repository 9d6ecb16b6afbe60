"""Flux's API as published: what it is called there, and that it works here."""

import dataclasses
import pathlib
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from run_cases import flags, letters

import fluxjax
from fluxjax import FluxConfig, FluxTrainer, RewardConfig, RewardFunction
from fluxjax.algorithms.rl_algorithm import RLAlgorithm, adapted
from fluxjax.algorithms.short_form import ShortForm
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
    return FluxConfig(**settings, **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


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
def test_texts_are_prompts_and_a_reward_sees_texts(tmp_path: pathlib.Path):
    reward, texts = Short(), [f"First of {letter}:" for letter in "abcdabcd"]
    config = published(small(tmp_path), reward=RewardConfig(impl=reward))
    with FluxTrainer(config) as trainer:
        result = trainer.fit(texts)
        for wrong, expected in (([3], "is of type int"), ("First", "give a list")):
            with pytest.raises(DataError, match=expected):
                trainer.fit(wrong)  # type: ignore[arg-type]
    assert result.summary.complete and set(texts) <= {prompt for prompt, _ in reward.seen}


@pytest.mark.slow
def test_a_checkpoint_moves_to_another_run(tmp_path: pathlib.Path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    with FluxTrainer(small(first)) as trainer:
        trainer.fit()
        trainer.save_checkpoint(tmp_path / "copy")
        trainer.save_checkpoint(tmp_path / "copy")  # the same again
        trainer.fit(num_steps=3)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["2"]
    with FluxTrainer(small(second)) as trainer:
        with pytest.raises(ResumeError, match="has 0 checkpoints"):
            trainer.load_checkpoint(str(second))
        assert trainer.load_checkpoint(str(tmp_path / "copy")) == 2
        trainer.fit(num_steps=3)
        (tmp_path / "copy" / "2" / "checksums.json").write_text("{}")
        with pytest.raises(ResumeError, match="another checkpoint of this step"):
            trainer.load_checkpoint(tmp_path / "copy" / "2")
    assert losses(first)[-1] == losses(second)[-1] and len(losses(first)) == 3


def test_a_loss_of_tokens_comes_before_the_short_form():
    """Also if an object or a module has both; a class that only inherits `token_loss` has the short form."""
    both = types.SimpleNamespace(advantages=len, token_loss=max, compute_loss=min)
    assert adapted(both, "algorithm.name").token_loss is max
    inherits = type("Inherits", (RLAlgorithm, PlainLoss), {})
    assert isinstance(adapted(inherits, "algorithm.name"), ShortForm)


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
