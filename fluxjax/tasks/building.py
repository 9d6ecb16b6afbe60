"""Builds a data set on disk, completely or not at all.

Files are written to a temporary folder that is renamed at the end. A killed build leaves only that folder, which
the next one removes; two builds at once wait for each other by a file lock.
"""

import errno
import itertools
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..base.errors import DataError
from ..base.file_lock import lock_file

Record: TypeAlias = Mapping[str, object]


def build_once(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Creates `folder` by `write(temporary folder)`, unless it exists already.

    Raises `DataError` if the disk is full or the folder cannot be written to; nothing is left behind then.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():  # another process built it while this one waited
                return
            prefix = f".{folder.name}.building-"
            for dead in folder.parent.glob(f"{prefix}*"):  # this process holds the lock: nobody writes there
                shutil.rmtree(dead, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as name:
                temporary = pathlib.Path(name)
                write(temporary)
                temporary.chmod(0o755)  # a temporary folder is private; the cache may be shared
                temporary.rename(folder)
    except OSError as error:
        raise DataError(_explain(folder, error)) from error


def _explain(folder: pathlib.Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason += "; free some space, or choose another place with XDG_CACHE_HOME=FOLDER"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        reason += "; choose another place with XDG_CACHE_HOME=FOLDER"
    return f"the embedded data set cannot be built in {folder}: {reason}"


def write_manifest(path: pathlib.Path, records: Iterable[Record]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_manifests(
    folder: pathlib.Path, title: str, make: Callable[[str, int], Record], sizes: Mapping[str, int]
) -> list[Record]:
    """Writes `NAME.jsonl` for each name of `sizes`, with as many records from `make(NAME, index)`; returns all records.

    Threads make the records; the first error ends the work. stderr shows the progress: a bar on a terminal, else a line
    each quarter.
    """
    tasks = [(name, index) for name, size in sizes.items() for index in range(size)]
    quarter = math.ceil(len(tasks) / 4)
    records: list[Record] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="build") as pool, bar:
        shown = bar.add_task(title, total=len(tasks))
        for record in pool.map(lambda task: make(*task), tasks):
            records.append(record)
            bar.advance(shown)
            if bar.disable and (len(records) % quarter == 0 or len(records) == len(tasks)):
                print(f"{title}: {len(records)}/{len(tasks)}", file=sys.stderr, flush=True)
    written = iter(records)
    for name, size in sizes.items():
        write_manifest(folder / f"{name}.jsonl", itertools.islice(written, size))
    return records
