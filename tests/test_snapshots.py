"""Snapshots: exact, of the newest two steps, for the same devices only, and never a reason for a run to fail."""

import functools
import logging
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from run_cases import Died, DiesAt, assert_same_run, checkpoint_steps, flags, letters, summary, trained

from fluxjax.config import CheckpointConfig
from fluxjax.hosts.gang import Gang
from fluxjax.run import snapshot_folder
from fluxjax.run.snapshots import GangSnapshots, Snapshots
from sharding.weights import like

ONE = Snapshots()
ROWS = P("d")


@functools.cache
def placed(devices: int, spec: P = ROWS):
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    matrix = jax.device_put(jnp.arange(64.0).reshape(16, 4), NamedSharding(mesh, spec))
    half = jax.device_put(jnp.linspace(0.0, 1.0, 7).astype(jnp.bfloat16), NamedSharding(mesh, P()))
    params = {"half": half, "matrix": matrix, "nothing": jax.device_put(jnp.zeros((0, 3)), NamedSharding(mesh, P()))}
    version = jax.device_put(np.int32(3), half.sharding)
    return {"params": params, "opt": jax.jit(optax.adam(1e-3).init)(params), "version": version}


@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P()])
def test_a_snapshot_is_exact_and_survives_donation(spec, tmp_path):
    arrays = placed(4, spec)
    expected, abstract = jax.tree.map(np.asarray, arrays), like(arrays)
    ONE.write(tmp_path / "s", 3, jax.tree.map(jnp.copy, arrays), {"coordinator": [1, 2]})
    assert ONE.steps(tmp_path / "s", abstract) == [3] and ONE.state(tmp_path / "s", 3) == {"coordinator": [1, 2]}
    restored = ONE.restore(tmp_path / "s", abstract, 3)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    jax.tree.map(lambda array, want: array.sharding == want.sharding or pytest.fail(), restored, arrays)
    jax.block_until_ready(overwrite(restored["params"]))
    jax.tree.map(np.testing.assert_array_equal, ONE.restore(tmp_path / "s", abstract, 3), expected)


def test_the_newest_two_are_kept(tmp_path):
    for step in (1, 2, 5):
        ONE.write(tmp_path / "s", step, placed(2))
    (tmp_path / "s" / "6.0-of-1.partial").touch()  # the process was killed
    assert ONE.steps(tmp_path / "s", like(placed(2))) == [2, 5]
    ONE.write(tmp_path / "s", 6, placed(2))
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["5.0-of-1", "6.0-of-1"]


def damaged_at(place: int):
    def damage(file: pathlib.Path) -> None:
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)

    return damage


# `fuzz.checkpoint` damages any place, in other ways, too.
@pytest.mark.parametrize("damage", [*map(damaged_at, (0, 9, -1)), lambda file: file.rename(file.with_name("2.0-of-2"))])
def test_what_is_damaged_or_of_another_number_of_processes_is_none(damage, tmp_path, caplog):
    for step in (1, 2):
        ONE.write(tmp_path / "s", step, placed(2))
    file = tmp_path / "s" / "2.0-of-1"
    damage(file)
    assert ONE.steps(tmp_path / "s", like(placed(2))) == [1]
    told = f"the snapshot of step 2 is passed over: {file} has another checksum than what was written"
    assert caplog.messages == ([told] if file.exists() else [])


def test_one_of_other_devices_or_arrays_is_none(tmp_path):
    ONE.write(tmp_path / "s", 1, placed(2))
    assert ONE.steps(tmp_path / "s", like(placed(2))) == [1]
    for other in (placed(4), placed(2, P()), placed(2)["params"]):
        assert ONE.steps(tmp_path / "s", like(other)) == []


def test_the_newest_of_which_all_have_their_part_is_told(tmp_path, caplog):
    class Two(Gang):
        def exchange(self, value):
            return [value, [1]]

    (run := tmp_path / "run").mkdir()
    for step in (1, 2):
        ONE.write(folder := snapshot_folder.named(run) or snapshot_folder.begun(run, tmp_path), step, placed(2))
    settings = CheckpointConfig(snapshot_every=1)
    assert GangSnapshots(settings, run, Two()).newest(like(placed(2))) == 1
    assert f"of snapshots in {folder}, step 1 is the newest that all have" in caplog.messages[-1]
    shutil.rmtree(folder)
    assert GangSnapshots(settings, run, Gang()).newest(like(placed(2))) == -1
    assert f"of snapshots in {folder}, step -1 is the newest that all have" in caplog.messages[-1]


def test_a_full_memory_is_a_warning(small_disk, caplog):
    folder, large = small_disk / "s", {"w": jnp.zeros(2**20)}
    ONE.write(folder, 1, placed(2))
    with caplog.at_level(logging.WARNING):
        for step in (2, 3):
            ONE.write(folder, step, large)
    assert len(caplog.messages) == 1 and "no snapshot of step 2" in caplog.text and "MiB are needed" in caplog.text
    assert [path.name for path in folder.iterdir()] == ["1.0-of-1"]
    ONE.write(folder, 4, placed(2))
    assert ONE.steps(folder, like(placed(2))) == [1, 4]


def test_a_folder_that_is_not_there_is_a_warning(tmp_path, caplog):
    Snapshots().write(tmp_path / "none" / "s", 1, placed(2))
    assert "no snapshot of step 1" in caplog.text


def test_another_history_has_another_folder(tmp_path):
    """That of a run that was killed and whose folder was then removed, too. Other runs keep theirs."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
    ONE.write(kept := snapshot_folder.begun(other, tmp_path), 1, placed(2))
    ONE.write(before := snapshot_folder.begun(run, tmp_path), 1, placed(2))
    assert snapshot_folder.newest(run, 1) == 1
    after = snapshot_folder.begun(run, tmp_path)
    assert snapshot_folder.named(run) == after != before and snapshot_folder.newest(run, 1) == -1
    ONE.write(after, 2, placed(2))
    assert not before.exists() and kept.exists() and snapshot_folder.newest(run, 1) == 2
    snapshot_folder.remove(run, tmp_path)
    assert not after.exists() and kept.exists() and snapshot_folder.newest(other, 1) == 1
    assert snapshot_folder.named(run) is None


# --- runs ---------------------------------------------------------------------------------------

TEXT = "configs/text.py:debug"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    return flags(steps=6, checkpoint__every=4, **letters(tmp_path_factory.mktemp("letters")))


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory) -> pathlib.Path:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    trained(run_dir, TEXT, text)
    assert not (run_dir / "snapshots").exists(), "they are off"
    return run_dir


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_snapshot(text, reference, tmp_path):
    """Without a supervisor. It ends as the run without snapshots that nobody killed; where snapshots are turned off, or
    are of other devices, it goes on from its checkpoint."""
    run_dir = tmp_path / "run"
    often = [*text, "--config.checkpoint.snapshot_every=1"]
    with pytest.raises(Died):
        trained(run_dir, TEXT, often, DiesAt("on_step", 4))
    newest = snapshot_folder.newest(run_dir, 1)
    assert newest >= 3 and checkpoint_steps(run_dir) == [0]
    off, elsewhere = tmp_path / "off", tmp_path / "elsewhere"
    for copy in (off, elsewhere):
        shutil.copytree(run_dir, copy)
    trained(elsewhere, TEXT, [*often, "--config.sharding.devices=2"])
    assert summary(elsewhere)["resumed_from"] == [0]
    trained(off, TEXT, text)
    assert summary(off)["resumed_from"] == [0]
    assert_same_run(off, reference)
    folder = snapshot_folder.named(run_dir)
    assert folder is not None and folder.is_dir(), "that of another run"
    trained(run_dir, TEXT, often)
    assert summary(run_dir)["resumed_from"] == [newest]
    assert_same_run(run_dir, reference)
    assert not folder.exists() and not (run_dir / "snapshots").exists()
