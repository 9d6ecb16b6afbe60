"""Weights that a host pulls belong to its user alone, and take no more memory than their tensors."""

from __future__ import annotations

import os
import pathlib
import tracemalloc

import numpy as np
import pytest
import zstandard
from safetensors.numpy import save_file

from rollout.weights import version_folders
from rollout.weights.version_folders import FILE, SOURCE, Delta, DeltaError, PullError, checksum, pull, pulled

VERSION = "weight_v000000"


def frames() -> list[bytes]:
    """A frame that declares a terabyte, one that does not say that it has 16 MiB, and one of fewer bytes."""
    declared = b"\x28\xb5\x2f\xfd\xc0\x00" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
    stream = zstandard.ZstdCompressor().compressobj()
    return [declared, stream.compress(bytes(1 << 24)) + stream.flush(), zstandard.compress(bytes(3))]


def test_a_delta_takes_no_more_memory_than_its_tensor(tmp_path: pathlib.Path) -> None:
    tensor = np.zeros(9, np.uint8)
    for words in frames():
        save_file({"t": np.frombuffer(words, np.uint8)}, tmp_path / FILE, {"t": checksum(tensor)})
        tracemalloc.start()
        try:
            with pytest.raises(DeltaError, match="t: the delta does not have 9 bytes"):
                Delta(tmp_path, 0).apply("t", tensor)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "source" / VERSION).mkdir(parents=True)
    return tmp_path / "source"


def there(local: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    """Makes the folder in which a host has the version already."""
    (pulled(local, source) / VERSION).mkdir(parents=True)
    return pulled(local, source)


def test_what_a_host_has_is_for_its_user_only(tmp_path: pathlib.Path, source: pathlib.Path) -> None:
    place = there(tmp_path / "local", source)
    place.chmod(0o777)
    assert pull(tmp_path / "local", source, 0) == place / VERSION
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("linked", ["local", "place"])
def test_a_link_of_somebody_else_is_not_followed(tmp_path: pathlib.Path, source: pathlib.Path, linked: str) -> None:
    elsewhere, local = tmp_path / "elsewhere", tmp_path / "local"
    (there(elsewhere, source) / "part-of somebody").mkdir()
    if linked == "local":
        local.symlink_to(elsewhere)
    else:
        local.mkdir()
        pulled(local, source).symlink_to(pulled(elsewhere, source))
    with pytest.raises(PullError, match=r"local.*: it is a link or a file.*remove it"):
        pull(local, source, 0)
    assert (pulled(elsewhere, source) / "part-of somebody").exists()


def test_a_folder_of_somebody_else_is_left_alone(
    tmp_path: pathlib.Path, source: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    place, theirs = there(local, source), there(local, tmp_path / "theirs")
    (theirs / SOURCE).write_text("/gone")
    stranger, real = os.geteuid() + 1, version_folders._not_of
    monkeypatch.setattr(
        version_folders, "_not_of", lambda owners, folder: "theirs" if folder == theirs else real(owners, folder)
    )
    pull(local, source, 0)
    assert theirs.exists()  # although its run has ended
    monkeypatch.setattr(version_folders.os, "geteuid", lambda: stranger)
    with pytest.raises(PullError, match="it belongs to user"):
        pull(local, source, 0)
    assert (place / VERSION).exists()
