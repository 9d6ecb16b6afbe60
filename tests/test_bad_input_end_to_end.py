"""Bad records, bad run folders, failing devices and full disks, met by whole runs: a counted skip or one clear line."""

import contextlib
import gc
import pathlib
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_cases import checkpoint_steps, flags, summary, trained

from fluxjax.config.cli import load
from fluxjax.report.metrics import read
from fluxjax.run.callbacks import Callback
from fluxjax.run.main import main
from fluxjax.run.trainer import FluxTrainer
from sharding.odc import OdcError

TEXT = "configs/text.py"
SHORT = {"steps": 2, "warm_start__steps": 0, "checkpoint__every": 1, "evaluation__every": 0}


def tried(capsys, run_dir: pathlib.Path, data: dict, **own: object) -> str:
    """The one line on standard error of a run in this process that is refused."""
    assert main(load([f"--config={TEXT}", f"--config.run_dir={run_dir}", *flags(**data, **SHORT | own)])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.slow
def test_a_bad_row_of_held_out_parquet_is_skipped_and_counted(data, tmp_path):
    questions = {"prompt": ["First of ab:", "First of cd:"], "answer": [None, "c"]}
    pq.write_table(pa.table(questions), tmp_path / "eval.parquet")
    changed = flags(**data | {"data__sources__reverse__eval_path": tmp_path / "eval.parquet"}, **SHORT)
    with FluxTrainer(load([f"--config={TEXT}:debug", f"--config.run_dir={tmp_path / 'run'}", *changed])) as trainer:
        (prepared,) = trainer.held_out.prompts["reverse"]
    assert prepared.prompt.answer == "c"
    assert trainer.summary.samples_skipped == {"held out: no answer": 1}


def test_run_folder_that_cannot_be_written(capsys, data, tmp_path):
    (tmp_path / "file").write_text("in the way")
    line = tried(capsys, tmp_path / "file" / "run", data)
    assert line.startswith("error: run_dir: cannot write") and str(tmp_path / "file" / "run") in line


def test_a_device_that_fails(capsys, data, monkeypatch, tmp_path):
    """`test_odc_processes` has real failures, and runs that go on."""

    def failing(*_, **__):
        raise OdcError("cpu:1 failed")

    monkeypatch.setattr("fluxjax.run.main.FluxTrainer", failing)
    assert tried(capsys, tmp_path / "run", data) == "error: cpu:1 failed"


@pytest.mark.long
def test_disk_full_while_checkpointing(data, small_disk, caplog, tmp_path):
    """Room for one checkpoint, hardly for two: the run goes on to its end and says what it could not save."""
    run_dir = tmp_path / "run"
    trained(tmp_path / "finished", TEXT, flags(**data, **SHORT))
    files = [file for file in (tmp_path / "finished" / "checkpoints" / "2").rglob("*") if file.is_file()]
    pages = sum(-(-file.stat().st_size // 4096) for file in files)  # of tmpfs, which also counts folders
    size = f"size={pages * 4 + 1024 + 60}k"  # a margin of 1 MiB, and not quite the arrays
    subprocess.run(["mount", "-o", f"remount,{size}", str(small_disk)], check=True)
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(small_disk)
    settings = flags(**data, **SHORT | {"steps": 4})
    trained(run_dir, TEXT, settings)
    result = summary(run_dir)
    assert result["complete"] and result["steps"] == 4
    assert result["checkpoints_failed"] >= 1
    assert "the disk is full" in caplog.text and "Traceback" not in caplog.text
    kept = checkpoint_steps(run_dir)[-1]
    assert kept < 4
    assert [r["step"] for r in read(run_dir / "metrics.jsonl") if r["phase"] == "rl"] == [1, 2, 3, 4]
    trained(run_dir, TEXT, settings)  # what was kept is whole
    assert summary(run_dir)["resumed_from"] == [kept]


class FillsDisk(Callback):
    """After the second step, on which there is a line of metrics."""

    def on_step(self, trainer, step, groups, metrics):
        with (trainer.run_dir.parent / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
            while step == 2:
                other.write(b"x" * 4096)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that can't be flushed and closed
def test_disk_full_of_other_things(data, small_disk, capsys, monkeypatch):
    """Not even a line of metrics can be written: one clear line, no hang; what was saved is there."""
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    monkeypatch.setattr("fluxjax.run.main.SettledHeap", FillsDisk)
    own = {"steps": 2000, "report__dump_samples_every": 1, "checkpoint__every": 0, "warm_start__steps": 1}
    line = tried(capsys, small_disk / "run", data, **own)
    assert line.startswith("error: ") and "No space left" in line
    assert 0 in checkpoint_steps(small_disk / "run")
    gc.collect()  # these files are closed now, not in a later test
