"""Whole runs with LoRA: they learn, are killed and go on bit for bit, and leave a model and its adapter behind."""

import json
import shutil

import numpy as np
import pytest
from run_cases import (
    as_if_killed,
    assert_same_run,
    checkpoint_arrays,
    flags,
    flags_beside,
    model_arrays,
    summary,
    trained,
)
from safetensors.numpy import load_file

import models
from fluxjax.config import ConfigError
from fluxjax.report.metrics import read

pytestmark = pytest.mark.long
TEXT, STEPS = "configs/text.py:debug", 12
LORA = {"lora__rank": 4, "lora__alpha": 8, "algorithm__kl_coefficient": 0.001, "optim__weight_decay": 0.01}


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    """A model that answers in the right form, and hardly more."""
    run_dir = tmp_path_factory.mktemp("base") / "run"
    trained(run_dir, TEXT, flags(steps=1, evaluation__every=0, **data))
    return run_dir / "model"


@pytest.fixture(scope="module")
def adapted(base, data):
    return flags_beside(base, steps=STEPS, **data, **LORA)


@pytest.fixture(scope="module")
def reference(adapted, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    trained(run_dir, TEXT, adapted)
    return run_dir


def test_it_learns(reference):
    records = [r for r in read(reference / "metrics.jsonl") if r["phase"] == "rl"]
    rewards = [r["reward/mean"] for r in records]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.05, rewards
    assert records[0]["reference_kl"] == pytest.approx(0, abs=1e-6) and records[-1]["reference_kl"] > 1e-6
    assert max(r["rollout_trainer_logprob_gap"] for r in records) < 1e-4


def test_the_folder_has_the_merged_model_and_the_adapter(reference, base):
    """Weights without adapters are those of the base bit for bit; the others are theirs and the product's."""
    before, after = (load_file(folder / "model.safetensors") for folder in (base, reference / "model"))
    adapter = load_file(reference / "adapter" / "adapter_model.safetensors")
    settings = json.loads((reference / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    changed = set()
    for name, weight in after.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            product = adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
            assert np.abs(product).max() > 1e-4
            np.testing.assert_allclose(weight, before[name] + 8 / 4 * product, rtol=0, atol=1e-6)
            changed.add(module)
        else:
            np.testing.assert_array_equal(weight, before[name])
    assert len(adapter) == 2 * len(changed) == 2 * 2 * 7
    assert models.load(reference / "model").config.text.num_layers == 2


def test_checkpoints_have_no_base_weights(reference):
    names = set(checkpoint_arrays(reference, STEPS))
    assert any("lora_a" in name for name in names) and not any("embedding" in name for name in names)


def test_killed(adapted, reference, tmp_path):
    run_dir = as_if_killed(reference, tmp_path / "run", 9)
    trained(run_dir, TEXT, adapted)
    assert summary(run_dir)["resumed_from"] == [9]
    assert_same_run(run_dir, reference)
    mine, theirs = (folder / "adapter" / "adapter_model.safetensors" for folder in (run_dir, reference))
    assert mine.read_bytes() == theirs.read_bytes()


def test_another_base_is_refused(adapted, base, reference, tmp_path):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(reference, run_dir)
    shutil.copytree(base, other)
    graphdef, params = models.split(models.load(base))
    params["norm"]["scale"] = params["norm"]["scale"].at[0].add(1e-3)
    models.save(models.merge(graphdef, params), other)
    others = [flag.replace(str(base), str(other)) for flag in adapted]
    with pytest.raises(ConfigError, match="other weights"):
        trained(run_dir, TEXT, [*others, f"--config.steps={STEPS + 1}"])


def test_a_run_goes_on_from_an_adapter(adapted, reference, tmp_path):
    """Its first step samples from the policy that the other run ended with."""
    run_dir = tmp_path / "run"
    more = [flag for flag in adapted if not flag.startswith("--config.steps=")]
    trained(run_dir, TEXT, [*more, "--config.steps=1", f"--config.lora.adapter={reference / 'adapter'}"])
    starts = [r for r in read(run_dir / "metrics.jsonl") if r["phase"] == "eval" and r["step"] == 0]
    ends = [r for r in read(reference / "metrics.jsonl") if r["phase"] == "eval" and r["step"] == STEPS]
    assert starts[0]["accuracy/reverse"] == ends[0]["accuracy/reverse"]


def test_a_warm_start_trains_adapters(data, tmp_path):
    """Of a model with random weights, by supervised steps; the base of the KL term is what they lead to."""
    run_dir = tmp_path / "run"
    trained(run_dir, TEXT, flags(steps=1, evaluation__every=0, **data, **LORA))
    warm = [r for r in read(run_dir / "metrics.jsonl") if r["phase"] == "warm_start"]
    assert warm[-1]["nll"] < warm[0]["nll"] - 0.5
    first = next(r for r in read(run_dir / "metrics.jsonl") if r["phase"] == "rl")
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert model_arrays(run_dir)
