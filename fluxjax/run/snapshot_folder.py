"""The place of a run's snapshots: a folder in the memory of each host, which a file in the run's folder names.

In it, each process of the run has one file a step, which gets its final name when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pathlib
import re
import secrets
import shutil

from ..config.run_folder import replace_text

log = logging.getLogger(__name__)
MEMORY = pathlib.Path("/dev/shm")  # a file system in the memory of the host
NAMED = "snapshots"  # the file in the run's folder
_PREFIX = "fluxjax-snapshots-"
_FOLDER = re.compile(rf"[^\0]*{_PREFIX}[0-9a-f]{{12}}-[0-9a-f]{{16}}")
_FILE = re.compile(r"(\d+)\.(\d+)-of-(\d+)")


def begun(run_dir: pathlib.Path, base: pathlib.Path = MEMORY) -> pathlib.Path:
    """Chooses a new folder in `base` for snapshots, writes its name to the run folder, and returns it: earlier folders
    belong to another history of the run."""
    folder = base / f"{_prefix(run_dir)}{secrets.token_hex(8)}"
    replace_text(run_dir / NAMED, str(folder))
    return folder


def named(run_dir: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder that `begun` named last; None if there is none. Logs a file that `begun` did not write."""
    with contextlib.suppress(OSError):
        text = (run_dir / NAMED).read_text(errors="replace")
        if _FOLDER.fullmatch(text):
            return pathlib.Path(text)
        log.warning("no snapshot is found: %s is damaged", run_dir / NAMED)
    return None


def file_of(folder: pathlib.Path, step: int, process: int, processes: int) -> pathlib.Path:
    """Returns the snapshot file of one process, of `processes`."""
    return folder / f"{step}.{process}-of-{processes}"


def found(folder: pathlib.Path, processes: int) -> dict[int, set[int]]:
    """Returns, by step, which of `processes` processes have a complete file on this host."""
    steps: dict[int, set[int]] = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if (match := _FILE.fullmatch(path.name)) and int(match[3]) == processes:
                steps.setdefault(int(match[1]), set()).add(int(match[2]))
    return steps


def newest(run_dir: pathlib.Path, processes: int) -> int:
    """Returns the newest step of which all processes, all on this host, have a snapshot; -1: there is none."""
    folder = named(run_dir)
    steps = {} if folder is None else found(folder, processes)
    return max((step for step, there in steps.items() if len(there) == processes), default=-1)


def remove_others(folder: pathlib.Path) -> None:
    """Removes the snapshot folders that earlier histories of the same run, and killed runs in the same run folder, have
    left."""
    for earlier in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*"):
        if earlier != folder:
            shutil.rmtree(earlier, ignore_errors=True)


def remove(run_dir: pathlib.Path, base: pathlib.Path = MEMORY) -> None:
    """Removes all snapshots of the run on this host."""
    (run_dir / NAMED).unlink(missing_ok=True)
    for folder in base.glob(f"{_prefix(run_dir)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(run_dir: pathlib.Path) -> str:
    return f"{_PREFIX}{hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:12]}-"
