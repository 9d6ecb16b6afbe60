"""Whole runs whose pixels stay near the devices end as those that decode whole prompts, however preprocessors fare.

Real kills of preprocessors and of a run that has some, good and bad media. Parameters, optimizer state, every logged
number that is not a time, every dumped sample and the summary are compared.
"""

import json
import pathlib
import re
import signal

import pytest
from process_cases import gone, until
from run_cases import (
    Commands,
    Died,
    DiesAt,
    assert_same_bits,
    assert_same_run,
    checkpoint_steps,
    ended,
    flags,
    model_arrays,
    signal_when,
    summary,
    trained,
    without_times,
)
from shadow_run_cases import Killer, addresses, descendants, media, without_store
from turns import by_turns

from fluxjax.config.cli import load
from fluxjax.data import prepare
from fluxjax.report.metrics import read
from fluxjax.run.main import main

pytestmark = pytest.mark.long
VLM = "configs/vlm.py"
STEPS = 6
OWN = {
    "steps": STEPS,
    "model__tiny__num_layers": 1,
    "model__tiny__vision_depth": 1,
    "model__tiny__vision_full_attention_layers": "(0,)",
    "warm_start__steps": 2,
    "report__dump_samples_every": 1,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return media(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def central(sources, tmp_path_factory):
    """It has it all: bad media, which it skips, pictures and clips."""
    run_dir = tmp_path_factory.mktemp("central") / "run"
    with without_store():
        trained(run_dir, VLM, flags(**sources, **OWN))
    result = summary(run_dir)
    assert result["complete"] and result["samples_trained"] == STEPS * 16
    assert len(result["samples_skipped"]) >= 3, result["samples_skipped"]
    assert {pathlib.Path(record["id"]).suffix for record in samples(run_dir)} == {".png", ".mp4"}
    assert not shown(run_dir)
    return run_dir


def shown(run_dir: pathlib.Path) -> dict[str, float]:
    """The metrics of pixels of the first step of a run without preprocessors, which has no picture of them."""
    assert not (run_dir / "media.png").exists() and (run_dir / "timeline.png").exists()
    first = next(record for record in read(run_dir / "metrics.jsonl") if record["phase"] == "rl")
    return {name: value for name, value in first.items() if name.startswith("data/")}


def shadow(sources, **own: object) -> list[str]:
    return flags(**sources, **OWN, **own)


def samples(run_dir: pathlib.Path) -> list[dict]:
    files = sorted((run_dir / "samples").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def measured(run_dir: pathlib.Path) -> list[dict]:
    """What was logged, but for times and what hosts need."""
    records = without_times(read(run_dir / "metrics.jsonl"))
    return [{name: v for name, v in record.items() if not name.startswith(("hosts", "servers/"))} for record in records]


def assert_same(run_dir: pathlib.Path, reference: pathlib.Path) -> None:
    assert_same_run(run_dir, reference)
    assert samples(run_dir) == samples(reference)


@pytest.mark.medium
def test_a_store_in_the_process(sources, central, tmp_path):
    """Killed, it goes on with worker processes."""
    run_dir, store = tmp_path / "run", shadow(sources, data__workers=0, data__cache_gib=1e-5)
    with pytest.raises(Died):
        trained(run_dir, VLM, store, DiesAt("on_step", 4))
    trained(run_dir, VLM, [*store, "--config.data.workers=1"])
    assert summary(run_dir)["resumed_from"] == [3]
    assert_same(run_dir, central)
    assert "data/first_batch" in shown(run_dir) and shown(run_dir)["data/fetched_mb"] > 0


def test_preprocessors_are_killed_and_then_the_run(commands, sources, central, tmp_path):
    """Nothing is lost, nothing comes twice, the order stays. Preprocessors end with the run; resumed, with room for
    some of a step and a preprocessor less, it ends like the others."""
    run_dir, arguments = tmp_path / "run", shadow(sources, data__workers=1, data__cache_gib=1e-5)
    process = commands.start(run_dir, VLM, [*arguments, "--config.data.preprocessors=2"])
    with ended(process):
        killer = Killer(process, run_dir, 2, seed=1)

        def in_mid_run() -> bool:
            if 3 not in checkpoint_steps(run_dir) or len(killer.killed) < 2 or addresses(run_dir) <= 2:
                return False
            killer.seen |= descendants(process.pid)
            return True

        assert signal_when(process, in_mid_run) == -signal.SIGKILL
    killer.join()
    assert any("fluxjax.preprocess" in line for line in killer.seen.values())
    until(lambda: all(map(gone, killer.seen)))
    ahead = ("preprocessors=1", "near_gib=1e-4")
    trained(run_dir, VLM, [*arguments, *(f"--config.data.{setting}" for setting in ahead)])
    assert summary(run_dir)["resumed_from"] == [3]
    assert_same(run_dir, central)


@pytest.mark.medium
@pytest.mark.parametrize("strategy", by_turns(["fsdp", "flex_ulysses", "odc"]))
def test_two_processes_of_which_each_has_a_preprocessor(strategy, commands, sources, tmp_path):
    """They end as two processes do that decode what they compute, bit for bit: one process rounds otherwise on some
    processors."""
    own: dict[str, object] = {
        "sharding__devices": 2,
        "sharding__strategy": strategy,
        "steps": 3,
        "warm_start__steps": 0,
        "evaluation__every": 0,
    }
    own |= {"sharding__strategy__deterministic": True} if strategy == "odc" else {}
    commands.run(tmp_path / "central", VLM, flags(**sources, **OWN | own), processes=2)
    steps = [record for record in read(tmp_path / "central" / "metrics.jsonl") if record["phase"] == "rl"]
    assert all(step["grad_norm"] > 0 for step in steps) and len(steps) == 3
    run_dir = tmp_path / "run"
    own |= {"data__preprocessors": 1, "data__workers": 1}
    own |= {"data__near_gib": 1e-4}  # room for some of a step
    process = commands.start(run_dir, VLM, flags(**sources, **OWN | own), processes=2)
    with ended(process):
        killer = Killer(process, run_dir, 1, seed=2)
        assert process.wait(300) == 0, (tmp_path / "run.log").read_text()[-4000:]
    killer.join()
    assert killer.killed
    assert_same_bits(model_arrays(run_dir), model_arrays(tmp_path / "central"))
    mine, theirs = (measured(folder) for folder in (run_dir, tmp_path / "central"))
    assert mine == theirs
    assert samples(run_dir) == samples(tmp_path / "central")
    until(lambda: all(map(gone, killer.seen)))


# --- media that change while a run goes on ------------------------------------------------------

REWARD = '''
import os, pathlib

def changes_the_file(prompt, text):
    """When a response is scored, it is not yet trained on; no held-out prompt shows this picture."""
    for medium in prompt.media:
        path = pathlib.Path(medium.path)
        if path.name == "7.png" and not pathlib.Path("{mark}").exists():
            pathlib.Path("{mark}").touch()
            {change}
    return 1.0 if text == prompt.answer else 0.0
'''
CHANGES = {
    "overwritten": "path.write_bytes(path.read_bytes() + b' ')",
    "deleted": "path.unlink()",
    # Among them are some that were drawn ahead and are not answered yet.
    "others overwritten": "[p.write_bytes(p.read_bytes() + b' ') for p in path.parent.glob('[2-6].*')]",
}


def refused(capsys, arguments: list[str]) -> list[str]:
    """The lines on standard error of a run in this process that ends with an error."""
    assert main(load([f"--config={VLM}", *arguments])) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    return printed.err.splitlines()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("change", "processes", "own"),
    [
        ("deleted", 1, {"data__preprocessors": 1, "data__workers": 1}),
        ("others overwritten", 1, {}),
        ("overwritten", 2, {"data__preprocessors": 1, "data__workers": 1}),
    ],
)
def test_a_file_that_changes_before_it_is_trained_on_ends_the_run(
    change, processes, own, capsys, monkeypatch, tmp_path
):
    folder = tmp_path / "media"
    folder.mkdir()
    reward = f"changing_{processes}_{len(own)}"  # a module of its own: this process keeps it
    sources = media(folder, bad=False) | {"data__sources__digits__reward": f"{reward}:changes_the_file"}
    (tmp_path / f"{reward}.py").write_text(REWARD.format(mark=tmp_path / "mark", change=CHANGES[change]))
    own = own | OWN | {"warm_start__steps": 0, "evaluation__every": 0}
    settings = flags(**sources, **own | {"sharding__devices": processes, "steps": 30})
    if processes == 1:
        monkeypatch.syspath_prepend(str(tmp_path))
        errors = refused(capsys, [f"--config.run_dir={tmp_path / 'run'}", *settings])
    else:
        commands = Commands()
        commands.env["PYTHONPATH"] += f":{tmp_path}"
        process = commands.start(tmp_path / "run", VLM, settings, processes=processes)
        with ended(process):
            assert process.wait(240) == 2, (tmp_path / "run.log").read_text()[-4000:]
        printed = (tmp_path / "run.log").read_text()
        assert "Traceback" not in printed, printed[-4000:]
        errors = printed.splitlines()
    errors = [line for line in errors if line.startswith(("error: ", "process 0 (", "process 1 ("))]
    named = re.compile(re.escape(f"{folder}/") + (r"[2-6]\.(png|mp4)" if "others" in change else r"7\.png"))
    assert errors and all(named.search(line) for line in errors), errors
    assert (tmp_path / "mark").exists()


def test_too_many_bad_media_end_the_run(capsys, sources, tmp_path, monkeypatch):
    """From the 100th prompt on, they are judged: here in the third step."""
    own = OWN | {"warm_start__steps": 0, "evaluation__every": 0}
    monkeypatch.setattr(prepare, "MAX_SKIPPED", 0.05)
    own |= {"rollout__prompts_per_step": 40, "rollout__group_size": 2, "rollout__max_new_tokens": 1}
    settings = flags(**sources, **own)
    with without_store():
        central = refused(capsys, [f"--config.run_dir={tmp_path / 'central'}", *settings])
    shadow = refused(capsys, [f"--config.run_dir={tmp_path / 'shadow'}", *settings])
    assert len(central) == 1 and "more than 5% of them; by reason: {" in central[0]
    assert central == shadow
