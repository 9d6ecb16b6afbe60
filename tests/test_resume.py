"""A run that is killed and started again ends exactly as if nothing had happened.

Real processes, real kills. Every interrupted run is compared bit for bit with one that was left alone: parameters,
optimizer state, every logged number that is not a time, and the summary.
"""

import shutil
import signal

import numpy as np
import pytest
from run_cases import (
    assert_same_run,
    checkpoint_arrays,
    checkpoint_steps,
    colours,
    flags,
    letters,
    logged,
    model_arrays,
    signal_when,
    summary,
    writing,
)

from fluxjax.report.metrics import read

pytestmark = pytest.mark.long
TEXT, VLM = "configs/text.py:debug", "configs/vlm.py:debug"
STEPS = 9  # an epoch is 3 steps, and so is the time between checkpoints


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return flags(steps=STEPS, **letters(tmp_path_factory.mktemp("letters")))


@pytest.fixture(scope="module")
def reference(commands, text, tmp_path_factory):
    """The uninterrupted run. It compiles everything; the others load the compiled programs."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    commands.run(run_dir, TEXT, text)
    return run_dir


def test_the_reference_learns_something(reference):
    # Without gradients or with one and the same reward, the comparisons below would say little.
    records = [r for r in read(reference / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert all(r["grad_norm"] > 0 for r in records)
    assert len({r["reward/mean"] for r in records}) > 2
    assert summary(reference)["complete"] and summary(reference)["samples_trained"] == STEPS * 16


MOMENTS = {
    # name: (when to kill, the step of the newest checkpoint then; None: it depends on the machine)
    "in the warm start": (lambda run: logged(run, "warm_start", 3), []),
    "while the first checkpoint is written": (lambda run: writing(run, 0), []),
    "while a checkpoint at the end of an epoch is written": (lambda run: writing(run, 3), None),
    "at the end of an epoch": (lambda run: lambda: 6 in checkpoint_steps(run), None),
    "after the last step": (lambda run: logged(run, "eval", STEPS), None),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(moment, commands, text, reference, tmp_path):
    run_dir = tmp_path / "run"
    when, left = MOMENTS[moment]
    assert signal_when(commands.start(run_dir, TEXT, text), when(run_dir)) == -signal.SIGKILL
    assert not (run_dir / "summary.json").exists()
    if left is not None:
        assert checkpoint_steps(run_dir) == left
    newest = max(checkpoint_steps(run_dir), default=None)
    commands.run(run_dir, TEXT, text)
    assert summary(run_dir)["resumed_from"] == ([] if newest is None else [newest])
    assert_same_run(run_dir, reference)
    assert not list((run_dir / "checkpoints").glob("*tmp*"))


def test_killed_before_the_first_periodic_checkpoint(commands, text, reference, tmp_path):
    """The warm start is not repeated; how often checkpoints are written changes nothing."""
    run_dir, rarely = tmp_path / "run", [*text, "--config.checkpoint.every=0"]
    signal_when(commands.start(run_dir, TEXT, rarely), logged(run_dir, "rl", 2))
    assert checkpoint_steps(run_dir) == [0]
    commands.run(run_dir, TEXT, rarely)
    assert summary(run_dir)["resumed_from"] == [0]
    assert_same_run(run_dir, reference)


def test_killed_again_and_again(commands, text, reference, tmp_path):
    run_dir = tmp_path / "run"
    for step in (0, 3):
        signal_when(commands.start(run_dir, TEXT, text), lambda step=step: step in checkpoint_steps(run_dir))
    commands.run(run_dir, TEXT, text)
    assert len(summary(run_dir)["resumed_from"]) == 2
    assert_same_run(run_dir, reference)


def test_killed_with_worker_processes(commands, text, reference, tmp_path):
    """How prompts are prepared changes nothing: neither the prompts nor where a checkpoint goes on."""
    run_dir = tmp_path / "run"
    signal_when(commands.start(run_dir, TEXT, [*text, "--config.data.workers=2"]), logged(run_dir, "rl", 5))
    assert checkpoint_steps(run_dir)
    commands.run(run_dir, TEXT, [*text, "--config.data.workers=1"])
    assert_same_run(run_dir, reference)


def test_sigterm_ends_cleanly(commands, text, reference, tmp_path):
    run_dir = tmp_path / "run"
    code = signal_when(commands.start(run_dir, TEXT, text), logged(run_dir, "rl", 1), signal.SIGTERM)
    assert code == 0
    stopped = summary(run_dir)
    assert stopped["complete"] is False and 1 <= stopped["steps"] < STEPS
    assert checkpoint_steps(run_dir)[-1] == stopped["steps"]
    commands.run(run_dir, TEXT, text)
    assert summary(run_dir)["resumed_from"] == [stopped["steps"]]
    assert_same_run(run_dir, reference)


def test_a_complete_run_started_again_stays_as_it_is(commands, text, reference, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(reference, run_dir)
    commands.run(run_dir, TEXT, text)
    assert summary(run_dir)["resumed_from"] == [STEPS]
    assert_same_run(run_dir, reference)


def test_resumed_on_another_mesh_with_another_strategy(commands, text, reference, tmp_path):
    """From FSDP on one device to FlexUlysses on four: only places and the order of sums change."""
    run_dir = tmp_path / "run"
    shutil.copytree(reference, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / str(STEPS))
    changed = ["--config.sharding.devices=4", "--config.sharding.strategy=flex_ulysses"]
    assert "on 4 devices" in commands.run(run_dir, TEXT, [*text, *changed], devices=4)
    assert summary(run_dir)["resumed_from"] == [6] and summary(run_dir)["devices"] == 4
    mine, theirs = model_arrays(run_dir), model_arrays(reference)
    for name in mine:
        # Three steps of lr 5e-3 follow; float32 sums in another order differ by 1e-6, Adam's quotient of two
        # small numbers magnifies that.
        np.testing.assert_allclose(mine[name], theirs[name], rtol=0, atol=2e-4)


def test_sequences_spread_over_devices(commands, text, tmp_path):
    """Buffer shapes depend on earlier batches; a resumed run remembers them, and ends with the same bits."""
    spread = [*text, "--config.sharding.devices=4", "--config.sharding.strategy=flex_ulysses"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    commands.run(whole, TEXT, spread, devices=4)
    assert max(record.get("packing/shapes", 0) for record in read(whole / "metrics.jsonl")) >= 1
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / str(STEPS))
    commands.run(resumed, TEXT, spread, devices=4)
    assert summary(resumed)["resumed_from"] == [6]
    assert_same_run(resumed, whole)


def test_every_device_at_its_own_pace(commands, tmp_path):
    """ODC on four devices, killed and started again: in deterministic order the bits are those of a run left alone.
    Some prompts are too long for a device, and computed by two together."""
    (tmp_path / "letters").mkdir()
    data = letters(tmp_path / "letters", long="Which letter is the first? ")
    sizes = {"packing__tokens_per_row": 16, "packing__rows_per_device": 1, "rollout__max_sequence_tokens": 32}
    settings = {"sharding__devices": 4, "sharding__strategy": "odc", "sharding__deterministic": True}
    odc = flags(steps=STEPS, **sizes, **settings, **data)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    commands.run(whole, TEXT, odc, devices=4)
    records = [record for record in read(whole / "metrics.jsonl") if record.get("phase") == "rl"]
    assert all("seconds/idle" in record for record in records)
    assert {record["sharding/collective"] > 0 for record in records} == {False, True}
    signal_when(commands.start(killed, TEXT, odc, devices=4), lambda: 3 in checkpoint_steps(killed))
    newest = max(checkpoint_steps(killed))
    commands.run(killed, TEXT, odc, devices=4)
    assert summary(killed)["resumed_from"] == [newest]
    assert_same_run(killed, whole)


def test_images_and_videos(commands, tmp_path):
    """Decoding in threads ahead of use, two sources mixed, a frozen reference model in the checkpoint."""
    (tmp_path / "data").mkdir()
    settings = flags(steps=4, checkpoint__every=2, algorithm__kl_coefficient=0.01, **colours(tmp_path / "data"))
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    commands.run(alone, VLM, settings)
    signal_when(commands.start(run_dir, VLM, settings), logged(run_dir, "rl", 3))
    assert checkpoint_steps(run_dir)
    commands.run(run_dir, VLM, settings)
    assert summary(run_dir)["resumed_from"]
    assert_same_run(run_dir, alone)
    assert any("reference" in name for name in checkpoint_arrays(run_dir, 4))
