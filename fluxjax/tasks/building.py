"""Building a data set on disk so that it is there as a whole or not at all.

Files are written to a temporary folder that is renamed at the end. A killed build leaves only that folder, which
the next one removes; two builds at once wait for each other by a file lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..base.errors import DataError

log = logging.getLogger("fluxjax.data")
T = TypeVar("T")
R = TypeVar("R")


def build_once(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Makes `folder` by `write(temporary folder)`, unless it is there already.

    Raises `DataError` when the disk is full or the place cannot be written to; nothing is left behind then.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():  # another process built it while this one waited
                return
            for dead in folder.parent.glob(f".{folder.name}.building-*"):  # ours is the lock: nobody writes there
                shutil.rmtree(dead, ignore_errors=True)
            temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.building-", dir=folder.parent))
            try:
                write(temporary)
                temporary.chmod(0o755)  # mkdtemp gives a private folder; the cache may be shared
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(_explain(folder, error)) from error


def _explain(folder: pathlib.Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason += "; free some space, or choose another place with --config.data.root=FOLDER"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        reason += "; choose another place with --config.data.root=FOLDER"
    return f"the embedded data set cannot be built in {folder}: {reason}"


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock until the block ends, or the process does, however it ends."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks: the rename alone must do
            log.warning("cannot lock %s: %s", path, error)
        yield


def write_manifest(path: pathlib.Path, records: Iterable[Mapping[str, object]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def parallel(title: str, work: Callable[[T], R], items: list[T]) -> list[R]:
    """Computes `[work(item) for item in items]` in threads, with progress on stderr. The first error ends it."""
    results: list[R] = []
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="build")
    try:
        with _progress(title, len(items)) as advance:
            for result in pool.map(work, items):
                results.append(result)
                advance(len(results))
    finally:
        pool.shutdown(cancel_futures=True)
    return results


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, a line each quarter elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(title, total=total)
            yield lambda done: progress.update(task, completed=done)
    else:
        quarter = max(1, -(-total // 4))

        def advance(done: int) -> None:
            if done % quarter == 0 or done == total:
                print(f"{title}: {done}/{total}", file=sys.stderr, flush=True)

        yield advance
