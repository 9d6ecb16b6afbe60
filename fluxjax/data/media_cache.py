"""Decoded media in memory of bounded size, and on disk what leaves it.

A medium is kept in slices, runs of its frame pairs, so that a long video need not be there as a whole. Slices are named
by the content of the file, not by its path: two files with the same content share them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from models.processing.media_file import Medium

from ..base.errors import DataError

log = logging.getLogger("fluxjax.data")
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


class Recent(Generic[Value]):
    """Values by key, of at most `limit` in all, by default their number: the values that were used least recently are
    forgotten. With `keep_last`, the last value stays, however large it is. Thread-safe."""

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

    def put(self, key: Hashable, value: Value) -> list[tuple[Hashable, Value]]:
        """Keeps a value; returns the keys and values that make room for it."""
        with self._lock:
            self._drop(key)
            self._values[key] = value
            self.used += self._size(value)
            forgotten: list[tuple[Hashable, Value]] = []
            while self.used > self._limit and len(self._values) > self._least:
                forgotten.append(self._values.popitem(last=False))
                self.used -= self._size(forgotten[-1][1])
            return forgotten

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


@dataclasses.dataclass
class _SpilledArray:
    begin: int  # bytes that were written, or left out, before it
    shape: tuple[int, ...]
    size: int  # bytes
    complete: bool = False


class SpillFile:
    """Arrays (uint8) by key on disk, of `limit` bytes at most: the arrays that were written first make room.

    The file has no name. So the system removes it when its process ends, however it does. It is written from front to
    end, and then from the front again. From any thread.
    """

    def __init__(self, folder: str, limit: int) -> None:
        """Makes the file in `folder`, or in the system's temporary one. Raises DataError where that can't be."""
        self.folder = folder or tempfile.gettempdir()
        self.limit = limit
        self.used = 0
        self._arrays: collections.OrderedDict[Hashable, _SpilledArray] = collections.OrderedDict()
        self._end = 0  # bytes that were written, or left out, so far
        self._lock = threading.Lock()  # of all that may change; not held while the file is read or written
        self._users, self._closed, self._warned = 0, False, False
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 (`close` closes it)
        except OSError as error:
            raise DataError(
                f"no file for decoded media can be made in {self.folder} (TMPDIR names another): {error.strerror}"
            ) from error

    def write(self, key: Hashable, array: np.ndarray) -> None:
        """Keeps the array, if there is room. A disk that is full, or fails, is logged once."""
        if (kept := self._reserve(key, array)) is None:
            return
        rest, place = np.ascontiguousarray(array).data.cast("B"), kept.begin % self.limit
        try:
            with self._descriptor() as file:
                while rest:
                    written = os.pwrite(file, rest, place)
                    rest, place = rest[written:], place + written
            kept.complete = True
        except OSError as error:
            self._warn(error)
        finally:
            with self._lock:
                if not kept.complete and self._arrays.get(key) is kept:
                    del self._arrays[key]
                    self.used -= kept.size

    def _reserve(self, key: Hashable, array: np.ndarray) -> _SpilledArray | None:
        """Forgets the arrays that lie where the next array will, and notes that one. None: nothing is to be written."""
        with self._lock:
            if self._closed or key in self._arrays or not 0 < array.nbytes <= self.limit:
                return None
            left = self.limit - self._end % self.limit
            begin = self._end + (left if left < array.nbytes else 0)
            end = begin + array.nbytes
            there = list(itertools.takewhile(lambda item: end - item[1].begin > self.limit, self._arrays.items()))
            if not all(kept.complete for _, kept in there):  # whoever writes one of them would write over this one
                return None
            for name, kept in there:
                del self._arrays[name]
                self.used -= kept.size
            self._end = end
            kept = self._arrays[key] = _SpilledArray(begin, array.shape, array.nbytes)
            self.used += kept.size
            return kept

    def read(self, key: Hashable) -> np.ndarray | None:
        """Returns the array, which stays on disk, too; None where it isn't here (any more)."""
        with self._lock:
            kept = self._arrays.get(key)
        if kept is None or not kept.complete:
            return None
        array = np.empty(kept.shape, np.uint8)
        try:
            with self._descriptor() as file:
                count = os.preadv(file, [array.data.cast("B")], kept.begin % self.limit)
        except OSError as error:
            self._warn(error)
            return None
        with self._lock:  # meanwhile, another one may have been written there
            return array if count == kept.size and self._arrays.get(key) is kept else None

    def close(self) -> None:
        """Forgets everything, and removes the file."""
        with self._lock:
            self._closed = True
            self._arrays.clear()
            self.used = 0
        with self._descriptor():
            pass

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """The file's descriptor. The last one who uses it closes it: the system gives its number to the next file."""
        with self._lock:
            if self._file.closed:
                raise OSError("is closed")
            self._users += 1
        try:
            yield self._file.fileno()
        finally:
            with self._lock:
                self._users -= 1
                if self._closed and not self._users:
                    self._file.close()

    def _warn(self, error: OSError) -> None:
        with self._lock:
            first, self._warned = not self._warned and not self._closed, True
        if first:
            log.warning(
                "%s: decoded media that leave memory can't be kept on disk (%s), and are decoded again when they are "
                "needed; TMPDIR names another folder, data.spill_gib bounds what is kept",
                self.folder,
                error.strerror,
            )


class MediaCache:
    """Arrays (uint8) by key: the arrays that were used least recently go to disk, or are forgotten. Thread-safe.

    An array that was handed out stays what it is for whoever holds it.
    """

    def __init__(self, limit: int, spill: SpillFile | None) -> None:
        """Holds `limit` bytes in memory."""
        self.spill = spill
        self.evictions = 0
        self._arrays = Recent[np.ndarray](limit, lambda array: array.nbytes)
        self._leaving: dict[Hashable, np.ndarray] = {}  # being written to disk
        self._lock = threading.Lock()  # held while an array goes from one to the other

    @property
    def used(self) -> int:
        """Bytes in memory."""
        return self._arrays.used

    def get(self, key: Hashable) -> np.ndarray | None:
        """Returns the array, from disk if need be, or None."""
        with self._lock:
            array = self._arrays.get(key)
            array = self._leaving.get(key) if array is None else array
        if array is None and self.spill and (array := self.spill.read(key)) is not None:
            self.put(key, array)
        return array

    def put(self, key: Hashable, array: np.ndarray) -> np.ndarray:
        """Keeps an array, which nobody may write to any more, and returns it. A part of a larger one is copied: it
        would keep all of that in memory."""
        if isinstance(array.base, np.ndarray) and array.base.nbytes > array.nbytes:
            array = array.copy()
        array.setflags(write=False)
        with self._lock:
            evicted = self._arrays.put(key, array)
            self.evictions += len(evicted)
            leaving = dict(item for item in evicted if self.spill and item[1].nbytes >= SPILL_FROM)
            self._leaving |= leaving
        for name, value in leaving.items():
            try:
                if self.spill:
                    self.spill.write(name, value)
            finally:
                with self._lock:
                    if self._leaving.get(name) is value:
                        del self._leaving[name]
        return array

    def close(self) -> None:
        """Forgets everything, and removes the file on disk."""
        self._arrays.clear()
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
