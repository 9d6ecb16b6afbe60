"""The snapshots of all processes of a run, as process 0 has them taken and goes on from them."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import PyTree

from ..config import CheckpointConfig
from ..hosts.gang import Gang
from ..hosts.orders import Offer, Restore, Save
from . import snapshot_folder
from .snapshots import Snapshots

log = logging.getLogger(__name__)


class GangSnapshots:
    """Takes the snapshots of all processes, and restores them. Process 0 gives each order before it does its own part,
    and every process works alone. Nothing on disk is touched before the first method is called."""

    def __init__(self, settings: CheckpointConfig, run_dir: pathlib.Path, gang: Gang) -> None:
        self._every = settings.snapshot_every
        self._run_dir, self._gang = run_dir, gang
        self._folder = pathlib.Path()  # of this history of the run
        self._own = Snapshots(gang.process, gang.processes)

    def newest(self, abstract: PyTree) -> int:
        """Returns the newest step of which every process still has its part; -1: there is none, or snapshots are
        off."""
        folder = snapshot_folder.named(self._run_dir) if self._every else None
        if folder is None:
            return -1
        self._folder = folder
        self._gang.tell(Offer(str(folder)))
        there = self._gang.exchange(self._own.steps(folder, abstract))
        newest = max(set(there[0]).intersection(*there), default=-1)
        if newest < 0 or any(steps[-1] > newest for steps in there):
            log.warning("of snapshots in %s, step %d is the newest that all have (-1: none): %s", folder, newest, there)
        return newest

    def restore(self, abstract: PyTree, step: int, make_room: Callable[[], None]) -> tuple[int, PyTree, Any]:
        """Returns the step, the arrays and the state of the newest snapshot, as `Checkpoints.restore` does."""
        state = self._own.state(self._folder, step)
        self._gang.tell(Restore(step, str(self._folder), state["source"]))
        return step, self._own.restore(self._folder, abstract, step, make_room), state

    def begin(self) -> None:
        """Begins a history that does not start from a snapshot: removes the existing snapshots."""
        self.remove()
        if self._every:
            self._folder = snapshot_folder.begun(self._run_dir)

    def write(self, step: int, arrays: PyTree, state: Mapping[str, Any]) -> None:
        self._gang.tell(Save(step, str(self._folder)))
        self._own.write(self._folder, step, arrays, state)

    def remove(self) -> None:
        """Removes the snapshots of this host. The other processes remove theirs when the run is over."""
        snapshot_folder.remove(self._run_dir)
