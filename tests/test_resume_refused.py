"""A resume that cannot go on changes nothing in the run folder; one that goes on says what it changes. One run at a
time has a folder."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_cases import checkpoint_steps, flags, letters, summary, trained, write_jsonl

from fluxjax import launch
from fluxjax.base.errors import USER
from fluxjax.base.types import Media, MediaKind, Prompt
from fluxjax.config import Config, ConfigError, run_folder
from fluxjax.config.cli import load
from fluxjax.data.loader import open_source
from fluxjax.data.sources import PromptList, digest_of
from fluxjax.run.main import main
from fluxjax.run.trainer import FluxTrainer

TEXT = "configs/text.py"
SHORT = {"steps": 1, "warm_start__steps": 0, "checkpoint__every": 1, "evaluation__every": 0, "evaluation__samples": 1}
TRAIN = "data__sources__reverse__path"


def arguments(run_dir: pathlib.Path, data: dict[str, object], **changed: object) -> list[str]:
    return [f"--config={TEXT}", f"--config.run_dir={run_dir}", *flags(**(SHORT | data | changed))]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, object]:
    return letters(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> pathlib.Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    trained(run_dir, TEXT, flags(**SHORT, **data))
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path) -> pathlib.Path:
    return shutil.copytree(finished, tmp_path / "run")


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what is refused ----------------------------------------------------------------------------


OTHERS = {
    "order": lambda records: records[::-1],
    "answers": lambda records: [record | {"answer": "abcd"[k % 4]} for k, record in enumerate(records)],
    "ids": lambda records: [record | {"id": f"new {record['id']}"} for record in records],
    "letters": lambda records: [record | {"prompt": "Zygotes", "answer": "z"} for record in records],
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_other_data_is_refused_before_anything_is_written(other, data, run_dir, tmp_path, capsys):
    records = [json.loads(line) for line in pathlib.Path(str(data[TRAIN])).read_text().splitlines()]
    changed = {TRAIN: write_jsonl(tmp_path / "train.jsonl", OTHERS[other](records)), "steps": 2, "optim__lr": 1}
    before = content(run_dir)
    assert main(load(arguments(run_dir, data, **changed))) == USER
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert ("does not fit" if other == "letters" else "data source reverse has other records") in line
    assert content(run_dir) == before


@pytest.mark.medium
def test_other_sizes_and_seeds_are_refused_before_anything_is_written(data, run_dir, capsys):
    before = content(run_dir)
    for changed, why in (({"model__tiny__hidden_size": 32}, "does not fit"), ({"seed": 1}, "seed 0")):
        assert main(load(arguments(run_dir, data, steps=2, **changed))) == USER
        assert why in capsys.readouterr().err
        assert content(run_dir) == before


@pytest.mark.slow
def test_what_a_resume_changes_is_in_its_first_lines(data, run_dir, capsys):
    assert main(load(arguments(run_dir, data, steps=2, optim__lr=0.5, rollout__group_size=2))) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(k for k, line in enumerate(lines) if "resuming after step 1" in line)
    said = {line.partition("changed by this resume: ")[2] for line in lines[first + 1 : first + 4]}
    assert said == {"optim.lr: 0.005 -> 0.5", "rollout.group_size: 4 -> 2", "steps: 1 -> 2"}
    assert summary(run_dir)["resumed_from"] == [1] and checkpoint_steps(run_dir) == [1, 2]
    assert json.loads((run_dir / "config.json").read_text())["optim"]["lr"] == 0.5


def test_changes_of_any_setting_are_named(tmp_path):
    config = Config()
    config.lora.alpha, config.lora.rank = 8.0, 4
    run_folder.write(config, tmp_path)
    assert run_folder.changes(config, tmp_path) == []
    config.run_dir, config.distributed.coordinator = "elsewhere", "127.0.0.1:1"  # another one at each start
    config.lora.alpha, config.report.prometheus = 64.0, "9"
    changes = run_folder.changes(config, tmp_path)
    assert sorted(changes) == ["lora.alpha: 8.0 -> 64.0", "report.prometheus: '' -> '9'"]
    for damaged in ("{", "[]", "\xff", ""):
        (tmp_path / run_folder.CONFIG).write_text(damaged, encoding="latin-1")
        (line,) = run_folder.changes(config, tmp_path)
        assert line.startswith("unknown") and run_folder.CONFIG in line


# --- digests ------------------------------------------------------------------------------------


def prompt(id: str, text: str, *pictures: str) -> Prompt:
    return Prompt(id, "s", text, "1", media=tuple(Media(MediaKind.IMAGE, path) for path in pictures))


def test_digests_tell_records_and_their_order_apart():
    """But not the folder in which the media are."""
    prompts = [prompt("a", "x", "/1/a.png"), prompt("b", "x", "/1/b.png")]
    changed = [[first, prompts[1]] for first in (prompt("a", "x", "/1/b.png"), prompt("ax", "", "/1/a.png"))]
    assert len({digest_of(PromptList(p)) for p in (prompts, prompts[::-1], prompts[:1], *changed)}) == 5
    moved = [prompt("a", "x", "/2/a.png"), prompt("b", "x", "/2/b.png")]
    assert digest_of(PromptList(moved)) == digest_of(PromptList(prompts))


def test_digests_of_parquet_are_those_of_its_texts_and_ids(tmp_path):
    def digest(ids: list[str], prompts: list[str], rows: int = 10) -> str:
        table = pa.table({"id": ids, "prompt": prompts, "answer": ["1"] * len(ids)})
        pq.write_table(table, tmp_path / "s.parquet", row_group_size=rows)
        return digest_of(open_source(tmp_path / "s.parquet", "s"))

    first = digest(["a", "b", "c"], ["x", "y", "z"])
    assert first == digest(["a", "b", "c"], ["x", "y", "z"], rows=1)
    assert len({first, digest(["a", "c", "b"], ["x", "y", "z"]), digest(["a", "b", "c"], ["x", "z", "y"])}) == 3


# --- two runs -----------------------------------------------------------------------------------


def is_free(folder: pathlib.Path) -> bool:
    with contextlib.suppress(ConfigError):
        run_folder.lock(folder).close()
        return True
    return False


def test_a_second_run_in_the_folder_is_refused_while_the_first_one_lives(data, run_dir, capsys):
    before = content(run_dir)
    with FluxTrainer(load(arguments(run_dir, data))):
        for second in (main, lambda config: launch.main(["--processes=1", "--", *arguments(run_dir, data)])):
            assert second(load(arguments(run_dir, data, steps=2))) == USER
            assert f"a run is going on in {run_dir}" in capsys.readouterr().err
        assert content(run_dir) == before
        with FluxTrainer(load(arguments(run_dir, data)), read_only=True) as reader:
            assert reader.load_checkpoint() == 1
    assert is_free(run_dir)
    with pytest.raises(ConfigError, match=r"sharding\.devices: 64 devices .*there are 8"):
        FluxTrainer(load(arguments(run_dir, data, sharding__devices=64)))
    assert is_free(run_dir)


def test_what_a_crash_leaves_behind_does_not_bind(tmp_path):
    """Nor does what the dead process had forked."""
    code = f"""
import os, pathlib, time
from fluxjax.config.run_folder import lock
held = lock(pathlib.Path({str(tmp_path)!r}))
if not os.fork():
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert not is_free(tmp_path)
            process.kill()
            process.wait()
            assert is_free(tmp_path) and os.path.exists(f"/proc/{child}")
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert is_free(tmp_path) and f"{tmp_path / 'lock'} cannot be locked" in caplog.text
