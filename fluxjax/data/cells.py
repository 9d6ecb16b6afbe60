"""Reads media that are embedded in parquet files.

Data sets of the Hugging Face hub hold structs of `bytes` and `path`. The statistics of a row group tell how many items
have `bytes`. If all items have `bytes`, or no item has, no media bytes are read. In mixed columns, and in lists of
items without paths, 16 rows are read at a time, to see which items have `bytes`.

A cell is named `COLUMN/ROW/INDEX`. ROW is the row's number in the file, INDEX the item's number in the row's list. Row
groups in memory belong to one version of a file, so that a changed file is read again.
"""

from __future__ import annotations

import bisect
import threading
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .locations import filesystem, is_url, reaching, version_of
from .media_cache import Recent

KEPT_BYTES = 256 << 20  # bytes of row groups in memory, at most; the newest row group stays even if it is larger
KEPT_FILES = 16  # files that stay open
SLOTS = pa.list_(pa.string())  # each row's items: a path, EMBEDDED if the file holds the item's bytes, or null
EMBEDDED = ""
_ROWS = 16  # rows read at once if media bytes have to be read

_TEXT = (pa.string(), pa.large_string(), pa.string_view())
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


class CellError(ValueError):
    """A cell can't be read; the message does not name the file."""


class OtherVersion(CellError):
    """The file is now another version than the requested one."""


def open_parquet(path: str) -> pq.ParquetFile:
    """Opens a local file or a URL, without a memory map, since values must not change with the file. Raises OSError."""
    system, place = filesystem(path) if is_url(path) else (None, path)
    with reaching(path):
        return pq.ParquetFile(place, filesystem=system, pre_buffer=system is not None)


class _ParquetFile:
    def __init__(self, path: str) -> None:
        self.parquet = open_parquet(path)
        self.lock = threading.Lock()
        self.starts = [0]
        for group in range(self.parquet.num_row_groups):
            self.starts.append(self.starts[-1] + self.parquet.metadata.row_group(group).num_rows)


class Cells:
    """Reads cells. Thread-safe."""

    def __init__(self) -> None:
        self._files = Recent[_ParquetFile](KEPT_FILES)
        self._groups = Recent[pa.ChunkedArray](KEPT_BYTES, lambda values: values.nbytes, keep_last=True)

    def read(self, path: str, stamp: str, cell: str) -> bytes:
        """Returns a cell's bytes. Raises CellError, OSError, or OtherVersion unless the file's version is `stamp`."""
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
        if (file := self._files.get((path, stamp))) is None:
            try:
                file = _ParquetFile(path)
            finally:
                _check(path, stamp)  # after opening, so that the opened file is of this version
            self._files.put((path, stamp), file)
        return file

    def _group(self, path: str, stamp: str, column: str, group: int, file: _ParquetFile) -> pa.ChunkedArray:
        key = (path, stamp, column, group)
        if (values := self._groups.get(key)) is not None:
            return values
        with file.lock:
            if (values := self._groups.get(key)) is not None:
                return values
            if column not in file.parquet.schema_arrow.names:
                raise CellError(f"the file has no column {column!r}")
            try:
                with reaching(path):
                    values = file.parquet.read_row_group(group, columns=[column]).column(0)
            finally:
                _check(path, stamp)  # after reading, because the file may have been overwritten
            self._groups.put(key, values)
            return values


def _check(path: str, stamp: str) -> None:
    if (now := version_of(path)) != stamp:
        raise OtherVersion(f"has changed (it is version {now}, not {stamp})")


def is_text(kind: pa.DataType) -> bool:
    """Says whether a column of this type holds text."""
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in _TEXT


def is_answer(kind: pa.DataType) -> bool:
    """Says whether a column of this type can hold answers: text, numbers, truth values."""
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
    return is_text(kind) or any(is_number(kind) for is_number in numbers)


def is_media(kind: pa.DataType) -> bool:
    """Says whether a column of this type can hold media: bytes, paths, structs with these, lists of these, or nulls."""
    if isinstance(kind, _LISTS):
        return is_media(kind.value_type)
    if pa.types.is_struct(kind):
        return any(field.name in ("bytes", "path") for field in kind)
    return is_text(kind) or (kind.value_type if pa.types.is_dictionary(kind) else kind) in (*_BYTES, pa.null())


def read_slots(file: pq.ParquetFile, group: int, column: str) -> pa.Array:
    """Returns the items of each row of a row group, as SLOTS. Raises OSError or pa.ArrowException."""
    kind = file.schema_arrow.field(column).type
    item = kind.value_type if isinstance(kind, _LISTS) else kind
    fields = {field.name for field in item} if pa.types.is_struct(item) else set()
    if is_text(item) or item == pa.null():
        return _slots(file.read_row_group(group, columns=[column]).column(0))
    names = (file.metadata.row_group(group).column(n).path_in_schema for n in range(file.metadata.num_columns))
    leaves = {name: n for n, name in enumerate(names) if name == column or name.startswith(f"{column}.")}
    embedded = _present(file, group, leaves, "bytes" if fields else column)
    if "path" in fields:
        paths = [leaf for leaf in leaves if leaf.endswith(".path")]
        slots = _slots(file.read_row_group(group, columns=paths).column(0))
        if "bytes" not in fields or embedded == 0:
            return slots
        if embedded == (count := len(slots.values)):
            return pa.ListArray.from_arrays(slots.offsets, pa.array([EMBEDDED] * count, pa.string()))
    elif embedded == (rows := file.metadata.row_group(group).num_rows) and not isinstance(kind, _LISTS):
        return pa.array([[EMBEDDED]] * rows, SLOTS)
    batches = file.iter_batches(_ROWS, row_groups=[group], columns=[column])
    return pa.concat_arrays([_slots(batch.column(0)) for batch in batches])


def _present(file: pq.ParquetFile, group: int, leaves: dict[str, int], name: str) -> int | None:
    """Returns the number of non-null values in the stored column of this name, or None if nulls are not counted."""
    for leaf, index in leaves.items():
        if leaf == name or leaf.endswith(f".{name}"):
            stored = file.metadata.row_group(group).column(index)
            statistics = stored.statistics
            if statistics is None or not statistics.has_null_count:
                return None
            return stored.num_values - statistics.null_count
    return None


def _slots(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    return pa.array([[_slot(item) for item in _items(value)] for value in values.to_pylist()], SLOTS)


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _slot(item: object) -> str | None:
    data, path = (item.get("bytes"), item.get("path")) if isinstance(item, dict) else (item, item)
    if isinstance(data, bytes):
        return EMBEDDED
    return path if isinstance(path, str) and path else None
