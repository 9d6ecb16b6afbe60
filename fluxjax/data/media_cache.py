"""Slices of decoded media, and a cache of bounded size. With slices, a long video need not be in memory completely."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np

from models.processing.media_file import Medium

SLICE_BYTES = 16 << 20  # bytes of uint8 patches
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of a medium. A slice has `pairs` consecutive frame pairs; the last slice may have fewer."""

    medium: Medium
    pairs: int  # frame pairs of a slice

    @classmethod
    def of(cls, medium: Medium, patch_bytes: int, slice_bytes: int) -> Slices:
        """Cuts a medium into slices of at most `slice_bytes`, or of one frame pair if a pair is larger."""
        _, rows, columns = medium.grid
        return cls(medium, max(1, slice_bytes // (rows * columns * patch_bytes)))

    @property
    def patches(self) -> int:
        """The number of patches of a slice, except for a shorter last slice."""
        return self.pairs * self.medium.grid[1] * self.medium.grid[2]

    def __len__(self) -> int:
        return -(-self.medium.grid[0] // self.pairs)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Returns the frame pairs (start, stop) of the slices `first .. last - 1`."""
        return first * self.pairs, min(last * self.pairs, self.medium.grid[0])

    def cut(self, patches: np.ndarray) -> Iterator[np.ndarray]:
        """Cuts the `patches` of consecutive slices, and yields the patches of each slice."""
        for start in range(0, len(patches), self.patches):
            yield patches[start : start + self.patches]


class Recent(Generic[Value]):
    """A cache of values by key. The sizes of values, by default 1 each, add up to at most `limit`. The least recently
    used values are dropped first. With `keep_last`, the newest value always stays. Thread-safe."""

    def __init__(self, limit: int, size: Callable[[Value], int] = lambda value: 1, *, keep_last: bool = False) -> None:
        self.used = 0
        self._limit, self._size, self._least = limit, size, int(keep_last)
        self._values: collections.OrderedDict[Hashable, Value] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        with self._lock:
            self._drop(key)
            self._values[key] = value
            self.used += self._size(value)
            while self.used > self._limit and len(self._values) > self._least:
                _, forgotten = self._values.popitem(last=False)
                self.used -= self._size(forgotten)

    def drop(self, key: Hashable) -> None:
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.used = 0

    def _drop(self, key: Hashable) -> None:
        if key in self._values:
            self.used -= self._size(self._values.pop(key))
