"""The result of one check, as the doctor prints it."""

from __future__ import annotations

import enum
from typing import NamedTuple


class State(enum.Enum):
    OK = "ok"
    DIFFERS = "differs"
    UNKNOWN = "cannot be asked"


class Finding(NamedTuple):
    """`name` is the checked part; for a difference, the part that differs. `fix` says what to do about a difference."""

    name: str
    state: State
    detail: str
    fix: str = ""


def ok(name: str, detail: str) -> Finding:
    return Finding(name, State.OK, detail)


def differs(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, State.DIFFERS, detail, fix)


def unknown(name: str, why: object) -> Finding:
    return Finding(name, State.UNKNOWN, " ".join(str(why).split())[:300])
