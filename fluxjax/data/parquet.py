"""Parquet files as the Hugging Face hub has them: text columns beside lists of embedded images.

Rows are read a row group at a time, when they are drawn; the last few groups stay in memory. Only the id column
is read at the start, to refuse duplicates.
"""

import bisect
import collections
import logging
import pathlib
import threading
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from ..base.errors import DataError, RecordError
from ..base.types import Media, MediaKind, Prompt
from .fields import Fields, answer_text, make_prompt, resolve

log = logging.getLogger("fluxjax.data")
CACHE_BYTES = 256 << 20  # of row groups kept in memory, beside the one in use
_TEXT = (pa.string(), pa.large_string())
LARGE_ROW_GROUP = 128 << 20  # bytes; from here on a shuffled read is slow and the user should know


class ParquetSource:
    """One file, or a folder of shards in the order of their names.

    Media columns may hold one item or a list; an item is bytes, a path (relative to the file), or the hub's
    struct of `bytes` and `path`. Raises `DataError` for unreadable files, wrong columns and duplicate ids.
    """

    def __init__(self, path: pathlib.Path, name: str, fields: Fields | None = None) -> None:
        self.name = name
        self.paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not self.paths:
            raise DataError(f"{path}: the folder has no .parquet files")
        self._open_files()
        self.fields = resolve(self._files[0].schema_arrow.names, fields or Fields(), str(self.paths[0]))
        self._columns = [column for column in vars(self.fields).values() if column]
        self._groups: list[tuple[int, int]] = []  # (file, row group)
        self._starts: list[int] = [0]  # first row of each group, and the end
        self._first_row: list[int] = []  # of each file
        for shard, file in enumerate(self._files):
            self._check(shard)
            self._first_row.append(self._starts[-1])
            for group in range(file.num_row_groups):
                if rows := file.metadata.row_group(group).num_rows:
                    self._groups.append((shard, group))
                    self._starts.append(self._starts[-1] + rows)
        if not len(self):
            raise DataError(f"{path}: the file has no records")
        largest = max(self._files[f].metadata.row_group(g).total_byte_size for f, g in self._groups)
        if largest > LARGE_ROW_GROUP:
            log.warning(
                "%s has row groups of %d MB, which are read whole for each row that is drawn; "
                "rewrite it with smaller ones: pyarrow.parquet.write_table(table, path, row_group_size=100)",
                path,
                largest >> 20,
            )
        self._check_ids()

    def _open_files(self) -> None:
        self._files = [_open(shard) for shard in self.paths]
        self._cache: collections.OrderedDict[int, pa.Table] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        """Leaves out what each process opens for itself."""
        return {name: value for name, value in vars(self).items() if name not in ("_files", "_cache", "_lock")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._open_files()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        position = bisect.bisect_right(self._starts, index) - 1
        shard = self._groups[position][0]
        row = self._group(position).slice(index - self._starts[position], 1).to_pylist()[0]
        folder, local = self.paths[shard].parent, index - self._first_row[shard]
        id = str(row[self.fields.id]) if self.fields.id else f"{self.paths[shard].stem}:{local}"
        return self._to_prompt(row, id, folder, f"{self.paths[shard].name}#{local}")

    def texts(self) -> Iterator[str]:
        for shard, group in self._groups:
            table = self._files[shard].read_row_group(group, columns=[self.fields.prompt, self.fields.answer])
            for row in table.to_pylist():
                yield row[self.fields.prompt] or ""
                yield answer_text(row[self.fields.answer]) or ""

    def _to_prompt(self, row: dict[str, object], id: str, folder: pathlib.Path, where: str) -> Prompt:
        text, answer = row[self.fields.prompt], answer_text(row[self.fields.answer])
        if not isinstance(text, str):
            raise RecordError(id, "no prompt")
        if answer is None:
            raise RecordError(id, "no answer")
        media: dict[MediaKind, list[Media]] = {}
        for kind, column in ((MediaKind.IMAGE, self.fields.images), (MediaKind.VIDEO, self.fields.videos)):
            value = row[column] if column else None
            items = value if isinstance(value, list) else [] if value is None else [value]
            media[kind] = [_media(kind, item, folder, f"{where}/{column}/{i}", id) for i, item in enumerate(items)]
        try:
            return make_prompt(id, self.name, text, answer, media)
        except ValueError as error:
            raise RecordError(id, str(error)) from error

    def _group(self, position: int) -> pa.Table:
        with self._lock:  # a ParquetFile must not be read from two threads at once
            table = self._cache.get(position)
            if table is None:
                shard, group = self._groups[position]
                try:
                    table = self._files[shard].read_row_group(group, columns=self._columns)
                except (pa.ArrowException, OSError) as error:
                    raise DataError(f"{self.paths[shard]}: row group {group} cannot be read: {error}") from error
                self._cache[position] = table
                while len(self._cache) > 1 and sum(t.nbytes for t in self._cache.values()) > CACHE_BYTES:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(position)
            return table

    def _check(self, shard: int) -> None:
        """Raises `DataError` unless the shard has all columns, with usable types."""
        schema, where = self._files[shard].schema_arrow, self.paths[shard]
        for column in self._columns:
            if column not in schema.names:
                raise DataError(f"{where}: no column {column!r}, which {self.paths[0].name} has")
        for column in (self.fields.prompt, self.fields.answer):
            kind = schema.field(column).type
            number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
            if not (kind in _TEXT or (number and column == self.fields.answer)):
                raise DataError(f"{where}: column {column!r} must hold text, found {kind}")
        for column in filter(None, (self.fields.images, self.fields.videos)):
            if not _is_media(schema.field(column).type):
                raise DataError(
                    f"{where}: column {column!r} must hold bytes, paths or structs of bytes and path, or lists of "
                    f"these; found {schema.field(column).type}"
                )

    def _check_ids(self) -> None:
        if not self.fields.id:
            return
        seen: dict[str, str] = {}
        for path, file in zip(self.paths, self._files, strict=True):
            column = file.read(columns=[self.fields.id]).column(0)
            for row, id in enumerate(column.to_pylist()):
                where = f"{path.name}#{row}"
                if str(id) in seen:
                    raise DataError(f"{path}: row {row} has the id {id!r}, already used by {seen[str(id)]}")
                seen[str(id)] = where


def _open(path: pathlib.Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


def _is_media(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_media(kind.value_type)
    if pa.types.is_struct(kind):
        return any(field.name in ("bytes", "path") for field in kind)
    return kind in (pa.binary(), pa.large_binary(), *_TEXT)


def _media(kind: MediaKind, item: object, folder: pathlib.Path, label: str, id: str) -> Media:
    data, path = (item.get("bytes"), item.get("path")) if isinstance(item, dict) else (item, item)
    if isinstance(data, bytes):
        return Media(kind, label, data)
    if isinstance(path, str) and path:
        return Media(kind, str(folder / path))
    raise RecordError(id, f"an empty {kind.value}")
