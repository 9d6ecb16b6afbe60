"""Reads prompts from parquet files with embedded media, as the Hugging Face hub has them.

A row is read, with its row group, when it is drawn. Texts of the latest row groups stay in memory; media are named by
their cells. At the start, the ids are read, to refuse duplicates, and the first rows of unused columns, to find media.
"""

import bisect
import contextlib
import logging
import pathlib
import posixpath
import re
import threading
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from ..base.errors import DataError, RecordError
from ..base.types import Media, Prompt
from .cells import EMBEDDED, is_answer, is_media, is_text, open_parquet, read_slots
from .locations import exists, is_folder, joined, local, matching, parent, stem, version_of, why
from .media_cache import Recent
from .sources import Fields, answer_text, resolve, tell_unused, to_prompt

log = logging.getLogger("fluxjax.data")
CACHE_BYTES = 64 << 20  # bytes of texts in memory, at most; the newest row group stays even if it is larger
_FIRST_ROWS = 16  # rows of unused columns, read to see whether they hold media
LARGE_ROW_GROUP = 128 << 20  # bytes; a shuffled read of larger row groups is slow, and the user is warned
_SPLITS = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
_SPLITS |= {"testing": "test", "eval": "test", "evaluation": "test"} | {n: n for n in ("train", "validation", "test")}
_WORD = re.compile(rf"(?<![a-z])({'|'.join(_SPLITS)})(?![a-z])")
_FOLDERS = {"", "data", "default"}  # folder names that do not name a subset


class ParquetSource:
    """Reads one file, or the files that `chosen_files` chooses. `path` is a file, folder or pattern, local or a URL.
    Media columns may hold one item or a list; an item is bytes, a path relative to the file's folder, or a struct of
    `bytes` and `path`. Raises `DataError` for unreadable files, wrong columns and duplicate ids."""

    def __init__(
        self, path: str | pathlib.Path, name: str, fields: Fields | None = None, held_out: bool = False
    ) -> None:
        self.name = name
        path = local(str(path))
        try:
            self.paths = [path] if not is_folder(path) and exists(path) else chosen_files(path, held_out)
            self._stamps = [version_of(shard) for shard in self.paths]
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {why(error)}") from error
        self._files = [_open(shard) for shard in self.paths]
        self._cache = Recent[pa.Table](CACHE_BYTES, lambda table: table.nbytes, keep_last=True)
        self._lock = threading.Lock()
        schema = self._files[0].schema_arrow
        empty = [column.name for column in schema if column.type == pa.null()]
        self.fields = resolve(schema.names, fields or Fields(), self.paths[0], empty)
        self._columns = [column for column in vars(self.fields).values() if column]
        self._media = [column for _, column in self.fields.media]
        self._groups: list[tuple[int, int]] = []  # (file, row group)
        self._starts: list[int] = [0]  # first row of each row group, and the number of rows
        self._first_row: list[int] = []  # first row of each file
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
        unused = [column for column in schema.names if column not in self._columns]
        shard, group = self._groups[0]
        with contextlib.suppress(pa.ArrowException, OSError):  # damage in unused columns does no harm
            rows = next(self._files[shard].iter_batches(_FIRST_ROWS, row_groups=[group], columns=unused))
            tell_unused(rows.to_pydict(), name, bool(self._media), self.paths[shard])

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        position = bisect.bisect_right(self._starts, index) - 1
        shard = self._groups[position][0]
        row = self._group(position).slice(index - self._starts[position], 1).to_pylist()[0]
        number = index - self._first_row[shard]
        path, stamp = self.paths[shard], self._stamps[shard]
        id = str(row[self.fields.id]) if self.fields.id else f"{stem(path)}:{number}"
        for kind, column in self.fields.media:
            if None in row[column]:
                raise RecordError(id, f"an empty {kind.value}")
            row[column] = [
                Media(kind, path, cell=f"{column}/{number}/{k}", stamp=stamp) if slot == EMBEDDED else slot
                for k, slot in enumerate(row[column])
            ]
        return to_prompt(row, self.fields, self.name, id, parent(path), f"{_name(path)}#{number}")

    def texts(self) -> Iterator[str]:
        for shard, group in self._groups:
            with self._lock:
                table = self._files[shard].read_row_group(group, columns=[self.fields.prompt, self.fields.answer])
            for row in table.to_pylist():
                yield row[self.fields.prompt] or ""
                yield answer_text(row[self.fields.answer]) or ""

    def ids(self) -> Iterator[str]:
        """Yields the ids of all rows, if there is a column of ids."""
        for file in self._files if self.fields.id else ():
            with self._lock:
                column = file.read(columns=[self.fields.id]).column(0)
            yield from map(str, column.to_pylist())

    def _group(self, position: int) -> pa.Table:
        """Returns the texts of a row group, with slots (`cells.SLOTS`) in media columns."""
        with self._lock:  # two threads must not read one ParquetFile at once
            table = self._cache.get(position)
            if table is None:
                shard, group = self._groups[position]
                file = self._files[shard]
                try:
                    table = file.read_row_group(group, columns=[c for c in self._columns if c not in self._media])
                    for column in self._media:
                        table = table.append_column(column, read_slots(file, group, column))
                except (pa.ArrowException, OSError) as error:
                    raise DataError(f"{self.paths[shard]}: row group {group} cannot be read: {error}") from error
                self._cache.put(position, table)
            return table

    def _check(self, shard: int) -> None:
        schema, where = self._files[shard].schema_arrow, self.paths[shard]
        for column in self._columns:
            if column not in schema.names:
                raise DataError(f"{where}: no column {column!r}, which {_name(self.paths[0])} has")
        for column in (self.fields.prompt, self.fields.answer):
            kind = schema.field(column).type
            if not (is_text(kind) or (is_answer(kind) and column == self.fields.answer)):
                raise DataError(f"{where}: column {column!r} must hold text, found {kind}")
        for column in self._media:
            if not is_media(schema.field(column).type):
                raise DataError(
                    f"{where}: column {column!r} must hold bytes, paths or structs of bytes and path, or lists of "
                    f"these; found {schema.field(column).type}"
                )

    def _check_ids(self) -> None:
        seen: dict[str, int] = {}
        for row, id in enumerate(self.ids()):
            if (first := seen.setdefault(id, row)) != row:
                (path, number), (before, row_before) = self._place(row), self._place(first)
                raise DataError(f"{path}: row {number} has the id {id}, already used by {_name(before)}#{row_before}")

    def _place(self, index: int) -> tuple[str, int]:
        """Returns the file that has a row, and the row's number in this file."""
        shard = bisect.bisect_right(self._first_row, index) - 1
        return self.paths[shard], index - self._first_row[shard]


def _open(path: str) -> pq.ParquetFile:
    try:
        return open_parquet(path)
    except OSError as error:
        raise DataError(f"{path}: not a readable parquet file: {why(error)}") from error


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def split_of(path: str) -> str:
    """Returns the split that a path names, or "". The file's name is searched first, then the nearest folders."""
    words = (_WORD.search(part) for part in reversed(path.lower().split("/")))
    return next((_SPLITS[word[1]] for word in words if word), "")


def chosen_files(path: str, held_out: bool = False) -> list[str]:
    """Returns the parquet files of a folder or of a pattern, sorted by name. If a folder has several splits, returns
    only files of the training split, or with `held_out` only files of the other split. Raises `DataError` if there are
    no files or the choice is not clear, and OSError if the folder can't be read."""
    if "*" in posixpath.basename(path) and not is_folder(path):
        if not (names := matching(parent(path), posixpath.basename(path))):
            raise DataError(f"{path}: no file matches this pattern")
        if len(splits := {split_of(name) for name in names}) > 1:
            log.warning("%s: all of the splits %s are read (%d files)", path, _listed(splits), len(names))
        return [joined(parent(path), name) for name in names]
    if not (names := matching(path, "*.parquet") or matching(path, "**/*.parquet")):
        raise DataError(f"{path}: the folder has no .parquet files")
    splits = {split_of(name) for name in names}
    meant = [split for split in splits if split and (split != "train") == held_out] if len(splits) > 1 else [*splits]
    found = _listed(splits)
    if len(meant) != 1:
        order = ("test", "validation", "", "train") if held_out else ("", "validation", "test")
        example = _example(path, names, min(splits, key=order.index))
        raise DataError(f"{path}: the files are of the splits {found}; name those that are meant, as in {example}")
    names = [name for name in names if split_of(name) == meant[0]]
    if len(subsets := {_subset(name) for name in names}) > 1:
        example = joined(path, posixpath.dirname(names[-1]))
        raise DataError(f"{path}: the folder has the subsets {', '.join(sorted(subsets))}; give one, as in {example}")
    if len(splits) > 1:
        log.warning("%s: of the splits %s, %s is read (%d files)", path, found, meant[0], len(names))
    return [joined(path, name) for name in names]


def _subset(name: str) -> str:
    return "/".join(part for part in name.split("/")[:-1] if part not in _FOLDERS and not split_of(part)) or "."


def _listed(splits: set[str]) -> str:
    return ", ".join(sorted(split or "(none)" for split in splits))


def _example(path: str, names: Sequence[str], split: str) -> str:
    """Returns a path or pattern for exactly the files of one split, or else the path of its first file."""
    meant = [name for name in names if split_of(name) == split]
    folder, first = posixpath.split(meant[0])
    word = _WORD.search(first.lower())
    start = first[: word.end()] if word else posixpath.commonprefix([posixpath.basename(name) for name in meant])
    for ending, pattern in (("", "*.parquet"), (f"{start}*.parquet",) * 2):
        if (folder or ending) and [posixpath.join(folder, n) for n in matching(joined(path, folder), pattern)] == meant:
            return joined(path, posixpath.join(folder, ending))
    return joined(path, meant[0])
