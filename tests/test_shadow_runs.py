"""Whole runs under `data.loader=shadow` end as under `central`, bit for bit, however preprocessors fare meanwhile.

Real processes, real kills, good and bad media. Parameters, optimizer state, every logged number that is not a time,
every dumped sample and the summary are compared.
"""

import json
import pathlib
import re
import signal
import time

import pytest
from run_cases import (
    Commands,
    assert_same_bits,
    assert_same_run,
    ended,
    flags,
    logged,
    model_arrays,
    signal_when,
    summary,
    without_times,
)
from shadow_run_cases import Killer, addresses, descendants, gone, media

from fluxjax.report.metrics import read

pytestmark = pytest.mark.long
VLM = "configs/vlm.py"
STEPS = 6
OWN = {
    "steps": STEPS,
    "warm_start__steps": 4,
    "report__dump_samples_every": 1,
    "report__dump_samples": 64,
    "data__max_decoded_pixels": 2**22,  # a bomb is larger
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return media(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return tmp_path_factory.mktemp("index")


@pytest.fixture(scope="module")
def central(commands, sources, tmp_path_factory):
    """It compiles everything; the others load the compiled programs."""
    run_dir = tmp_path_factory.mktemp("central") / "run"
    commands.run(run_dir, VLM, flags(**sources, **OWN, data__loader="central"))
    return run_dir


def shadow(sources, index, **own: object) -> list[str]:
    return flags(**sources, **OWN, data__index=index, **own)


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


def all_gone(pids, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while left := {pid: line for pid, line in pids.items() if not gone(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_the_reference_has_it_all(central):
    result = summary(central)
    assert result["complete"] and result["samples_trained"] == STEPS * 16
    assert len(result["samples_skipped"]) >= 3, result["samples_skipped"]
    assert {pathlib.Path(record["id"]).suffix for record in samples(central)} == {".png", ".mp4"}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_store_in_the_process(workers, commands, sources, index, central, tmp_path):
    """The second one finds in the index what the first one has seen."""
    commands.run(tmp_path / "run", VLM, shadow(sources, index, data__workers=workers, data__cache_gib=1e-5))
    assert_same(tmp_path / "run", central)


def test_preprocessors_that_are_killed(commands, sources, index, central, tmp_path):
    """Nothing is lost, nothing comes twice, the order stays; no process outlives the run."""
    run_dir = tmp_path / "run"
    arguments = shadow(sources, index, data__preprocessors=2, data__workers=1, data__cache_gib=1e-5)
    process = commands.start(run_dir, VLM, arguments)
    with ended(process):
        killer = Killer(process, run_dir, 2, seed=1)
        assert process.wait(300) == 0, (tmp_path / "run.log").read_text()[-4000:]
    killer.join()
    assert len(killer.killed) >= 2 and addresses(run_dir) > 2, "killed, and started again"
    assert_same(run_dir, central)
    all_gone(killer.seen)


def test_a_run_with_preprocessors_that_is_killed(commands, sources, index, central, tmp_path):
    """Its preprocessors end with it; resumed, it ends like the others."""
    run_dir, ahead = tmp_path / "run", {"data__near_gib": 1e-4, "data__steps_ahead": 2}
    arguments = shadow(sources, index, data__preprocessors=1, data__workers=1, **ahead)
    process = commands.start(run_dir, VLM, arguments)
    seen: dict[int, str] = {}

    def in_mid_run() -> bool:
        seen.update(descendants(process.pid))
        return logged(run_dir, "rl", 4)()

    assert signal_when(process, in_mid_run) == -signal.SIGKILL
    assert any("fluxjax.preprocess" in line for line in seen.values())
    all_gone(seen)
    commands.run(run_dir, VLM, arguments)
    assert summary(run_dir)["resumed_from"]
    assert_same(run_dir, central)


@pytest.mark.parametrize("strategy", ["fsdp", "flex_ulysses", "odc"])
def test_two_processes_of_which_each_has_a_preprocessor(strategy, commands, sources, index, tmp_path):
    own: dict[str, object] = {
        "sharding__devices": 0,
        "sharding__strategy": strategy,
        "steps": 3,
        "evaluation__every": 0,
    }
    own |= {"sharding__deterministic": True} if strategy == "odc" else {}
    commands.run(tmp_path / "central", VLM, flags(**sources, **OWN | own, data__loader="central"), processes=2)
    run_dir = tmp_path / "run"
    own |= {"data__preprocessors": 1, "data__workers": 1, "data__index": index}
    own |= {"data__near_gib": 1e-4, "data__steps_ahead": 2}  # room for some of a step
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
    all_gone(killer.seen)


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


@pytest.mark.parametrize(
    ("change", "processes", "own"),
    [
        ("deleted", 1, {"data__preprocessors": 1, "data__workers": 1}),
        ("others overwritten", 1, {}),
        ("overwritten", 2, {"data__preprocessors": 1, "data__workers": 1}),
    ],
)
def test_a_file_that_changes_before_it_is_trained_on_ends_the_run(change, processes, own, tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    sources = media(folder, bad=False) | {"data__sources__digits__reward": "changing:changes_the_file"}
    (tmp_path / "changing.py").write_text(REWARD.format(mark=tmp_path / "mark", change=CHANGES[change]))
    commands = Commands()
    commands.env["PYTHONPATH"] += f":{tmp_path}"
    own = own | OWN | {"warm_start__steps": 0, "data__index": tmp_path / "index", "evaluation__every": 0}
    own |= {"sharding__devices": 0, "steps": 30}
    process = commands.start(tmp_path / "run", VLM, flags(**sources, **own), processes=processes)
    with ended(process):
        assert process.wait(240) == 2, (tmp_path / "run.log").read_text()[-4000:]
    printed = (tmp_path / "run.log").read_text()
    assert "Traceback" not in printed, printed[-4000:]
    errors = [line for line in printed.splitlines() if line.startswith(("error: ", "process 0 (", "process 1 ("))]
    named = re.compile(re.escape(f"{folder}/") + (r"[2-6]\.(png|mp4)" if "others" in change else r"7\.png"))
    assert errors and all(named.search(line) for line in errors), printed[-4000:]
    assert (tmp_path / "mark").exists()


def test_too_many_bad_media_end_the_run(commands, sources, index, tmp_path):
    for name, own in (("central", {"data__loader": "central"}), ("shadow", {"data__index": index})):
        settings = flags(**sources, **OWN | {"steps": 100, "warm_start__steps": 0, "data__max_skipped": 0.05}, **own)
        process = commands.start(tmp_path / name, VLM, settings)
        with ended(process):
            assert process.wait(240) == 2
    lines = [(tmp_path / f"{name}.log").read_text() for name in ("central", "shadow")]
    central, shadow = ([line for line in text.splitlines() if line.startswith("error: ")] for text in lines)
    assert len(central) == 1 and "more than data.max_skipped = 0.05 of them; by reason: {" in central[0]
    assert central == shadow
    assert not any("Traceback" in text for text in lines)
