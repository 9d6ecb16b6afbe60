"""A media column of a parquet row group without its bytes: which items each row has, and where each one is.

The hub's columns hold structs of `bytes` and `path`. How many of a row group's `bytes` are there, its statistics say,
and the short paths say how many items there are: where all or none are embedded, no byte of them has to be read. Plain
columns of bytes say so, too, unless they are lists. Others are read, a few rows at a time, and are not kept.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

SLOTS = pa.list_(pa.string())  # of a row: each item's path; EMBEDDED where its bytes are here; null: neither
EMBEDDED = ""
_ROWS = 16  # read at once where bytes have to be read

_TEXT = (pa.string(), pa.large_string(), pa.string_view())
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def is_text(kind: pa.DataType) -> bool:
    """Says whether a column of this type holds text."""
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in _TEXT


def is_answer(kind: pa.DataType) -> bool:
    """Says whether a column of this type holds what an answer can be: text, numbers, truth values."""
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
    return is_text(kind) or any(is_number(kind) for is_number in numbers)


def is_media(kind: pa.DataType) -> bool:
    """Says whether a column of this type can hold media: bytes, paths, structs of these, lists of those, or nothing."""
    if isinstance(kind, _LISTS):
        return is_media(kind.value_type)
    if pa.types.is_struct(kind):
        return any(field.name in ("bytes", "path") for field in kind)
    return is_text(kind) or (kind.value_type if pa.types.is_dictionary(kind) else kind) in (*_BYTES, pa.null())


def read_slots(file: pq.ParquetFile, group: int, column: str) -> pa.Array:
    """The items of each row of a row group, as SLOTS. Raises OSError or pa.ArrowException."""
    kind = file.schema_arrow.field(column).type
    item = kind.value_type if isinstance(kind, _LISTS) else kind
    fields = {field.name for field in item} if pa.types.is_struct(item) else set()
    if is_text(item) or item == pa.null():
        return _slots(file.read_row_group(group, columns=[column]).column(0))
    leaves = _leaves(file, group, column)
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


def _leaves(file: pq.ParquetFile, group: int, column: str) -> dict[str, int]:
    """The stored columns that make up a column, by name."""
    metadata = file.metadata.row_group(group)
    names = [metadata.column(index).path_in_schema for index in range(metadata.num_columns)]
    return {name: index for index, name in enumerate(names) if name == column or name.startswith(f"{column}.")}


def _present(file: pq.ParquetFile, group: int, leaves: dict[str, int], name: str) -> int | None:
    """The number of values that are not null in the stored column of this name; None where the file does not say."""
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
