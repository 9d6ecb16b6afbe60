"""Whole runs with LoRA: they learn, are killed and go on bit for bit, and leave a model and its adapter behind."""

import json

import numpy as np
import pytest
from run_cases import assert_goes_on, flags, flags_beside, model_arrays, trained
from safetensors.numpy import load_file

import models
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


@pytest.mark.medium
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


def test_killed(adapted, reference, tmp_path):
    run_dir = assert_goes_on(reference, tmp_path / "run", TEXT, adapted, 9)
    mine, theirs = (folder / "adapter" / "adapter_model.safetensors" for folder in (run_dir, reference))
    assert mine.read_bytes() == theirs.read_bytes()


def test_a_run_goes_on_from_an_adapter(adapted, reference, tmp_path):
    """Its first step samples from the policy that the other run ended with."""
    run_dir = tmp_path / "run"
    more = [flag for flag in adapted if not flag.startswith("--config.steps=")]
    trained(run_dir, TEXT, [*more, "--config.steps=1", f"--config.lora.adapter={reference / 'adapter'}"])
    starts = [r for r in read(run_dir / "metrics.jsonl") if r["phase"] == "eval" and r["step"] == 0]
    ends = [r for r in read(reference / "metrics.jsonl") if r["phase"] == "eval" and r["step"] == STEPS]
    assert starts[0]["accuracy/reverse"] == ends[0]["accuracy/reverse"]


@pytest.mark.medium
def test_a_warm_start_trains_adapters(data, tmp_path):
    """Of a model with random weights, by supervised steps; the base of the KL term is what they lead to."""
    run_dir = tmp_path / "run"
    trained(run_dir, TEXT, flags(steps=1, evaluation__every=0, **data, **LORA))
    warm = [r for r in read(run_dir / "metrics.jsonl") if r["phase"] == "warm_start"]
    assert warm[-1]["nll"] < warm[0]["nll"] - 0.5
    first = next(r for r in read(run_dir / "metrics.jsonl") if r["phase"] == "rl")
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert model_arrays(run_dir)
