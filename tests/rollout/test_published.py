"""Weights in shared memory: what is written, and what is left of it when a run ends in whatever way."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from protocol_cases import ROOT, model

import models
from rollout.weights import published
from rollout.weights.published import PREFIX, SharedFolders


@pytest.fixture
def memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(published, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.mark.medium
def test_a_version_is_written_once(memory: pathlib.Path) -> None:
    whole = model("text")
    folders, params = SharedFolders(whole.config, "float32"), models.split(whole)[1]
    first = folders.write(1, params)
    assert folders.write(1, params) is first
    again = folders.write(1, models.split(model("text", 1))[1])  # other weights under the same number
    assert again is not first and again.folder != first.folder
    folders.keep([again])
    assert first.folder.exists()  # the newest of the others: a server may be reading it
    folders.keep([folders.write(2, params)])
    assert not first.folder.exists() and again.folder.exists()
    folders.close()
    assert not list(memory.iterdir())


def test_a_run_that_was_killed_leaves_nothing_for_long(memory: pathlib.Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead, living = memory / f"{PREFIX}{child.pid}-a", memory / f"{PREFIX}{os.getpid()}-b"
    for folder in (dead, living):
        folder.mkdir()
    SharedFolders(model("text").config, "float32").close()
    assert not dead.exists() and living.exists()


@pytest.mark.slow
def test_a_run_that_is_not_closed_leaves_nothing(tmp_path: pathlib.Path) -> None:
    program = (
        "import pathlib; from models.config import DecoderConfig; from rollout_cases import TEXT\n"
        "from rollout.weights import published\n"
        f"published.SHARED_MEMORY = pathlib.Path({str(tmp_path)!r})\n"
        "folders = published.SharedFolders(TEXT, 'float32')\n"
        "assert list(published.SHARED_MEMORY.iterdir())\n"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "rollout")])
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": paths}, timeout=120)
    assert not list(tmp_path.iterdir())
