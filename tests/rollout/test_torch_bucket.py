"""Flattened buckets of tensors without PyTorch: PyTorch reads them, bit for bit."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rollout.weights.torch_buckets import METADATA, write_bucket

REASON = "parity lane: needs torch"


def drawn(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Any bits: NaN, denormals and infinities, too."""
    kind = jnp.dtype(dtype)
    return np.random.default_rng(seed).integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)


SHAPES = [(3,), (), (5, 7), (0,), (2, 0, 3), (1,), (300,), (2, 3, 5, 7)]
MIXED = [
    (f"{dtype} {number}", drawn(shape, dtype, number))
    for number, shape in enumerate(SHAPES)
    for dtype in ("bfloat16", "float32", "float16")
]


def test_a_dtype_that_it_cannot_say_is_refused() -> None:
    with pytest.raises(KeyError, match="float64"):
        write_bucket([("t", np.zeros(3))])


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


def test_tensors_that_are_not_contiguous_are_written_in_their_order(torch: Any) -> None:
    tensor = drawn((4, 6), "float32", 0).T
    flat = pickle.loads(write_bucket([("t", tensor)]))["flattened_tensor"]
    assert flat.numpy().tobytes() == tensor.tobytes()
