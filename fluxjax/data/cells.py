"""Media embedded in parquet files, read one at a time: the row groups that hold them, the last few of them in memory.

A cell is named `COLUMN/ROW/INDEX`: the row counts within its file, the index within the row's list. What is kept in
memory is of one version of a file, so that it stays right when the file changes.
"""

from __future__ import annotations

import bisect
import collections
import threading
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .locations import filesystem, is_url, reaching, version_of

KEPT_BYTES = 256 << 20  # of row groups kept in memory, beside the one in use
KEPT_FILES = 16  # kept open


class CellError(ValueError):
    """A cell can't be read; the message does not name it."""


class OtherVersion(CellError):
    """The file is now another version than the one that was asked for."""


def open_parquet(path: str) -> pq.ParquetFile:
    """Opens a local file or a URL. Raises OSError.

    Local files aren't mapped: what was read must stay as it is where a file is written over in its place.
    """
    system, place = filesystem(path) if is_url(path) else (None, path)
    with reaching(path):
        return pq.ParquetFile(place, filesystem=system, pre_buffer=system is not None)


class _ParquetFile:
    """An open file, read by one thread at a time, and the first row of each group."""

    def __init__(self, path: str) -> None:
        self.parquet = open_parquet(path)
        self.lock = threading.Lock()
        self.starts = [0]
        for group in range(self.parquet.num_row_groups):
            self.starts.append(self.starts[-1] + self.parquet.metadata.row_group(group).num_rows)


class Cells:
    """Reads cells, from any thread."""

    def __init__(self) -> None:
        self._files: collections.OrderedDict[tuple[str, str], _ParquetFile] = collections.OrderedDict()
        self._groups: collections.OrderedDict[tuple[str, str, str, int], pa.ChunkedArray] = collections.OrderedDict()
        self._lock = threading.Lock()  # of the two

    def read(self, path: str, stamp: str, cell: str) -> bytes:
        """The bytes of a cell of this version of a file. Raises CellError or OSError."""
        try:
            column, row_text, index_text = cell.rsplit("/", 2)
            row, index = int(row_text), int(index_text)
        except ValueError:
            raise CellError(f"{cell!r} does not name a cell as COLUMN/ROW/INDEX") from None
        file = self._file(path, stamp)
        if not 0 <= row < file.starts[-1]:
            raise CellError(f"the file has no row {row}")
        group = bisect.bisect_right(file.starts, row) - 1
        item: Any = self._group(path, stamp, column, group, file)[row - file.starts[group]]
        if isinstance(item, pa.ListScalar):
            if item.values is None or not 0 <= index < len(item.values):
                raise CellError(f"row {row} has no item {index} in {column!r}")
            item = item.values[index]
        elif index:
            raise CellError(f"row {row} has no item {index} in {column!r}")
        if isinstance(item, pa.StructScalar):
            item = item["bytes"]
        data = item.as_py()
        if not isinstance(data, bytes):
            raise CellError("holds no bytes")
        return data

    def _file(self, path: str, stamp: str) -> _ParquetFile:
        with self._lock:
            if (file := self._files.get((path, stamp))) is not None:
                self._files.move_to_end((path, stamp))
                return file
        try:
            file = _ParquetFile(path)
        finally:
            _check(path, stamp)  # after opening: what is open now can be no older
        with self._lock:
            file = self._files.setdefault((path, stamp), file)
            while len(self._files) > KEPT_FILES:
                self._files.popitem(last=False)
            return file

    def _group(self, path: str, stamp: str, column: str, group: int, file: _ParquetFile) -> pa.ChunkedArray:
        key = (path, stamp, column, group)
        if (values := self._kept(key)) is not None:
            return values
        with file.lock:
            if (values := self._kept(key)) is not None:
                return values
            if column not in file.parquet.schema_arrow.names:
                raise CellError(f"the file has no column {column!r}")
            try:
                with reaching(path):
                    values = file.parquet.read_row_group(group, columns=[column]).column(0)
            finally:
                _check(path, stamp)  # after reading: the file may have been written over in its place
        with self._lock:
            self._groups[key] = values
            while len(self._groups) > 1 and sum(kept.nbytes for kept in self._groups.values()) > KEPT_BYTES:
                self._groups.popitem(last=False)
        return values

    def _kept(self, key: tuple[str, str, str, int]) -> pa.ChunkedArray | None:
        with self._lock:
            if (values := self._groups.get(key)) is not None:
                self._groups.move_to_end(key)
            return values


def _check(path: str, stamp: str) -> None:
    if (now := version_of(path)) != stamp:
        raise OtherVersion(f"has changed (it is version {now}, not {stamp})")
