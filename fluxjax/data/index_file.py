"""A file of small values by key that may be lost at any time and is never wrong: SQLite, and a checksum for each value.

Processes may read and write it at once, and be killed while they do. Damaged files are begun anew; where nothing can be
written, values are kept in memory. Either costs a warning, never an error. SQLite's write-ahead log wants all processes
on one host: folders on a network file system are for one run at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

log = logging.getLogger("fluxjax.data")
T = TypeVar("T")
Change: TypeAlias = Callable[[bytes | None], bytes | None]  # of a value that is there or isn't; None deletes it

FORMAT = 1  # of the values; files of other formats are left alone
PATIENCE = 5.0  # seconds to wait for another process that writes
_NAME = re.compile(rf"media{FORMAT}-(\d+)\.sqlite")
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
# Errors of the disk, or of permissions; all others are those of a damaged file.
_DISK = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM}
_CREATE = "CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"


class IndexFile:
    """The file in a folder; read and written from any thread."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._number = 0  # of the file: one that is damaged is followed by the next
        self._connection: sqlite3.Connection | None = None
        self._warned = False

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        return self._attempt(lambda connection: _get(connection, key))

    def update(self, changes: Mapping[bytes, Change]) -> None:
        """Changes values, all of them or, where another process keeps writing, none."""

        def change(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            for key, changed in changes.items():
                before = _get(connection, key)
                after = changed(before)
                if after is None:
                    connection.execute("DELETE FROM entries WHERE key = ?", (key,))
                elif after != before:
                    row = (key, _checksum(key, after) + after)
                    connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?)", row)
            connection.execute("COMMIT")

        self._attempt(change)

    def close(self) -> None:
        """Closes the file, which later calls open again."""
        with self._lock:
            self._disconnect()

    def _attempt(self, action: Callable[[sqlite3.Connection], T]) -> T | None:
        with self._lock:
            for _ in range(3):  # on what is there, then on a new file, then in memory
                try:
                    if self._connection is None:
                        self._connect()
                    assert self._connection is not None
                    return action(self._connection)
                except (sqlite3.Error, OSError) as error:
                    if not self._mend(error):
                        return None
            return None

    def _connect(self) -> None:
        """Waits for another process that makes the file: SQLite does not, where it turns the write-ahead log on."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return self._connect_at_once()
            except sqlite3.OperationalError as error:
                if _primary(error) not in _BUSY or time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def _connect_at_once(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._number = max(self._number, self._newest())
        connection = _connected(str(self._path(self._number)))
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # what is written survives a killed process
            connection.execute("PRAGMA cache_size = -65536")  # KiB
            connection.execute(_CREATE)
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if said != "ok":
                raise sqlite3.DatabaseError(said.replace("\n", " "))
        except sqlite3.Error:
            connection.close()
            raise
        self._connection = connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _mend(self, error: Exception) -> bool:
        """Makes the best of an error; says whether to try again."""
        code, primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT), _primary(error)
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.rollback()
        if primary in _BUSY:
            return False
        on_disk = isinstance(error, OSError) or (primary in _DISK and code != sqlite3.SQLITE_IOERR_SHORT_READ)
        if on_disk or (primary == sqlite3.SQLITE_READONLY and not self._writable()):
            self._move_to_memory(error)
        else:
            self._begin_anew(error)
        return True

    def _move_to_memory(self, error: Exception) -> None:
        self._warn(f"{self.folder}: the index of media can't be written ({error}), and is kept in memory")
        memory = _connected(":memory:")
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.backup(memory)
        memory.execute(_CREATE)
        self._disconnect()
        self._connection = memory

    def _begin_anew(self, error: Exception) -> None:
        """Goes on in another file: those who have the damaged one open would damage one of the same name."""
        damaged = self._path(self._number)
        self._warn(f"{damaged}: the index of media is damaged ({error}); it is made anew")
        self._disconnect()
        self._number += 1
        for ending in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                os.unlink(f"{damaged}{ending}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            log.warning("%s", text)
        self._warned = True

    def _path(self, number: int) -> pathlib.Path:
        return self.folder / f"media{FORMAT}-{number}.sqlite"

    def _newest(self) -> int:
        names = (_NAME.fullmatch(name) for name in os.listdir(self.folder))
        return max((int(name[1]) for name in names if name), default=0)

    def _writable(self) -> bool:
        return os.access(self.folder, os.W_OK) and os.access(self._path(self._number), os.W_OK)


def _primary(error: Exception) -> int:
    """Returns SQLite's primary error code; an error without a code counts as that of a damaged file."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


def _connected(name: str) -> sqlite3.Connection:
    return sqlite3.connect(name, timeout=PATIENCE, isolation_level=None, check_same_thread=False)


def _get(connection: sqlite3.Connection, key: bytes) -> bytes | None:
    """Returns the value of a key, or None. Raises sqlite3.DatabaseError for a value that is not what was written."""
    row = connection.execute("SELECT value FROM entries WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    value = row[0]
    if not isinstance(value, bytes) or _checksum(key, value[4:]) != value[:4]:
        raise sqlite3.DatabaseError("a value has another checksum")
    return value[4:]


def _checksum(key: bytes, value: bytes) -> bytes:
    return zlib.crc32(value, zlib.crc32(key)).to_bytes(4, "little")
