"""How a weight of ours is called and laid out on disk in a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class TensorName:
    """One weight. `name` has `{}` for the layer number if the weight is stacked over layers.

    Ours has its input axes first (`[in..., out...]`), a torch linear layer has `[out, in]`: on disk stands the
    transpose, flattened to `disk_shape`. Only the layout differs, so the way there and back keeps every bit.
    """

    name: str
    path: tuple[str, ...]  # in the nested parameter dict
    shape: tuple[int, ...]  # ours, of one layer
    inputs: int = 0  # how many of ours are input axes; 0 for tables and vectors
    disk_shape: tuple[int, ...] = ()  # () derives it: [out, in] or flat

    def __post_init__(self) -> None:
        if not self.disk_shape:
            split = (math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs]))
            object.__setattr__(self, "disk_shape", split if self.inputs else (split[0],))

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    def to_disk(self, ours: np.ndarray) -> np.ndarray:
        """One layer's weight as the checkpoint has it; contiguous."""
        order = (*range(self.inputs, ours.ndim), *range(self.inputs))
        return np.ascontiguousarray(ours.transpose(order).reshape(self.disk_shape))

    def from_disk(self, disk: np.ndarray) -> np.ndarray:
        """A view of the checkpoint's tensor in our layout."""
        outputs = len(self.shape) - self.inputs
        order = (*range(outputs, len(self.shape)), *range(outputs))
        return disk.reshape(*self.shape[self.inputs :], *self.shape[: self.inputs]).transpose(order)


def linear(prefix: str, path: tuple[str, ...], shape: tuple[int, ...], inputs: int = 1) -> TensorName:
    """The matrix of a torch `Linear`."""
    return TensorName(f"{prefix}.weight", path, shape, inputs)


def vector(name: str, path: tuple[str, ...], shape: tuple[int, ...]) -> TensorName:
    """A bias or a norm scale."""
    return TensorName(name, path, shape)


def table(name: str, path: tuple[str, ...], shape: tuple[int, int]) -> TensorName:
    """An embedding or an output head, `[V, D]` on both sides."""
    return TensorName(name, path, shape, disk_shape=shape)
