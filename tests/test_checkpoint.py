"""Checkpoints: exact, atomic, newest few kept, onto other meshes, and honest when the disk is full."""

import gc
import logging
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_cases import save
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fluxjax.run.checkpoint import Checkpoints, ResumeError
from sharding.weights import like


def arrays_on(devices: int, spec: P):
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    sharding = NamedSharding(mesh, spec)
    params = {"w": jax.device_put(jnp.arange(64.0).reshape(16, 4), sharding)}
    return {"params": params, "opt": jax.jit(optax.adam(1e-3).init)(params)}


def test_round_trip_is_exact_and_survives_donation(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    arrays = arrays_on(4, P("d"))
    expected = jax.tree.map(np.asarray, arrays)
    assert save(checkpoints, 3, arrays, {"version": 3, "data": {"position": [1, 2]}})
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 7, tree), donate_argnums=0)
    arrays = overwrite(arrays)
    assert checkpoints.wait()
    step, restored, state = checkpoints.restore(like(arrays))
    assert step == 3 and state == {"version": 3, "data": {"position": [1, 2]}}
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    assert restored["params"]["w"].sharding == arrays["params"]["w"].sharding
    checkpoints.close()


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_restores_onto_another_mesh(tmp_path, devices):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    arrays = arrays_on(4, P("d"))
    save(checkpoints, 1, arrays, {})
    target = arrays_on(devices, P(None, "d") if devices < 8 else P("d"))
    _, restored, _ = checkpoints.restore(like(target))
    np.testing.assert_array_equal(restored["params"]["w"], arrays["params"]["w"])
    assert restored["params"]["w"].sharding == target["params"]["w"].sharding
    checkpoints.close()


def test_errors_name_the_folder(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    with pytest.raises(ResumeError, match=f"no checkpoint in {tmp_path / 'c'}"):
        checkpoints.restore({})
    save(checkpoints, 1, arrays_on(1, P()), {})
    other = {**arrays_on(1, P()), "params": {**arrays_on(1, P())["params"], "v": jnp.zeros(3)}}
    with pytest.raises(
        ResumeError, match=r"c/1 does not fit.*params\.v has the shape none in the checkpoint, but \(3,\)"
    ):
        checkpoints.restore(like(other))
    checkpoints.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ResumeError, match="cannot create"):
        Checkpoints(tmp_path / "file" / "c", keep=1)


def limit(disk: pathlib.Path, files: int) -> None:
    subprocess.run(["mount", "-o", f"remount,nr_inodes={files}", str(disk)], check=True)


# Orbax leaves tasks behind in an event loop that it closed; they complain when they are collected.
@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("noticed", ["before", "while writing"])
def test_full_disk_loses_nothing_and_says_so(noticed, small_disk, caplog):
    checkpoints = Checkpoints(small_disk / "c", keep=3)
    good = {"w": jnp.arange(1000.0)}
    assert save(checkpoints, 1, good, {"step": 1}) and checkpoints.wait()
    noise = jax.random.normal(jax.random.key(0), (1000 if noticed == "while writing" else 2_000_000,))
    if noticed == "while writing":  # bytes are left, but no more files can be made
        limit(small_disk, os.statvfs(small_disk).f_files - os.statvfs(small_disk).f_ffree + 4)
    with caplog.at_level(logging.ERROR):
        assert not (save(checkpoints, 2, {"w": noise}, {"step": 2}) and checkpoints.wait())
    limit(small_disk, 1000)
    assert checkpoints.failed and "disk is full" in caplog.text and "newest good one is step 1" in caplog.text
    step, restored, state = checkpoints.restore(like(good))
    assert step == 1 and state == {"step": 1}
    np.testing.assert_array_equal(restored["w"], good["w"])
    assert save(checkpoints, 3, good, {"step": 3}) and checkpoints.wait()
    assert checkpoints.undamaged() == 3
    checkpoints.close()
    del checkpoints
    gc.collect()  # here, where it is forgiven
