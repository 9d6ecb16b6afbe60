"""Deltas between two versions of the weights: bit for bit, in a layout that others read, never taken when damaged."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from models.hf import SINGLE, StoredTensor, write_weights
from rollout.weights.version_folders import Delta, DeltaError, folder_name, read_delta, tensors_of, write_delta

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = {"float32": (np.dtype(np.float32), np.uint32), "bfloat16": (BFLOAT16, np.uint16)}
SPECIAL = {
    "float32": [0x80000000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x00000001, 0x807FFFFF, 0x7F800000, 0],
    "bfloat16": [0x8000, 0x7FC0, 0x7F81, 0xFFC1, 0x0001, 0x807F, 0x7F80, 0],
}  # -0.0, NaNs of several kinds, denormals, infinity, 0.0
FILE, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"


def written(folder: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> pathlib.Path:
    """A checkpoint folder, without a configuration."""
    folder.mkdir()
    contents = [StoredTensor(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    write_weights(folder / SINGLE, contents, tensors.values())
    return folder / SINGLE


def delta_of(
    root: pathlib.Path, old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], base: int = 3, version: int = 7
) -> pathlib.Path:
    folder = root / folder_name(version)
    files = written(root / f"old{version}", old), written(root / f"new{version}", new)
    assert write_delta(folder, *files, base, version) == sum(file.stat().st_size for file in folder.iterdir())
    return folder


def some(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights of two dtypes, and a small step away from them."""
    rng = np.random.default_rng(seed)
    old = {
        "wide": rng.normal(size=(20, 30)).astype(np.float32),
        "narrow": rng.normal(size=(50,)).astype(BFLOAT16),
        "still": rng.normal(size=(40, 10)).astype(np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(3, np.float32),
    }
    new = {name: tensor.copy() for name, tensor in old.items()}
    new["wide"][3, :5] += 1
    new["narrow"][7] += 1
    new["scalar"][...] = 5
    return old, new


@pytest.mark.medium
@pytest.mark.parametrize("dtype", KINDS)
@given(data=st.data())
def test_any_words_come_back(dtype: str, data: st.DataObject) -> None:
    kind, word = KINDS[dtype]
    words = st.integers(0, np.iinfo(word).max) | st.sampled_from(SPECIAL[dtype])
    pairs = data.draw(st.lists(st.tuples(words, words), min_size=1, max_size=20))
    old, new = (np.array(side, word).view(kind) for side in zip(*pairs, strict=True))
    still = np.zeros(2000, kind)  # so that the delta is worth it
    with tempfile.TemporaryDirectory() as root:
        delta = read_delta(delta_of(pathlib.Path(root), {"t": old, "still": still}, {"t": new, "still": still}))
        assert delta is not None
        assert delta.apply("t", old).tobytes() == new.tobytes()
        assert delta.apply("t", old).dtype == kind
        assert delta.apply("still", still).tobytes() == still.tobytes()


def test_shapes_and_dtypes_come_back(tmp_path: pathlib.Path) -> None:
    old, new = some()
    delta = read_delta(delta_of(tmp_path, old, new))
    assert delta == Delta(tmp_path / "weight_v000007", 3)
    for name, tensor in new.items():
        after = delta.apply(name, old[name])
        assert (after.shape, after.dtype, after.tobytes()) == (tensor.shape, tensor.dtype, tensor.tobytes()), name


def test_the_layout_is_that_of_pull_weights(tmp_path: pathlib.Path) -> None:
    """Others read these folders: a change here is a change of the protocol."""
    old, new = some()
    folder = delta_of(tmp_path, old, new)
    assert folder.name == "weight_v000007"
    assert {file.name for file in folder.iterdir()} == {FILE, INDEX}
    assert json.loads((folder / INDEX).read_text()) == {
        "metadata": {
            "version": "000007",
            "base_version": "000003",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        },
        "weight_map": {"narrow": FILE, "scalar": FILE, "wide": FILE},  # what did not change is not there
    }
    with safe_open(folder / FILE, framework="numpy") as changes:
        sums = changes.metadata()
        assert set(changes.keys()) == {"narrow", "scalar", "wide"}
        assert sums.keys() == new.keys()
        assert sums["still"] == xxhash.xxh3_128_hexdigest(new["still"].tobytes())
        for name in changes.keys():  # noqa: SIM118 (not a dict)
            words = changes.get_tensor(name)
            assert words.dtype == np.uint8 and words.ndim == 1
            xor = zstandard.ZstdDecompressor().decompress(words.tobytes())
            after = bytes(a ^ b for a, b in zip(xor, old[name].tobytes(), strict=True))
            assert after == new[name].tobytes()
            assert sums[name] == xxhash.xxh3_128_hexdigest(after)


def test_nothing_changed(tmp_path: pathlib.Path) -> None:
    old, _ = some()
    delta = read_delta(delta_of(tmp_path, old, old))
    assert delta is not None
    for name, tensor in old.items():
        assert delta.apply(name, tensor) is tensor


def test_a_delta_that_is_not_smaller_is_not_written(tmp_path: pathlib.Path) -> None:
    old, new = ({"t": np.random.default_rng(seed).integers(0, 256, 4000, np.uint8).view("f4")} for seed in (0, 1))
    files = written(tmp_path / "old", old), written(tmp_path / "new", new)
    assert write_delta(tmp_path / "delta", *files, 0, 1) is None
    assert {file.name for file in tmp_path.iterdir()} == {"old", "new"}


def test_versions_of_other_tensors_have_no_delta(tmp_path: pathlib.Path) -> None:
    old, new = {"t": np.zeros(100, np.float32)}, {"t": np.zeros((10, 10), np.float32)}
    files = written(tmp_path / "old", old), written(tmp_path / "new", new)
    with pytest.raises(DeltaError, match=r"t is float32 of shape \(10, 10\)"):
        write_delta(tmp_path / "delta", *files, 0, 1)
    assert not (tmp_path / "delta").exists()


# --- damage ---------------------------------------------------------------------------------------


def fails(folder: pathlib.Path, old: Mapping[str, np.ndarray], complaint: str) -> None:
    """Applying it names the folder and the tensor."""
    delta = read_delta(folder)
    assert delta is not None
    with pytest.raises(DeltaError, match=complaint) as error:
        delta.apply("wide", old["wide"])
    assert str(folder) in str(error.value) and "wide" in str(error.value)


def test_another_base_is_seen(tmp_path: pathlib.Path) -> None:
    old, new = some()
    folder = delta_of(tmp_path, old, new)
    old["wide"].view(np.uint32)[-1, -1] ^= 1
    fails(folder, old, "not applied to version 3")


def test_every_changed_byte_is_seen(tmp_path: pathlib.Path) -> None:
    old, new = some()
    folder = delta_of(tmp_path, old, new)
    whole = (folder / FILE).read_bytes()
    with safe_open(folder / FILE, framework="numpy") as changes:
        words = changes.get_tensor("wide").tobytes()
    start, seen = whole.index(words), 0
    for place in range(start, start + len(words)):
        (folder / FILE).write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        delta = read_delta(folder)
        assert delta is not None
        try:
            after = delta.apply("wide", old["wide"])
        except DeltaError as error:
            seen += 1
            assert str(folder) in str(error) and "wide" in str(error)
        else:
            assert after.tobytes() == new["wide"].tobytes()  # a byte of the frame that says nothing
    assert seen > len(words) - 5


@pytest.mark.parametrize("count", [1, 2])
def test_a_name_that_is_damaged_leaves_no_tensor_as_it_was(tmp_path: pathlib.Path, count: int) -> None:
    """The name stands beside the words and beside the checksum: a bit of either is flipped, or of both."""
    old, new = some()
    folder = delta_of(tmp_path, old, new)
    whole = (folder / FILE).read_bytes()
    assert whole.count(b'"wide"') == 2
    for damaged in (whole.replace(b'"wide"', b'"vide"', count), whole.replace(b'"wide":{', b'"vide":{')):
        (folder / FILE).write_bytes(damaged)
        fails(folder, old, "checksum")


def test_a_base_that_is_damaged_is_seen_by_tensors_that_did_not_change_since(tmp_path: pathlib.Path) -> None:
    old, new = some()
    delta = read_delta(delta_of(tmp_path, old, new))
    assert delta is not None
    with pytest.raises(DeltaError, match="still has the checksum"):
        delta.apply("still", old["still"] + 1)


def cut(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize("damage", [cut, pathlib.Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_file_that_is_not_whole_is_seen(tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None]) -> None:
    old, new = some()
    folder = delta_of(tmp_path, old, new)
    damage(folder / FILE)
    fails(folder, old, str(folder))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"delta_encoding": "sub"}, '"delta_encoding": "sub"'),
        ({"compression_format": "lz4"}, "zstd"),
        ({"checksum_format": None}, "xxh3-128"),
        ({"base_version": "000007"}, "from version 7 to version 7"),  # whoever followed it would never end
        ({"base_version": "000009"}, "from version 9 to version 7"),
        ({"version": "000008"}, "to version 8"),
    ],
)
def test_deltas_of_another_kind_are_refused(tmp_path: pathlib.Path, changes: dict[str, object], complaint: str) -> None:
    folder = delta_of(tmp_path, *some())
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] |= changes
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(DeltaError, match=complaint) as error:
        read_delta(folder)
    assert str(folder) in str(error.value)


def test_a_checkpoint_that_is_damaged_is_named(tmp_path: pathlib.Path) -> None:
    file = written(tmp_path / "old", some()[0])
    cut(file)
    with pytest.raises(DeltaError, match="old"):
        list(tensors_of(tmp_path / "old"))
