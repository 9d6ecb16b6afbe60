"""Damaged checkpoints are passed over, with a line that names the file; nothing older goes before newer files have
checksums."""

import contextlib
import logging
import pathlib
import random
import shutil

import numpy as np
import pytest
from checkpoint_cases import save
from fuzz.checkpoint import STEPS, arrays_of, flipped, truncated, written

from fluxjax.run import checkpoint
from fluxjax.run.checkpoint import SUMS, Checkpoints, ResumeError, damage
from sharding.weights import like

NEWEST, OLDER = str(STEPS[-1]), str(STEPS[-2])


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> pathlib.Path:
    written(folder := tmp_path_factory.mktemp("original"))
    return folder


@pytest.fixture
def folder(original, tmp_path) -> pathlib.Path:
    return shutil.copytree(original, tmp_path / "checkpoints")


@pytest.fixture
def opened(folder):
    """Opens the folder, once it is damaged."""
    with contextlib.ExitStack() as stack:
        yield lambda keep=2: stack.enter_context(contextlib.closing(Checkpoints(folder, keep)))


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def test_every_file_counts_and_is_named(folder):
    assert damage(folder / NEWEST) == "" and len(files(folder / NEWEST)) > 10
    for file in files(folder / NEWEST):
        name, data = str(file.relative_to(folder / NEWEST)), file.read_bytes()
        for harm in (flipped, truncated, lambda file, _: file.unlink()):
            harm(file, random.Random(name))
            assert name in damage(folder / NEWEST), harm
            file.write_bytes(data)
    assert damage(folder / NEWEST) == ""


@pytest.mark.parametrize("name", ["commit_success.txt", "_CHECKPOINT_METADATA", "arrays", SUMS, "*"])
def test_the_one_before_is_restored_and_the_run_goes_on(name, folder, opened, caplog):
    for victim in (folder / NEWEST).glob(name):
        if victim.is_dir():
            shutil.rmtree(victim)
        else:
            victim.unlink()
    checkpoints = opened()
    step, arrays, state = checkpoints.restore(like(arrays_of(0)))
    assert step == int(OLDER) and state == {"step": step}
    np.testing.assert_array_equal(arrays["w"], arrays_of(step)["w"])
    (line,) = [line for line in caplog.messages if f"step {NEWEST}" in line]
    assert str(folder) in line and name.strip("*") in line and "missing" in line
    checkpoints.forget_after(step)
    assert not (folder / NEWEST).exists()
    assert save(checkpoints, int(NEWEST), arrays_of(9), {}) and checkpoints.wait() and damage(folder / NEWEST) == ""


def test_where_all_are_damaged_nothing_is_taken(folder, opened):
    for step in (NEWEST, OLDER):
        flipped(folder / step / "state" / "metadata", random.Random(0))
    with pytest.raises(ResumeError, match=f"every checkpoint in {folder} is damaged"):
        opened().chosen()
    assert {path.name for path in folder.iterdir()} >= {NEWEST, OLDER}


def test_one_that_is_asked_for_must_be_undamaged(folder, opened):
    flipped(folder / OLDER / "state" / "metadata", random.Random(0))
    checkpoints = opened()
    with pytest.raises(ResumeError, match=f"{OLDER} is damaged: state/metadata has another checksum than {SUMS} says"):
        checkpoints.chosen(int(OLDER))
    assert checkpoints.chosen(int(NEWEST)) == int(NEWEST)
    assert checkpoints.chosen() == int(NEWEST)


def test_those_of_earlier_releases_have_no_checksums(folder, opened, caplog):
    """They are taken where there is none that has."""
    for step in (NEWEST, OLDER):
        (folder / step / SUMS).unlink()
    checkpoints = opened()
    assert checkpoints.chosen() == int(NEWEST) and f"step {NEWEST} has no checksums" in caplog.messages[-1]
    assert save(checkpoints, 7, arrays_of(7), {}) and checkpoints.chosen() == 7


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_older_is_removed_before_the_new_one_has_checksums(folder, opened, monkeypatch, caplog):
    def unreadable(folder: pathlib.Path) -> None:
        assert sorted(path.name for path in folder.parent.iterdir() if path.name.isdecimal()) == [OLDER, NEWEST]
        raise OSError("a file can't be read back")

    checkpoints = opened(keep=1)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(checkpoint, "write_sums", unreadable)
        assert save(checkpoints, 7, arrays_of(7), {}) and not checkpoints.wait()
    assert "a file can't be read back" in caplog.text and checkpoints.chosen() == int(NEWEST)
    assert save(checkpoints, 8, arrays_of(8), {}) and checkpoints.wait()
    assert [path.name for path in folder.iterdir()] == ["8"]
