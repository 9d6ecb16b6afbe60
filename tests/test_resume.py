"""A run that is killed and started again ends exactly as if nothing had happened.

Every interrupted run is compared bit for bit with one that was left alone: parameters, optimizer state, every logged
number that is not a time, and the summary. One run is killed for real, in a process of its own; for the others, a
trainer in this process is thrown away.
"""

import dataclasses
import random
import shutil
import signal

import numpy as np
import pytest
from fuzz.checkpoint import flipped, largest_file
from run_cases import (
    Died,
    DiesAt,
    as_if_killed,
    assert_goes_on,
    assert_same_run,
    checkpoint_arrays,
    checkpoint_steps,
    colours,
    flags,
    flags_beside,
    letters,
    logged,
    model_arrays,
    signal_when,
    summary,
    trained,
    writing,
)

import models
from fluxjax.config.cli import load
from fluxjax.data.loader import open_sources
from fluxjax.report.metrics import read
from fluxjax.run.build import describe_model, export
from fluxjax.run.checkpoint import Checkpoints
from sharding.kernels.delta_heads import DeltaHeads

pytestmark = pytest.mark.long
TEXT, VLM, QWEN3_VL = "configs/text.py:debug", "configs/vlm.py:debug", "configs/vlm.py:qwen3_vl"
STEPS = 6  # an epoch is 3 steps, and so is the time between checkpoints


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return flags(steps=STEPS, **letters(tmp_path_factory.mktemp("letters")))


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory):
    """The uninterrupted run, which learns something: else, the comparisons below would say little."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    trained(run_dir, TEXT, text)
    records = [r for r in read(run_dir / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert all(r["grad_norm"] > 0 for r in records)
    assert len({r["reward/mean"] for r in records}) > 2
    assert summary(run_dir)["complete"] and summary(run_dir)["samples_trained"] == STEPS * 16
    return run_dir


@pytest.mark.medium
def test_processes_that_are_ended_and_killed(commands, text, reference, tmp_path):
    """By SIGTERM, which is no kill, in the midst of an epoch; then by SIGKILL while a checkpoint is being written."""
    run_dir = tmp_path / "run"
    assert signal_when(commands.start(run_dir, TEXT, text), logged(run_dir, "rl", 1), signal.SIGTERM) == 0
    stopped = summary(run_dir)
    assert stopped["complete"] is False and 1 <= stopped["steps"] < STEPS
    assert checkpoint_steps(run_dir)[-1] == stopped["steps"]
    (run_dir / "summary.json").unlink()
    saves = [writing(run_dir, step) for step in (3, 6) if step > stopped["steps"]]
    process = commands.start(run_dir, TEXT, text)
    assert signal_when(process, lambda: any(save() for save in saves)) == -signal.SIGKILL
    assert not (run_dir / "summary.json").exists()
    newest = checkpoint_steps(run_dir)[-1]
    commands.run(run_dir, TEXT, text)
    assert summary(run_dir)["resumed_from"] == sorted({stopped["steps"], newest}), "checkpoints have it"
    assert_same_run(run_dir, reference)
    assert not list((run_dir / "checkpoints").glob("*tmp*"))


def test_killed_again_and_again(text, reference, monkeypatch, tmp_path):
    """How often checkpoints are written and how prompts are prepared changes nothing: neither the prompts nor where a
    checkpoint goes on."""
    run_dir, checkpoints = tmp_path / "run", []

    def killed(*settings, at):
        with pytest.raises(Died):
            trained(run_dir, TEXT, [*text, *settings], *at)
        assert not (run_dir / "summary.json").exists()
        checkpoints.append(checkpoint_steps(run_dir))

    def die(*_):
        raise Died

    with monkeypatch.context() as patch:  # the warm start is over, its checkpoint is being written
        patch.setattr(Checkpoints, "write", die)
        killed(at=[])
    shutil.copytree(reference / "checkpoints" / "3", run_dir / "checkpoints" / "0.orbax-checkpoint-tmp")
    killed("--config.checkpoint.every=0", at=[DiesAt("on_step", 2)])
    killed("--config.data.workers=2", at=[DiesAt("on_step", 5)])
    killed("--config.data.workers=1", at=[DiesAt("on_evaluation", STEPS)])
    assert checkpoints == [[], [0], [0, 3], [0, 3]]
    trained(run_dir, TEXT, text)
    assert summary(run_dir)["resumed_from"] == [0, 3]
    assert_same_run(run_dir, reference)
    assert not list((run_dir / "checkpoints").glob("*tmp*"))
    trained(run_dir, TEXT, text)  # it is complete, and stays as it is
    assert summary(run_dir)["resumed_from"][-1] == STEPS
    assert_same_run(run_dir, reference)


def test_a_damaged_checkpoint_is_passed_over(text, reference, caplog, tmp_path):
    """The run goes on from the one before it, and ends with the same bits."""
    run_dir = as_if_killed(reference, tmp_path / "run", STEPS)
    damaged = largest_file(run_dir / "checkpoints" / str(STEPS))
    flipped(damaged, random.Random(0))
    trained(run_dir, TEXT, text)
    assert summary(run_dir)["resumed_from"] == [3]
    assert any(f"step {STEPS}" in line and damaged.name in line for line in caplog.messages)
    assert_same_run(run_dir, reference)


@pytest.mark.medium
def test_resumed_on_another_mesh_with_another_strategy(text, reference, tmp_path):
    """From FSDP on one device to FlexUlysses on four: only places and the order of sums change. A run that goes on from
    there ends with the same bits."""
    spread = [*text, "--config.checkpoint.every=1", "--config.sharding.devices=4"]
    spread += ["--config.sharding.strategy=flex_ulysses"]
    run_dir = as_if_killed(reference, tmp_path / "run", 3)
    trained(run_dir, TEXT, spread)
    assert summary(run_dir)["resumed_from"] == [3] and summary(run_dir)["devices"] == 4
    mine, theirs = model_arrays(run_dir), model_arrays(reference)
    for name in mine:
        # Three steps of lr 5e-3 follow; float32 sums in another order differ by 1e-6, Adam's quotient of two
        # small numbers magnifies that.
        np.testing.assert_allclose(mine[name], theirs[name], rtol=0, atol=2e-4)
    assert_goes_on(run_dir, tmp_path / "resumed", TEXT, spread, 5)


def test_every_device_at_its_own_pace(reference, tmp_path):
    """ODC on four devices: in deterministic order the bits are those of a run left alone. Some prompts are too long for
    a device, and computed by two together. Shapes of buffers depend on earlier batches, and a resumed run remembers
    them. The run begins with the model that the reference leaves."""
    data = letters(tmp_path, long="First of dcba: First of ab: ")  # letters that the model has
    sizes = {"packing__tokens_per_row": 16, "packing__rows_per_device": 1, "rollout__max_sequence_tokens": 32}
    settings = {"sharding__devices": 4, "sharding__strategy": "odc", "sharding__strategy__deterministic": True}
    odc = flags_beside(reference / "model", steps=9, **sizes, **settings, **data)
    complete = tmp_path / "complete"
    trained(complete, TEXT, odc)
    records = [record for record in read(complete / "metrics.jsonl") if record.get("phase") == "rl"]
    assert all("seconds/idle" in record for record in records)
    assert {record["sharding/collective"] > 0 for record in records} == {False, True}
    assert len({record["grad_norm"] for record in records}) == 9 and records[6]["packing/shapes"] > 1
    assert_goes_on(complete, tmp_path / "resumed", TEXT, odc, 6)


def with_states(config, settings, folder):
    """A tiny Qwen3.5 that reads what a run's tiny Qwen3-VL reads: a layer with states, and a layer that attends."""
    run = load([f"--config={config}", *settings])
    sizes, processor = describe_model(run, open_sources(run))
    assert sizes.vision is not None
    hybrid = {"delta": DeltaHeads(1, 2, 8, 8), "attention_interval": 2, "output_gate": True, "zero_centred_norms": True}
    text, vision = dataclasses.replace(sizes.text, **hybrid), dataclasses.replace(sizes.vision, deepstack_layers=())
    model = models.create(dataclasses.replace(sizes, architecture="qwen3_5", text=text, vision=vision))
    export(model, processor, folder)
    return folder


@pytest.mark.parametrize(("config", "states"), [(VLM, False), (QWEN3_VL, False), (QWEN3_VL, True)])
def test_images_and_videos(config, states, tmp_path):
    """Decoding in threads ahead of use, two sources mixed, a frozen reference model in the checkpoint."""
    own = {"steps": 4, "checkpoint__every": 2, "algorithm__kl_coefficient": 0.01, **colours(tmp_path)}
    settings = flags(**own)
    if states:
        settings = flags_beside(with_states(config, settings, tmp_path / "qwen3_5"), **own)
    complete = tmp_path / "complete"
    trained(complete, config, settings)
    resumed = assert_goes_on(complete, tmp_path / "resumed", config, settings, 2)
    assert any("reference" in name for name in checkpoint_arrays(resumed, 4))
