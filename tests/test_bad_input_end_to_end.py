"""Bad files, bad settings, bad run folders and full disks, met by whole runs: a counted skip or one clear line."""

import contextlib
import gc
import json
import pathlib
import shutil
import socket
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from run_cases import COLOURS, assert_same_run, checkpoint_steps, clip, flags, picture, summary, trained, write_jsonl

from fluxjax.config.cli import load
from fluxjax.report.metrics import read
from fluxjax.run.callbacks import Callback
from fluxjax.run.main import main
from fluxjax.run.trainer import FluxTrainer
from sharding.odc.worker import Worker

TEXT, VLM = "configs/text.py", "configs/vlm.py"


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A short run to be damaged in copies."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    trained(run_dir, TEXT, flags(**data, **SHORT))
    return run_dir


SHORT = {"steps": 2, "warm_start__steps": 0, "checkpoint__every": 1, "evaluation__every": 0}


# --- data ---------------------------------------------------------------------------------------


def odd_files(folder: pathlib.Path) -> dict[str, object]:
    """Sources for `configs/vlm.py` in which half of the files are odd: some can be used, some cannot."""
    for name, colour in COLOURS.items():
        picture(folder / f"{name}.png", colour)
        clip(folder / f"{name}.mp4", colour)
    Image.new("RGB", (1, 1)).save(folder / "pixel.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    Image.new("RGB", (48, 32), (200, 30, 30)).save(folder / "turned.jpg", exif=exif)
    Image.new("P", (32, 32), 1).save(folder / "palette.png")
    whole = (folder / "red.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])

    def records(field: str, names: list[str]) -> list[dict]:
        return [{"id": name, "prompt": "Colour?", "answer": name[0], field: [name]} for name in names]

    images = records("images", ["red.png", "blue.png", "turned.jpg", "palette.png", "pixel.png", "missing.png"])
    videos = records("videos", ["red.mp4", "blue.mp4", "cut.mp4"])
    good = {"digits": records("images", ["red.png"]), "pans": records("videos", ["red.mp4"])}
    made: dict[str, object] = {}
    for source, train in (("digits", images), ("pans", videos)):
        made[f"data__sources__{source}__path"] = write_jsonl(folder / f"{source}.jsonl", train)
        held_out = write_jsonl(folder / f"{source}-eval.jsonl", good[source])
        made |= {f"data__sources__{source}__eval_path": held_out, f"data__sources__{source}__reward": "exact"}
        made[f"data__sources__{source}__weight"] = 1.0
    return made


@pytest.mark.long
def test_odd_files_are_used_or_skipped_and_counted(caplog, tmp_path):
    (tmp_path / "data").mkdir()
    settings = odd_files(tmp_path / "data")
    own = SHORT | {"warm_start__steps": 1, "rollout__prompts_per_step": 8, "rollout__group_size": 2}
    own |= {"report__dump_samples_every": 1, "report__dump_samples": 32}
    run_dir = tmp_path / "run"
    trained(run_dir, VLM, flags(**settings, **own))
    assert "Traceback" not in caplog.text
    result = summary(run_dir)
    assert result["complete"] and result["samples_trained"] == 2 * 16
    assert set(result["samples_skipped"]) == {"no such file", "cannot be opened as a video"}
    assert all(count >= 1 for count in result["samples_skipped"].values())
    for name in ("missing.png", "cut.mp4"):
        assert name in caplog.text  # the log says which file it was
    dumps = [json.loads(line) for file in (run_dir / "samples").iterdir() for line in file.read_text().splitlines()]
    used = {record["id"] for record in dumps}
    assert used == {"red.png", "blue.png", "turned.jpg", "palette.png", "pixel.png", "red.mp4", "blue.mp4"}


def tried(capsys, run_dir: pathlib.Path, config: str, data: dict, **own: object) -> str:
    """The one line on standard error of a run in this process that is refused."""
    assert main(load([f"--config={config}", f"--config.run_dir={run_dir}", *flags(**data, **SHORT | own)])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_wrong_field_name(capsys, data, tmp_path):
    lines = data["data__sources__reverse__path"].read_text().splitlines()
    lines[4] = lines[4].replace('"answer"', '"anwser"')
    file = tmp_path / "typo.jsonl"
    file.write_text("\n".join(lines))
    line = tried(capsys, tmp_path / "run", TEXT, data | {"data__sources__reverse__path": file})
    assert line.startswith(f"error: {file}:5:") and "'anwser'" in line and "'answer'" in line


def test_unknown_embedded_source(capsys, tmp_path):
    file = tmp_path / "config.py"
    file.write_text(
        "from fluxjax.config import Config, SourceConfig\n"
        "def get_config(variant=''):\n"
        "    config = Config()\n"
        "    config.data.sources = {'digitz': SourceConfig()}\n"
        "    return config\n"
    )
    line = tried(capsys, tmp_path / "run", str(file), {})
    assert "digitz" in line and "digits, pans, reverse" in line


@pytest.mark.slow
def test_no_usable_record(capsys, tmp_path):
    records = [{"id": str(i), "prompt": "Colour?", "answer": "r", "images": ["gone.png"]} for i in range(3)]
    file = write_jsonl(tmp_path / "gone.jsonl", records)
    sources = {f"data__sources__{name}__path": file for name in ("digits", "pans")}
    line = tried(capsys, tmp_path / "run", VLM, sources)
    assert "no such file" in line


@pytest.mark.slow
def test_a_bad_row_of_held_out_parquet_is_skipped_and_counted(data, tmp_path):
    questions = {"prompt": ["First of ab:", "First of cd:"], "answer": [None, "c"]}
    pq.write_table(pa.table(questions), tmp_path / "eval.parquet")
    changed = flags(**data | {"data__sources__reverse__eval_path": tmp_path / "eval.parquet"}, **SHORT)
    with FluxTrainer(load([f"--config={TEXT}:debug", f"--config.run_dir={tmp_path / 'run'}", *changed])) as trainer:
        (prepared,) = trainer.held_out.prompts["reverse"]
    assert prepared.prompt.answer == "c"
    assert trainer.summary.samples_skipped == {"held out: no answer": 1}


def test_a_hub_id_as_the_model(capsys, data, tmp_path):
    settings = [f"--config.{name.replace('__', '.')}={value}" for name, value in data.items()]
    folders = [f"--config.run_dir={tmp_path / 'run'}", "--config.model.path=org/name"]
    assert main(load([f"--config={TEXT}", *settings, *folders])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: model.path: org/name")


# --- run folders --------------------------------------------------------------------------------


def test_run_folder_that_cannot_be_written(capsys, data, tmp_path):
    (tmp_path / "file").write_text("in the way")
    line = tried(capsys, tmp_path / "file" / "run", TEXT, data)
    assert line.startswith("error: run_dir: cannot write") and str(tmp_path / "file" / "run") in line


def test_more_devices_than_there_are(capsys, data, tmp_path):
    line = tried(capsys, tmp_path / "run", TEXT, data, sharding__devices=64)
    assert "64 devices" in line and "8" in line


@pytest.mark.slow
def test_port_in_use(capsys, data, tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = tried(capsys, tmp_path / "run", TEXT, data, report__prometheus_port=port)
    assert "report.prometheus_port" in line and str(port) in line


@pytest.mark.long
def test_run_folder_of_another_model(capsys, data, finished, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    line = tried(capsys, run_dir, TEXT, data, model__hidden_size=32)
    assert str(run_dir / "checkpoints" / "2") in line and "does not fit" in line
    line = tried(capsys, run_dir, TEXT, data, seed=1)
    assert "seed 0" in line
    assert checkpoint_steps(run_dir) == checkpoint_steps(finished)


@pytest.mark.long
def test_a_device_that_fails_in_the_middle_of_a_step(capsys, data, finished, tmp_path, monkeypatch):
    """ODC, two devices: the run ends in one line, and the same command goes on from the last checkpoint."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    more = {"steps": 3, "sharding__strategy": "odc", "sharding__devices": 2}
    step = Worker._next

    def fail(self, window, number, place):
        rows = step(self, window, number, place)
        if self.number == 1 and place == "layers[0] backward":
            raise MemoryError("no room for 3 GB")
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_next", fail)
        line = tried(capsys, run_dir, TEXT, data, **more)
    assert "cpu:1 failed in microbatch 1 of " in line and "layers[0] backward: MemoryError: no room for 3 GB" in line
    assert checkpoint_steps(run_dir) == checkpoint_steps(finished)
    assert main(load([f"--config={TEXT}", f"--config.run_dir={run_dir}", *flags(**data, **(SHORT | more))])) == 0
    assert summary(run_dir)["resumed_from"] == [2]


@pytest.mark.long
@pytest.mark.parametrize("damage", ["empty", "foreign", "cut", "gone", "state"])
def test_damaged_checkpoint(damage, caplog, data, finished, tmp_path):
    """The newest checkpoint is damaged: the run names it and goes on from the one before."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    folder = run_dir / "checkpoints" / "2"
    if damage in ("empty", "foreign"):
        shutil.rmtree(folder)
        folder.mkdir()
        if damage == "foreign":
            (folder / "weights.bin").write_bytes(b"something else")
    part = folder / ("state" if damage == "state" else "arrays")
    for file in [path for path in part.rglob("*") if path.is_file()]:
        if damage in ("cut", "state"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        else:
            file.unlink()
    trained(run_dir, TEXT, flags(**data, **SHORT))
    assert f"the checkpoint of step 2 in {run_dir / 'checkpoints'} is passed over" in caplog.text
    assert summary(run_dir)["resumed_from"] == [1] and checkpoint_steps(run_dir) == [1, 2]
    assert_same_run(run_dir, finished)


# --- disks --------------------------------------------------------------------------------------


@pytest.mark.long
def test_disk_full_while_checkpointing(data, small_disk, finished, caplog, tmp_path):
    """Room for one checkpoint, hardly for two: the run goes on to its end and says what it could not save."""
    run_dir = tmp_path / "run"
    files = [file for file in (finished / "checkpoints" / "2").rglob("*") if file.is_file()]
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
    line = tried(capsys, small_disk / "run", TEXT, data, **own)
    assert line.startswith("error: ") and "No space left" in line
    assert 0 in checkpoint_steps(small_disk / "run")
    gc.collect()  # these files are closed now, not in a later test
