"""Flattened buckets of tensors without PyTorch: they come back bit for bit, PyTorch reads and writes the same, and
nothing that is foreign is run."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import sys
import tracemalloc
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollout.weights import torch_bucket
from rollout.weights.torch_bucket import DTYPES, METADATA, BucketError, _text, read_bucket, write_bucket

REASON = "parity lane: needs torch"


def drawn(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Any bits: NaN, denormals and infinities, too."""
    kind = DTYPES[dtype]
    return np.random.default_rng(seed).integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)


def same(tensor: np.ndarray, right: np.ndarray) -> None:
    assert (tensor.dtype, tensor.shape) == (right.dtype, right.shape)
    assert tensor.tobytes() == right.tobytes()


SHAPES = [(3,), (), (5, 7), (0,), (2, 0, 3), (1,), (300,), (2, 3, 5, 7)]
MIXED = [
    (f"{dtype} {number}", drawn(shape, dtype, number))
    for number, shape in enumerate(SHAPES)
    for dtype in ("bfloat16", "float32", "float16")
]


@given(
    st.lists(
        st.tuples(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5), st.sampled_from(sorted(DTYPES))),
        max_size=6,
    ),
    st.lists(st.text(), min_size=6, max_size=6, unique=True),
)
def test_any_bucket_comes_back(sizes: list[tuple[tuple[int, ...], str]], names: list[str]) -> None:
    tensors = [(name, drawn(*size, seed)) for seed, (name, size) in enumerate(zip(names, sizes, strict=False))]
    read = read_bucket(write_bucket(tensors))
    assert read.keys() == dict(tensors).keys()
    for name, tensor in tensors:
        same(read[name], tensor)


def test_tensors_that_are_not_contiguous_are_written_in_their_order() -> None:
    tensor = drawn((4, 6), "float32", 0).T
    same(read_bucket(write_bucket([("t", tensor)]))["t"], tensor)


def test_a_dtype_that_it_cannot_say_is_refused() -> None:
    with pytest.raises(KeyError, match="float64"):
        write_bucket([("t", np.zeros(3))])


# --- bytes from elsewhere -------------------------------------------------------------------------


class Intruder:
    """What unpickles to a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def foreign(target: pathlib.Path) -> list[Any]:
    order = f"touch {target}"
    return [
        Intruder(os.system, order),
        {"flattened_tensor": Intruder(os.system, order), "metadata": []},
        {"flattened_tensor": np.zeros(3), "metadata": []},
        Intruder(eval, f"open({str(target)!r}, 'w')"),
        Intruder(pathlib.Path.touch, target),
    ]


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickles_with_other_names_run_nothing(tmp_path: pathlib.Path, protocol: int) -> None:
    target = tmp_path / "touched"
    for content in foreign(target):
        with pytest.raises(BucketError, match="which no bucket of tensors needs"):
            read_bucket(pickle.dumps(content, protocol))
    assert not target.exists()
    pickle.loads(pickle.dumps(foreign(target)[0], protocol))  # it would have
    assert target.exists()


def test_a_foreign_name_within_the_storage_runs_nothing(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "touched"
    whole = write_bucket([("t", np.zeros(3, np.float32))])
    intruder = pickle.dumps(Intruder(os.system, f"touch {target}"), 2)
    magic = whole.index(b"\x80\x02\x8a")  # where the pickles of the storage begin
    length = whole.rindex(b"\x8e", 0, magic) + 1
    storage = intruder + whole[magic:][: int.from_bytes(whole[length:magic], "little")]
    size = len(storage).to_bytes(8, "little")
    end = magic + int.from_bytes(whole[length:magic], "little")
    with pytest.raises(BucketError, match=r"system"):
        read_bucket(whole[:length] + size + storage + whole[end:])
    assert not target.exists()


@pytest.mark.parametrize(
    "content", [3, None, [], {}, {"flattened_tensor": b"abc"}, {"flattened_tensor": b"abc", "metadata": [3]}], ids=repr
)
def test_pickles_of_something_else_are_refused(content: Any) -> None:
    with pytest.raises(BucketError, match="not a flattened bucket"):
        read_bucket(pickle.dumps(content))


def test_part_of_a_bucket_is_refused() -> None:
    whole = write_bucket([("a", drawn((3,), "float32", 0)), ("b", drawn((2, 2), "bfloat16", 1))])
    for end in range(len(whole)):
        with pytest.raises(BucketError):
            read_bucket(whole[:end])


@given(st.binary(max_size=64))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BucketError):
        read_bucket(data)


# Pickles of a few bytes that Python's unpickler would take: orders to a live object, and an index of the memo.
LIVE = [
    b"ctorch\nbfloat16\n(K\x03X\x01\x00\x00\x00>NNNK\x01K\x08K\x00tb.",
    b"c%s\n%s\nN}X\x05\x00\x00\x00shapeK\x03s\x86b." % tuple(word.encode() for word in METADATA),
    b"ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__K\x03\x85s\x86b.",
]
MEMO = b"\x80\x04]r\xff\xff\xff\x03."
# A tuple of the tuple before it twice, forty times: whoever shows, compares or hashes it never ends.
ENDLESS = b"K\x01" + b"".join(b"q\x00h\x00\x86" for _ in range(40))
FIELDS = ("name", "shape", "dtype", "start_idx", "end_idx")


def replaced(field: str, value: bytes) -> bytes:
    """A bucket of one tensor, of whose metadata a field is another value."""
    whole = write_bucket([("t", np.zeros(3, np.float32))])
    return whole[:-3] + _text(field) + value + b"s" + whole[-3:]  # the last entry of a key counts


@pytest.mark.parametrize("data", LIVE)
def test_a_bucket_that_is_refused_changes_nothing(data: bytes) -> None:
    before = vars(torch_bucket._Metadata).copy(), torch_bucket._rebuilt.__defaults__
    for whole in (b"\x80\x04" + data, replaced("x", data[:-1])):
        with pytest.raises(BucketError, match="in the place of _Metadata"):
            read_bucket(whole)
    assert (vars(torch_bucket._Metadata), torch_bucket._rebuilt.__defaults__) == before
    assert DTYPES["bfloat16"] == np.dtype(ml_dtypes.bfloat16) and DTYPES["bfloat16"].itemsize == 2


@pytest.mark.parametrize(
    "data",
    [MEMO, b"\x80\x04\x96" + b"\xff" * 5 + b"\x00" * 3 + b".", b"\x80\x04}" + ENDLESS + b"K\x01s."]
    + [replaced(field, ENDLESS) for field in FIELDS],
)
def test_a_bucket_takes_no_more_than_it_has(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BucketError):
            read_bucket(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- PyTorch --------------------------------------------------------------------------------------


@dataclasses.dataclass
class FlattenedTensorMetadata:
    """As SGLang has it."""

    name: str
    shape: Any
    dtype: Any
    start_idx: int
    end_idx: int
    numel: int


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch, and a module that stands in for SGLang's."""
    torch = pytest.importorskip("torch", reason=REASON)
    module, name = METADATA
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    monkeypatch.setattr(FlattenedTensorMetadata, "__module__", module)
    setattr(sys.modules[module], name, FlattenedTensorMetadata)
    return torch


def test_pytorch_reads_what_we_write(torch: Any) -> None:
    bucket = pickle.loads(write_bucket(MIXED))
    flat, right = bucket["flattened_tensor"], dict(MIXED)
    assert (flat.dtype, flat.dim(), flat.requires_grad) == (torch.uint8, 1, False)
    assert [part.name for part in bucket["metadata"]] == sorted(right, key=lambda name: -right[name].itemsize)
    for part in bucket["metadata"]:
        assert type(part) is FlattenedTensorMetadata and type(part.shape) is torch.Size
        assert part.numel == part.end_idx - part.start_idx
        tensor = flat[part.start_idx : part.end_idx].view(part.dtype).reshape(part.shape)  # as SGLang does
        assert str(tensor.dtype) == f"torch.{right[part.name].dtype.name}"
        assert tuple(tensor.shape) == right[part.name].shape
        assert tensor.flatten().view(torch.uint8).numpy().tobytes() == right[part.name].tobytes()


@pytest.mark.parametrize("protocol", [4, 5])
def test_we_read_what_pytorch_writes(torch: Any, protocol: int) -> None:
    tensors, start = sorted(MIXED, key=lambda entry: -entry[1].itemsize), 0
    flat = torch.frombuffer(bytearray(b"".join(tensor.tobytes() for _, tensor in tensors)), dtype=torch.uint8)
    metadata = []
    for name, tensor in tensors:
        end = start + tensor.nbytes
        dtype = getattr(torch, tensor.dtype.name)
        metadata.append(FlattenedTensorMetadata(name, torch.Size(tensor.shape), dtype, start, end, end - start))
        start = end
    read = read_bucket(pickle.dumps({"flattened_tensor": flat, "metadata": metadata}, protocol))
    assert list(read) == [name for name, _ in tensors]
    for name, tensor in MIXED:
        same(read[name], tensor)


def test_a_tensor_of_pytorch_that_is_not_flat_is_refused(torch: Any) -> None:
    for tensor in (torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8)[::2]):
        with pytest.raises(BucketError, match="with strides"):
            read_bucket(pickle.dumps({"flattened_tensor": tensor, "metadata": []}))
