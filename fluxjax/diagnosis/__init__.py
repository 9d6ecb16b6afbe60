"""Checks of an installation, of data and rewards, and of a server beside the trainer: see `fluxjax.doctor`."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The result of a check. `name` is the part that was checked; if engine and trainer differ, it is the part in which
    they differ. `fix` says what to do about the difference; without a difference, it is empty."""

    name: str
    detail: str
    fix: str = ""
    asked: bool = True  # False: the check could not be made; `detail` says why

    @property
    def state(self) -> str:
        return "cannot be asked" if not self.asked else "differs" if self.fix else "ok"
