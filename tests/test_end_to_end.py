"""`FluxTrainer` from configuration to summary, in this process: everything real, everything tiny."""

import asyncio
import json
import math
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from plain_decode import generate
from run_cases import Died, DiesAt, assert_same_bits, checkpoint_steps, flags, model_arrays, summary

import models
from fluxjax import evaluate
from fluxjax.base.errors import DataError
from fluxjax.base.types import Prompt
from fluxjax.config import ConfigError, run_folder
from fluxjax.config.cli import load
from fluxjax.report.metrics import read
from fluxjax.run.callbacks import Callback
from fluxjax.run.checkpoint import ResumeError
from fluxjax.run.trainer import FluxTrainer
from models.processing import Processor
from rollout.engine import GenerateRequest, SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture
def config(data, tmp_path):
    return tiny(tmp_path / "run", data)


def tiny(run_dir, data, **own):
    settings = {"steps": 4, "checkpoint__every": 2, "evaluation__every": 2, "warm_start__steps": 8} | data | own
    return load(["--config=configs/text.py", f"--config.run_dir={run_dir}", *flags(**settings)])


class Recorder(Callback):
    """Every hook that was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_fit_start(self, trainer):
        self.calls.append(("start", -1))

    def on_step(self, trainer, step, groups, metrics):
        assert len(groups) == 4 and all(len(group.samples) == 4 for group in groups)
        assert math.isfinite(metrics["loss"])
        self.calls.append(("step", step))

    def on_evaluation(self, trainer, step, accuracy):
        assert set(accuracy) == {"reverse"} and 0 <= accuracy["reverse"] <= 1
        self.calls.append(("evaluation", step))

    def on_checkpoint(self, trainer, step):
        self.calls.append(("checkpoint", step))

    def on_fit_end(self, trainer, result):
        assert result.summary.complete == (trainer.coordinator.finished.complete)
        self.calls.append(("end", result.summary.steps))


class StopsAt(DiesAt):
    """Stops a run, in good order."""

    def _die(self, trainer, step=0, *_):
        if step == self._step:
            trainer.stop()


@pytest.fixture(scope="module")
def fitted(data, tmp_path_factory):
    """A whole run, with a frozen reference model."""
    recorder = Recorder()
    config = tiny(tmp_path_factory.mktemp("fitted") / "run", data, algorithm__kl_coefficient=0.05)
    with FluxTrainer(config, callbacks=[recorder]) as trainer:
        trainer.fit()
        yield trainer, recorder


@pytest.mark.slow
def test_hooks_are_called_in_order(fitted):
    _, recorder = fitted
    first = [("start", -1), ("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("checkpoint", 2)]
    assert recorder.calls == [*first, ("step", 3), ("step", 4), ("evaluation", 4), ("checkpoint", 4), ("end", 4)]


def test_reference_model_stays_where_it_was(fitted):
    trainer, _ = fitted
    steps = [r for r in read(trainer.run_dir / "metrics.jsonl") if r["phase"] == "rl"]
    name = next(name for name in steps[0] if "kl" in name and "behaviour" not in name)
    assert steps[0][name] == pytest.approx(0, abs=1e-6)  # policy and reference are one and the same
    assert steps[-1][name] > 1e-6
    assert trainer.models.reference is not None


@pytest.mark.medium
def test_summary(fitted):
    trainer, _ = fitted
    values = summary(trainer.run_dir)
    assert values["complete"] is True and values["steps"] == 4
    assert set(values["accuracy"]["reverse"]) == {"start", "end"}
    assert values["blind"] == {}  # nothing to see in a text task
    assert 0 < values["chance"]["reverse"] <= 1
    stages = {"data", "build", "warm_start", "rollout", "reward", "train", "sync", "eval", "checkpoint", "report"}
    assert stages | {"compile"} < set(values["seconds"])
    first, *_, last = (r for r in read(trainer.run_dir / "metrics.jsonl") if r["phase"] == "rl")
    assert first["seconds/compile"] > 0 and last.get("seconds/compile", 0.0) < first["seconds/compile"]
    assert any(span.name == "compile" for span in trainer.timeline.spans())
    assert values["seconds"]["total"] > 0
    assert 0 < values["logprob_gap_max"] < 1e-4 and values["logprob_gap_alarms"] == 0
    assert values["samples_trained"] == 4 * 4 * 4
    assert values["samples_skipped"] == {} and values["checkpoints_failed"] == 0


def test_run_folder(fitted):
    trainer, _ = fitted
    folder = trainer.run_dir
    records = read(folder / "metrics.jsonl")
    assert [r["step"] for r in records if r["phase"] == "warm_start"] == list(range(1, 9))
    assert [r["step"] for r in records if r["phase"] == "rl"] == [1, 2, 3, 4]
    assert [r["step"] for r in records if r["phase"] == "eval"] == [0, 2, 4]
    assert all("rollout_trainer_logprob_gap" in r for r in records if r["phase"] == "rl")
    assert list((folder / "tensorboard").glob("events.*"))
    for picture in ("learning.png", "timeline.png"):
        with Image.open(folder / picture) as image:
            assert image.size[0] > 300
    (dump,) = (folder / "samples").iterdir()
    assert [json.loads(line)["step"] for line in dump.read_text().splitlines()] == [4] * 8
    assert checkpoint_steps(folder) == [2, 4]


def test_exported_model_answers_as_the_engine_does(fitted):
    trainer, _ = fitted
    folder = trainer.run_dir / "model"
    model, processor = models.load(folder), Processor.load(folder)
    trees = models.split(model)[1], trainer.learner.params
    assert_same_bits(*({str(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(tree)} for tree in trees))
    prompt = trainer.eval_sources["reverse"][0]
    inputs = processor.prepare(prompt.text, [])

    async def of_engine():
        await trainer.engine.update_weights(trainer.learner.version, trainer.learner.params)
        stops: dict[str, Any] = {"stop_ids": processor.eos_ids, "forbidden_ids": processor.media_token_ids}
        request = GenerateRequest("greedy", inputs, SamplingParams(max_new_tokens=4, temperature=0.0, **stops))
        return [token async for chunk in trainer.engine.generate(request) for token in chunk.token_ids]

    answer = generate(model, inputs, max_new_tokens=4, stop_ids=processor.eos_ids)
    assert list(answer.token_ids) == asyncio.run(of_engine())


def test_evaluate_says_what_the_summary_says(fitted):
    trainer, _ = fitted
    assert trainer.evaluate() == {"reverse": summary(trainer.run_dir)["accuracy"]["reverse"]["end"]}


@pytest.mark.slow
def test_the_command_says_so_too_and_changes_nothing(fitted, capsys):
    folder = fitted[0].run_dir
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert evaluate.main(["--run", str(folder), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["step"] == 4 and out["prompts"] == {"reverse": 4}
    assert out["accuracy"] == {"reverse": summary(folder)["accuracy"]["reverse"]["end"]}
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert evaluate.main(["--run", str(folder), "--step", "2", "--samples", "3"]) == 0
    out = capsys.readouterr().out
    assert "step 2" in out and "of 3 held-out prompts" in out


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["--step", "99"], "99"), (["--samples", "0"], "evaluation.samples is 0")]
)
def test_mistakes_of_the_command(fitted, capsys, arguments, expected):
    assert evaluate.main(["--run", str(fitted[0].run_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1


def test_the_command_names_a_folder_that_is_no_run(tmp_path, capsys):
    assert evaluate.main(["--run", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_save_and_load(fitted, data, tmp_path):
    trainer, _ = fitted
    trainer.save_checkpoint()  # a second time for this step: not an error
    params = jax.tree.map(np.asarray, trainer.learner.params)
    with FluxTrainer(trainer.config, read_only=True) as other:
        assert other.load_checkpoint() == 4
        jax.tree.map(np.testing.assert_array_equal, other.learner.params, params)
        assert other.load_checkpoint(2) == 2
        assert other.coordinator.step == 2 and other.learner.version == 2
        with pytest.raises(ResumeError, match="3"):
            other.load_checkpoint(3)
    with FluxTrainer(tiny(tmp_path / "new", data)) as fresh, pytest.raises(ResumeError, match="no checkpoint"):
        fresh.load_checkpoint()


@pytest.mark.slow
def test_going_back_to_an_older_checkpoint(data, tmp_path):
    """Fit from an older checkpoint makes the same steps again, and what came after it is gone."""
    config = tiny(tmp_path / "run", data, warm_start__steps=0)
    with FluxTrainer(config) as trainer:
        trainer.fit()
    before, steps = model_arrays(tmp_path / "run"), checkpoint_steps(tmp_path / "run")
    recorder = Recorder()
    with FluxTrainer(config, callbacks=[recorder]) as trainer:
        trainer.load_checkpoint(2)
        trainer.fit()
        assert [step for name, step in recorder.calls if name == "step"] == [3, 4]
        assert checkpoint_steps(tmp_path / "run") == steps
        assert_same_bits(model_arrays(tmp_path / "run"), before)
        result = trainer.fit(num_steps=5)  # and on from there
        assert result.summary.steps == 5 and result.summary.samples_trained == 5 * 16
    records = [r["step"] for r in read(tmp_path / "run" / "metrics.jsonl") if r["phase"] == "rl"]
    assert records == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_fit_changes_the_length_of_the_run_and_not_the_configuration(data, tmp_path):
    """The learning rate falls over the steps that `fit` was given; a length that can't be is refused and forgotten."""
    lr = {"optim__schedule": "linear", "optim__lr": 1e-3, "optim__warmup_steps": 0, "warm_start__steps": 0}
    with FluxTrainer(tiny(tmp_path / "run", data, **lr)) as trainer:
        config = trainer.config
        held = [(config, "steps"), (config.checkpoint, "every"), (config.data.sources["reverse"], "weight")]
        for section, name in held:
            with pytest.raises(ConfigError, match=f"^{name}: the configuration of a FluxTrainer can't be changed"):
                setattr(section, name, 1)
        trainer.fit(num_steps=1, checkpoint_interval=1)
        with pytest.raises(ConfigError, match="steps is 0"):
            trainer.fit(num_steps=0)
        result = trainer.fit(num_steps=2)
        assert result.summary.steps == trainer.fit().summary.steps == 2
        assert result.summary.resumed_from == [1]
        assert trainer.config is config and (config.steps, config.checkpoint.every) == (4, 2)
        assert run_folder.read_config(trainer.run_dir).steps == 2
        assert checkpoint_steps(trainer.run_dir) == [1, 2]
    records = [r for r in read(trainer.run_dir / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["lr"] for r in records] == pytest.approx([1e-3, 5e-4])


@pytest.mark.long
def test_stopped_again_and_again(config):
    """Between steps, and by an error in a callback: each time it goes on from its newest checkpoint."""
    with FluxTrainer(config) as trainer:
        for hook, step in (("on_evaluation", 0), ("on_fit_start", 0), ("on_step", 1), ("on_step", 4)):
            if step == 4:
                with pytest.raises(Died):
                    trainer.fit(callbacks=[DiesAt("on_step", 3)])
            result = trainer.fit(callbacks=[StopsAt(hook, step)])
            assert result.summary.complete is False or step == config.steps
            assert (result.summary.steps, result.summary.checkpoints_failed) == (step, 0)
            assert checkpoint_steps(trainer.run_dir)[-1] == step
        result = trainer.fit()
        assert result.summary.complete and result.summary.steps == config.steps
        assert result.summary.samples_trained == config.steps * 16
        evaluated = [r["step"] for r in read(trainer.run_dir / "metrics.jsonl") if r["phase"] == "eval"]
        assert evaluated == [0, 2, 4]


@pytest.mark.slow
def test_own_prompts_inside_a_running_loop(config):
    """As in a notebook: prompts from memory, and a loop that is running already. They are used wherever the checkpoint
    came from; draws go on counting."""
    prompts = [Prompt(str(i), "reverse", f"First of {c}bc:", c) for i, c in enumerate("abcd")]
    own = {"eval_prompts": prompts[:2], "eval_interval": 0, "checkpoint_interval": 0}

    async def cell():
        with FluxTrainer(config) as trainer:
            before = trainer.evaluate()
            trainer.fit(prompts, num_steps=2, **own)
            trainer.load_checkpoint()
            result = trainer.fit(prompts, num_steps=3, **own)
            assert set(before) == {"reverse"}
            assert len(trainer.held_out.prompts["reverse"]) == 2
            assert trainer.evaluate() == {"reverse": result.summary.accuracy["reverse"]["end"]}
            return trainer, result

    trainer, result = asyncio.run(cell())
    assert result.summary.steps == 3 and result.summary.complete
    assert trainer.coordinator.ledger.epochs == {0: 4, 1: 4, 2: 4} and trainer.coordinator.ledger.last_draw == 11
    assert [r["step"] for r in read(trainer.run_dir / "metrics.jsonl") if r["phase"] == "eval"] == [0, 2, 3]


def test_prompts_of_an_unknown_source(config):
    with FluxTrainer(config) as trainer, pytest.raises(DataError, match=r"'elsewhere'.*reverse"):
        trainer.fit([Prompt("1", "elsewhere", "a", "b")])


def test_learns(config, tmp_path):
    """The same short answer to every question: rewards rise from chance to nearly always."""
    config.steps = 40
    config.warm_start.steps = 0
    config.rollout.max_new_tokens = 2
    config.rollout.group_size = config.rollout.slots = 16
    config.algorithm.entropy_coefficient = 0.0
    config.optim.lr = 2e-2
    config.evaluation.every = config.checkpoint.every = 0
    prompts = [Prompt(str(i), "reverse", f"First of {word}:", "a") for i, word in enumerate(("ab", "ac", "ad", "abc"))]
    with FluxTrainer(config) as trainer:
        result = trainer.fit(prompts, eval_prompts=prompts)
    rewards = [r["reward/mean"] for r in read(result.run_dir / "metrics.jsonl") if r["phase"] == "rl"]
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > 0.8
    assert result.summary.accuracy["reverse"]["end"] == 1.0
