"""Versions on a shared file system: what is written there, and what a host makes of it, whatever is damaged or dies."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from forked import forked
from protocol_cases import ROOT, model
from safetensors.numpy import load_file

import models
from models.config import NameLayout
from models.hf import SINGLE
from rollout.weights import published as published_module
from rollout.weights import version_folders
from rollout.weights.published import Published, SharedFolders
from rollout.weights.version_folders import KEPT, DeltaError, PullError, VersionFolders, _machine, pull, read_delta

FILE = "model-00001-of-00001.safetensors"


def stepped(params: Any, seed: int, share: float = 0.01) -> Any:
    """Weights a small step away: of each tensor, a share of its values and at least one are others."""
    rng = np.random.default_rng(seed)

    def step(weight: Any) -> Any:
        values = np.array(weight).reshape(-1)
        chosen = rng.integers(0, len(values), max(int(share * len(values)), 1))
        values[chosen] += 1
        return jax.numpy.asarray(values.reshape(weight.shape))

    return jax.tree.map(step, params)


@dataclasses.dataclass
class Trainer:
    """Publishes versions of a model as a fleet does."""

    memory: SharedFolders
    folders: VersionFolders
    params: Any

    def publish(self, version: int, share: float = 0.01) -> Published:
        self.params = stepped(self.params, version, share)
        written = self.memory.write(version, self.params)
        self.folders.publish(written)
        return written

    def keep(self, *wanted: Published) -> None:
        self.folders.keep(wanted)

    @property
    def source(self) -> pathlib.Path:
        return self.folders.source

    def version(self, number: int) -> pathlib.Path:
        return self.source / f"weight_v{number:06d}"


@pytest.fixture
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(published_module, "SHARED_MEMORY", tmp_path / "memory")
    return tmp_path


@pytest.fixture
def trainer(root: pathlib.Path) -> Trainer:
    return trainer_of(root)


def trainer_of(root: pathlib.Path, dtype: str = "bfloat16", **how: Any) -> Trainer:
    whole = model("text")
    folders = VersionFolders(root / "shared", **how)
    return Trainer(SharedFolders(whole.config, dtype), folders, models.split(whole)[1])


def names(folder: pathlib.Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def state(local: pathlib.Path) -> dict[str, bytes]:
    """All files of a host but the notes of `pull` itself."""
    return {str(file.relative_to(local)): file.read_bytes() for file in local.rglob("model*") if file.is_file()}


def same(pulled: pathlib.Path, written: Published) -> None:
    for name in (SINGLE, "config.json"):
        assert (pulled / name).read_bytes() == (written.folder / name).read_bytes(), name


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_whole_version_then_deltas(root: pathlib.Path, trainer: Trainer) -> None:
    written = [trainer.publish(version) for version in (0, 1, 4)]
    assert names(trainer.source) == {"weight_v000000", "weight_v000001", "weight_v000004"}
    assert names(trainer.version(0)) == {"params", "config.json", "checksums.json", "model.safetensors.index.json"}
    for number, base in ((1, 0), (4, 1)):  # an update in between may have failed, or was not for servers
        assert names(trainer.version(number)) == {FILE, "model.safetensors.index.json"}
        delta = read_delta(trainer.version(number))
        assert delta is not None and delta.base == base
        assert (trainer.version(number) / FILE).stat().st_size < written[-1].bytes / 2
    before = trainer.version(4).stat().st_mtime_ns
    trainer.folders.publish(written[-1])  # again
    assert trainer.version(4).stat().st_mtime_ns == before
    trainer.folders.close()
    assert not list((root / "shared").iterdir())


@pytest.mark.parametrize("how", [{"delta": False}, {}])
def test_whole_versions_where_deltas_are_off_or_too_large(root: pathlib.Path, how: dict[str, Any]) -> None:
    trainer = trainer_of(root, **how)
    trainer.publish(0)
    rng = np.random.default_rng(1)

    def noise(weight: Any) -> Any:
        signs, exponents = rng.choice([-1.0, 1.0], weight.shape), rng.uniform(-120, 120, weight.shape)
        return jax.numpy.asarray((signs * 2.0**exponents).astype(np.float32))

    trainer.params = jax.tree.map(noise, trainer.params)
    written = trainer.publish(1)
    assert "params" in names(trainer.version(1)) and names(trainer.source) == {"weight_v000000", "weight_v000001"}
    same(pull(root / "local", trainer.source, 1), written)


@pytest.mark.medium
def test_an_older_version_begins_a_new_source(root: pathlib.Path, trainer: Trainer) -> None:
    """A run went back to a checkpoint: these are other weights under numbers that hosts have already."""
    for version in (5, 6):
        trainer.publish(version)
    pull(root / "local", before := trainer.source, 6)
    again = trainer.publish(6)
    assert trainer.source != before and not before.exists()
    assert "params" in names(trainer.version(6))
    same(pull(root / "local", trainer.source, 6), again)
    last = trainer.publish(7)
    same(pull(root / "local", trainer.source, 7), last)


@pytest.mark.medium
def test_versions_that_nobody_wants_go_and_those_that_others_build_on_stay(
    root: pathlib.Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_folders, "FULL_EVERY", 2)
    written = [trainer.publish(version) for version in range(6)]
    whole = [version for version in range(6) if "params" in names(trainer.version(version))]
    assert whole == [0, 3], "a host that comes late applies a limited number of deltas"

    def there() -> set[int]:
        return {int(name.removeprefix("weight_v")) for name in names(trainer.source)}

    trainer.keep(written[1], written[5])
    assert there() == {0, 1, 3, 4, 5}
    trainer.keep(written[4])
    assert there() == {3, 4, 5}
    trainer.keep()
    assert there() == {3, 4, 5}  # the next delta is of the last one
    same(pull(root / "local", trainer.source, 5), written[5])


def test_what_killed_runs_left_is_removed(root: pathlib.Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    host, end = _machine(), "0123abcd"
    folders = {
        name: root / "shared" / name
        for name in (
            f"fluxjax-{host}-{child.pid}-{end}",
            f"fluxjax-{host}-{os.getpid()}-{end}",
            f"fluxjax-other{host}-{child.pid}-{end}",
            f"fluxjax-{host}-{child.pid}-{os.getpid()}-{end}",  # of a host whose name begins as ours
            "data",
        )
    }
    for folder in folders.values():
        folder.mkdir(parents=True)
    VersionFolders(root / "shared").close()
    dead, *living = folders.values()
    assert not dead.exists() and all(folder.exists() for folder in living)


def test_what_orbax_makes_of_a_full_disk_is_an_os_error(
    root: pathlib.Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error is raised here: after a real one, parts of it are left that warn whenever they are collected."""
    new = trainer.memory.write(0, trainer.params)

    def full_disk(*_: Any) -> None:
        raise ValueError("OUT_OF_RANGE: Failed to write 34293 bytes: No space left on device [os_error_code='28']")

    with monkeypatch.context() as patched:
        patched.setattr(version_folders.ocp.PyTreeCheckpointer, "save", full_disk)
        with pytest.raises(OSError, match=r"weight_v000000.*No space left"):
            trainer.folders.publish(new)
    assert not list(trainer.source.iterdir())
    trainer.folders.publish(new)
    same(pull(root / "local", trainer.source, 0), new)


def test_a_full_shared_folder_leaves_the_versions_that_are_there(root: pathlib.Path, trainer: Trainer) -> None:
    """The file system refuses to grow."""
    written = trainer.publish(0)
    after = stepped(trainer.params, 1)
    new = trainer.memory.write(1, after)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match="weight_v000001"):
            trainer.folders.publish(new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(trainer.source) == {"weight_v000000"}
    same(pull(root / "local", trainer.source, 0), written)
    trainer.folders.publish(new)  # there is room again
    same(pull(root / "local", trainer.source, 1), new)


# --- what a host has of it ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_host_gets_the_same_bits_from_wherever_it_begins(root: pathlib.Path, dtype: str) -> None:
    trainer, local = trainer_of(root, dtype), root / "local"
    written = {version: trainer.publish(version) for version in (0, 1, 4, 5, 9)}
    same(pull(local, trainer.source, 0), written[0])  # whole
    same(pull(local, trainer.source, 5), written[5])  # three deltas
    same(pull(local, trainer.source, 9), written[9])
    again = pull(local, trainer.source, 9)
    same(again, written[9])
    assert models.load(again).config.text == model("text").config.text
    assert {tensor.dtype.name for tensor in load_file(again / SINGLE).values()} == {dtype}
    for version in (9, 1, 4):  # hosts that have nothing
        same(pull(root / f"host {version}", trainer.source, version), written[version])
    shutil.rmtree(local)
    same(pull(local, trainer.source, 4), written[4])
    same(pull(local, trainer.source, 1), written[1])  # what is newer is no way there


def test_a_host_that_has_the_last_version_needs_the_delta_only(root: pathlib.Path, trainer: Trainer) -> None:
    trainer.publish(0)
    trainer.publish(1)
    pull(root / "local", trainer.source, 1)
    written = trainer.publish(2)
    for old in (0, 1):
        shutil.rmtree(trainer.version(old))
    same(pull(root / "local", trainer.source, 2), written)


@pytest.mark.medium
def test_a_host_keeps_two_versions_and_nothing_of_runs_that_ended(root: pathlib.Path, trainer: Trainer) -> None:
    local, other = root / "local", trainer_of(root / "other")
    (local / "not ours").mkdir(parents=True)
    written = {version: trainer.publish(version) for version in range(4)}
    folders = [pull(local, trainer.source, version) for version in range(4)]
    assert [folder.exists() for folder in folders] == [False, False, True, True] and KEPT == 2
    theirs = pull(local, other.source, other.publish(0).version)  # a run with another shared folder
    same(pull(local, trainer.source, 3), written[3])
    assert theirs.exists() and folders[2].exists()
    other.folders.close()
    pull(local, trainer.source, 3)
    assert not theirs.exists() and folders[3].exists() and (local / "not ours").exists()


@pytest.mark.medium
def test_vl_names_are_those_that_sglang_reads(root: pathlib.Path) -> None:
    whole = model("vl")
    nested = dataclasses.replace(whole.config, names=NameLayout.NESTED)
    folders, memory = VersionFolders(root / "shared"), SharedFolders(nested, "bfloat16")
    params = models.split(whole)[1]
    for version in range(2):
        params = stepped(params, version)
        written = memory.write(version, params)
        folders.publish(written)
        same(pull(root / "local", folders.source, version), written)
    pulled = pull(root / "local", folders.source, 1)
    found = load_file(pulled / SINGLE).keys()
    assert "model.layers.0.self_attn.q_proj.weight" in found
    assert {name.partition(".")[0] for name in found} == {"model", "visual", "lm_head"}
    config = models.load(pulled).config
    assert config.vision and config.names is NameLayout.FLAT


# --- damage, kills, races -------------------------------------------------------------------------


def changed_byte(file: pathlib.Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def cut(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("version", "damage"), [(0, changed_byte), (0, pathlib.Path.unlink), (2, cut), (2, changed_byte)]
)
def test_a_damaged_version_is_not_taken(
    root: pathlib.Path, trainer: Trainer, version: int, damage: Callable[[pathlib.Path], None]
) -> None:
    """Version 0 is whole, 2 a delta."""
    for number in range(3):
        trainer.publish(number)
    local = root / "local"
    if version:
        pull(local, trainer.source, 1)
    before, file = state(local), largest(trainer.version(version) / ("" if version else "params"))
    kept = file.read_bytes()
    damage(file)
    with pytest.raises((DeltaError, PullError), match=f"weight_v{version:06d}"):
        pull(local, trainer.source, version)
    assert state(local) == before
    assert not list(local.rglob("part-*")) and not list(local.rglob(f"weight_v{version:06d}"))
    file.write_bytes(kept)  # a file system that recovers
    pull(local, trainer.source, version)


def test_a_damaged_tensor_is_named(root: pathlib.Path, trainer: Trainer) -> None:
    trainer.publish(0)
    sums = trainer.version(0) / "checksums.json"
    content = json.loads(sums.read_text())
    name = sorted(content)[3]
    sums.write_text(json.dumps(content | {name: "0" * 32}))
    with pytest.raises(DeltaError, match=rf"weight_v000000: {name} has the checksum"):
        pull(root / "local", trainer.source, 0)


def test_a_damaged_configuration_is_not_taken(root: pathlib.Path, trainer: Trainer) -> None:
    """A host would hand it out as long as it has the version."""
    written = trainer.publish(0)
    config = trainer.version(0) / "config.json"
    changed_byte(config)
    with pytest.raises(DeltaError, match=r"weight_v000000: config.json has the checksum"):
        pull(root / "local", trainer.source, 0)
    shutil.copy(written.folder / "config.json", config)
    same(pull(root / "local", trainer.source, 0), written)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: cut(folder / SINGLE),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: changed_byte(folder / "config.json"),
    ],
)
def test_a_checkpoint_of_the_host_that_is_damaged_is_no_base(
    root: pathlib.Path, trainer: Trainer, damage: Callable[[pathlib.Path], None]
) -> None:
    """The whole chain is pulled instead."""
    trainer.publish(0)
    folder = pull(root / "local", trainer.source, 0)
    written = trainer.publish(1)
    damage(folder)
    same(pull(root / "local", trainer.source, 1), written)


def test_deltas_in_another_order_are_not_taken(root: pathlib.Path, trainer: Trainer) -> None:
    """XOR does not mind the order: the checksum in between does."""
    for number in range(3):
        trainer.publish(number)
    claims = {1: ("000002", "000001"), 2: ("000001", "000000")}  # each has the place of the other
    for number, (version, base) in claims.items():
        index = trainer.version(number) / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["metadata"] |= {"version": version, "base_version": base}
        index.write_text(json.dumps(content))
    trainer.version(1).rename(aside := trainer.source / "aside")
    trainer.version(2).rename(trainer.version(1))
    aside.rename(trainer.version(2))
    with pytest.raises(DeltaError, match="weight_v000001"):
        pull(root / "local", trainer.source, 2)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_base_that_is_missing_is_named(root: pathlib.Path, trainer: Trainer, gone: int) -> None:
    for number in range(3):
        trainer.publish(number)
    shutil.rmtree(trainer.version(gone))
    with pytest.raises(PullError, match=rf"weight_v00000{gone}: no such version; there are \["):
        pull(root / "local", trainer.source, 2)
    with pytest.raises(PullError, match="weight_v000007: no such version"):
        pull(root / "local", trainer.source, 7)
    with pytest.raises(PullError, match="none"):
        pull(root / "local", root / "no such", 7)
    for source in ("/", "..", "/a/.."):
        with pytest.raises(PullError, match="no such version"):
            pull(root / "local", pathlib.Path(source), 0)
    assert not list((root / "local").rglob("*weight_v*"))


def test_a_host_without_room_keeps_what_it_has(
    root: pathlib.Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = root / "local"
    trainer.publish(0)
    pull(local, trainer.source, 0)
    before, written = state(local), trainer.publish(1)
    with monkeypatch.context() as patched:
        usage = collections.namedtuple("usage", "total used free")(1 << 30, (1 << 30) - 1000, 1000)
        patched.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(OSError, match=r"local/.*weight_v000001: .* MiB are needed"):
            pull(local, trainer.source, 1)
    assert state(local) == before
    same(pull(local, trainer.source, 1), written)


def test_hosts_servers_may_ask_at_once(root: pathlib.Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opens the lock for itself, as processes do. One makes the version; the others find it there."""
    trainer.publish(0)
    written = trainer.publish(1)
    made, make, found = [], version_folders._write, []

    def counted(*arguments: Any) -> None:
        made.append(arguments)
        make(*arguments)

    monkeypatch.setattr(version_folders, "_write", counted)
    threads = [threading.Thread(target=lambda: found.append(pull(root / "local", trainer.source, 1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and len(made) == 1
    same(found[0], written)


PULL = """
import os, pathlib, signal, sys
from rollout.weights import version_folders
local, source, version = sys.argv[1:]
write = version_folders.write_weights

def killed(file, contents, values):
    half = len(contents) // 2
    write(file, contents[:half], values)
    os.kill(os.getpid(), signal.SIGKILL)

version_folders.write_weights = killed
version_folders.pull(pathlib.Path(local), pathlib.Path(source), int(version))
"""


@pytest.mark.slow
def test_a_pull_that_is_killed_leaves_nothing_that_is_taken_for_complete(root: pathlib.Path, trainer: Trainer) -> None:
    local = root / "local"
    written = [trainer.publish(version) for version in range(3)]
    folder = pull(local, trainer.source, 0)
    (program := root / "pull.py").write_text(PULL)
    command = [sys.executable, str(program), str(local), str(trainer.source), "1"]
    with forked(command, cwd=ROOT) as process:
        process.wait(timeout=120)
    assert process.returncode == -signal.SIGKILL
    (part,) = folder.parent.glob("part-*")
    assert (part / SINGLE).stat().st_size < written[1].bytes
    assert [there.name for there in folder.parent.glob("weight_v*")] == [folder.name]
    same(pull(local, trainer.source, 2), written[2])
    assert folder.exists() and not part.exists()
