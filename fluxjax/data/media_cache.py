"""Decoded media in memory of bounded size, and on disk what leaves it.

A medium is kept in slices, runs of its frame pairs, so that a long video need not be there as a whole. Slices are named
by the content of the file, not by its path: two files with the same content share them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Hashable, Iterator
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from models.processing.outline import Medium

from .spill import SpillFolder

SLICE_BYTES = 16 << 20  # of uint8 patches
SPILL_FROM = 64 << 10  # bytes; what is smaller is decoded again in the time that a file takes


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of a medium: each is a run of so many frame pairs, the last one of the rest."""

    medium: Medium
    pairs: int  # of a slice

    @classmethod
    def of(cls, medium: Medium, patch_bytes: int, slice_bytes: int) -> Slices:
        """Cuts a medium into slices of at most so many bytes, but for a single frame pair that has more."""
        _, rows, columns = medium.grid
        return cls(medium, max(1, slice_bytes // (rows * columns * patch_bytes)))

    @property
    def patches(self) -> int:
        """Patches of a slice."""
        return self.pairs * self.medium.grid[1] * self.medium.grid[2]

    def __len__(self) -> int:
        return -(-self.medium.grid[0] // self.pairs)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The frame pairs (start, stop) of the slices `first .. last - 1`."""
        return first * self.pairs, min(last * self.pairs, self.medium.grid[0])

    def cut(self, patches: np.ndarray) -> Iterator[np.ndarray]:
        """The patches of neighbouring slices, slice by slice."""
        for start in range(0, len(patches), self.patches):
            yield patches[start : start + self.patches]


Value = TypeVar("Value")
Key: TypeAlias = tuple[bytes, str, Medium, int]  # content, digest of the settings, medium, number of the slice


class MediaCache:
    """Arrays (uint8) by key: the arrays that were used least recently go to disk, or are forgotten. Thread-safe.

    An array that was handed out stays what it is for whoever holds it.
    """

    def __init__(self, limit: int, spill: SpillFolder | None) -> None:
        """Holds `limit` bytes in memory."""
        self.limit = limit
        self.spill = spill
        self.used = 0
        self.evictions = 0
        self._arrays: collections.OrderedDict[Hashable, np.ndarray] = collections.OrderedDict()
        self._leaving: dict[Hashable, np.ndarray] = {}  # being written to disk
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> np.ndarray | None:
        """Returns the array, from disk if need be, or None."""
        with self._lock:
            if (array := self._arrays.get(key)) is not None:
                self._arrays.move_to_end(key)
                return array
            if (array := self._leaving.get(key)) is not None:
                return array
        array = self.spill.read(key) if self.spill else None
        if array is not None:
            self.put(key, array)
        return array

    def put(self, key: Hashable, array: np.ndarray) -> np.ndarray:
        """Keeps an array, which nobody may write to any more, and returns it. A part of a larger one is copied: it
        would keep all of that in memory."""
        if isinstance(array.base, np.ndarray) and array.base.nbytes > array.nbytes:
            array = array.copy()
        array.setflags(write=False)
        leaving: list[tuple[Hashable, np.ndarray]] = []
        with self._lock:
            if (before := self._arrays.pop(key, None)) is not None:
                self.used -= before.nbytes
            self._arrays[key] = array
            self.used += array.nbytes
            while self.used > self.limit:
                oldest, evicted = self._arrays.popitem(last=False)
                self.used -= evicted.nbytes
                self.evictions += 1
                if self.spill and evicted.nbytes >= SPILL_FROM:
                    leaving.append((oldest, evicted))
                    self._leaving[oldest] = evicted
        for oldest, evicted in leaving:
            try:
                if self.spill:
                    self.spill.write(oldest, evicted)
            finally:
                with self._lock:
                    if self._leaving.get(oldest) is evicted:
                        del self._leaving[oldest]
        return array

    def close(self) -> None:
        """Forgets everything, and removes the folder on disk."""
        with self._lock:
            self._arrays.clear()
            self.used = 0
        if self.spill:
            self.spill.close()


class KeyedLocks:
    """A lock for each key that somebody holds, or waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Hashable, list] = {}  # the lock, and how many hold or want it

    @contextlib.contextmanager
    def holding(self, *keys: Hashable) -> Iterator[None]:
        """Holds the locks of all keys, taken in the order given, which must be the same for everybody."""
        with contextlib.ExitStack() as held:
            for key in keys:
                held.enter_context(self._one(key))
            yield

    @contextlib.contextmanager
    def _one(self, key: Hashable) -> Iterator[None]:
        with self._lock:
            entry = self._locks.setdefault(key, [threading.Lock(), 0])
            entry[1] += 1
        try:
            with entry[0]:
                yield
        finally:
            with self._lock:
                entry[1] -= 1
                if not entry[1]:
                    del self._locks[key]


class Recent(Generic[Value]):
    """Values by key, of which those that were used least recently are forgotten. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: collections.OrderedDict[Hashable, Value] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._limit:
                self._values.popitem(last=False)

    def drop(self, key: Hashable) -> None:
        with self._lock:
            self._values.pop(key, None)
