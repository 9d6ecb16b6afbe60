"""The living descendants of a process, and their memory. Linux only: elsewhere, none are found."""

import contextlib
import os
import pathlib
from collections.abc import Sequence

_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """Returns a process and its living descendants; the deepest are last."""
    members = [pid]
    for member in members:
        with contextlib.suppress(OSError):  # the process ends meanwhile
            for task in pathlib.Path(f"/proc/{member}/task").iterdir():
                members += map(int, (task / "children").read_text().split())
    return members


def resident(members: Sequence[int]) -> int:
    """Returns the sum of the resident memory of these processes in bytes. An ended process counts 0."""
    return sum(map(_resident, members))


def _resident(pid: int) -> int:
    try:
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
