"""Arrays on disk that memory has no room for: a folder of bounded size that belongs to one process and ends with it.

A process that is killed can't remove its folder. So each folder has a lock file beside it, which its owner keeps
locked: the system unlocks it when the owner ends, however it does, and whoever makes the next folder there removes it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import glob
import logging
import os
import pathlib
import platform
import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Hashable

import numpy as np

from ..base.errors import DataError
from ..base.file_lock import lock_file

log = logging.getLogger("fluxjax.data")
PREFIX, LOCK = "fluxjax-media-", ".lock"


@dataclasses.dataclass(frozen=True)
class _SpilledFile:
    path: str
    shape: tuple[int, ...]
    size: int


class SpillFolder:
    """Arrays (uint8) by key, of `limit` bytes at most: the least recently used arrays make room."""

    def __init__(self, parent: str, limit: int) -> None:
        """Makes the folder in `parent`, or in the system's temporary one. Raises DataError where that can't be."""
        self.parent = pathlib.Path(parent or tempfile.gettempdir())
        self.limit = limit
        self.used = 0
        self._files: collections.OrderedDict[Hashable, _SpilledFile] = collections.OrderedDict()
        self._writing: set[Hashable] = set()
        self._count = 0
        self._lock = threading.Lock()
        self._warned = False
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            _sweep(self.parent)
            self.folder, lock = _claim(self.parent)
        except OSError as error:
            raise DataError(
                f"no folder for decoded media can be made in {self.parent} (TMPDIR names another): {error.strerror}"
            ) from error
        self._end = weakref.finalize(self, _remove, self.folder, lock, os.getpid())

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._files

    def write(self, key: Hashable, array: np.ndarray) -> None:
        """Keeps the array, if there is room. A disk that is full, or fails, is logged once."""
        file, old = self._reserve(key, array)
        written = False
        try:
            for unused in old:
                pathlib.Path(unused.path).unlink(missing_ok=True)
            if file is None:
                return
            with open(file.path, "wb", buffering=0) as out:
                _write_all(out.fileno(), array)
            written = True
        except OSError as error:
            self._warn(error)
        finally:
            if file is not None:
                self._settle(key, file, written)

    def _reserve(self, key: Hashable, array: np.ndarray) -> tuple[_SpilledFile | None, list[_SpilledFile]]:
        """Returns the file to write, if any, and those that make room for it."""
        old: list[_SpilledFile] = []
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
                return None, old
            if key in self._writing or array.nbytes > self.limit:
                return None, old
            while self._files and self.used + array.nbytes > self.limit:
                old.append(self._files.popitem(last=False)[1])
                self.used -= old[-1].size
            if self.used + array.nbytes > self.limit:  # others are being written
                return None, old
            self.used += array.nbytes
            self._count += 1
            self._writing.add(key)
            return _SpilledFile(str(self.folder / str(self._count)), array.shape, array.nbytes), old

    def _settle(self, key: Hashable, file: _SpilledFile, written: bool) -> None:
        with self._lock:
            self._writing.discard(key)
            if written:
                self._files[key] = file
            else:
                self.used -= file.size
        if not written:
            with contextlib.suppress(OSError):
                os.unlink(file.path)

    def read(self, key: Hashable) -> np.ndarray | None:
        """Returns the array, which stays on disk, too; None where it isn't here (any more)."""
        with self._lock:
            file = self._files.get(key)
            if file is None:
                return None
            self._files.move_to_end(key)
        try:
            array = np.fromfile(file.path, np.uint8)
        except OSError:  # the least recent one made room meanwhile, or somebody tidies temporary folders
            array = np.empty(0, np.uint8)
        if array.nbytes == file.size:
            return array.reshape(file.shape)
        with self._lock:
            if self._files.get(key) is file:
                del self._files[key]
                self.used -= file.size
        with contextlib.suppress(OSError):
            os.unlink(file.path)
        return None

    def close(self) -> None:
        """Removes the folder."""
        with self._lock:
            self._files.clear()
            self.used = 0
        self._end()

    def _warn(self, error: OSError) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            log.warning(
                "%s: decoded media that leave memory can't be kept on disk (%s), and are decoded again when they are "
                "needed; TMPDIR names another folder, data.spill_gib bounds what is kept",
                self.folder,
                error.strerror,
            )


def _write_all(descriptor: int, array: np.ndarray) -> None:
    rest = np.ascontiguousarray(array).data.cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _claim(parent: pathlib.Path) -> tuple[pathlib.Path, contextlib.ExitStack]:
    """Makes a folder, and returns it with the lock beside it, which is locked before the folder is there."""
    folder = parent / f"{_prefix()}{uuid.uuid4().hex[:12]}"
    lock = lock_file(f"{folder}{LOCK}")
    folder.mkdir()
    return folder, lock


def _prefix() -> str:
    return f"{PREFIX}{platform.node()}-"  # not every file system shares locks between hosts


def _sweep(parent: pathlib.Path) -> None:
    """Removes the folders of processes that have ended."""
    for path in parent.glob(f"{glob.escape(_prefix())}*{LOCK}"):
        with contextlib.suppress(OSError), lock_file(path, wait=False):  # another user's, or in use
            shutil.rmtree(str(path).removesuffix(LOCK), ignore_errors=True)
            path.unlink()


def _remove(folder: pathlib.Path, lock: contextlib.ExitStack, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner ends
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}{LOCK}")
    lock.close()
