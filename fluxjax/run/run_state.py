"""The state of a run: everything that decides the rest of it, how it is saved, and how it is restored."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..base.types import PreparedPrompt
from ..batch.composer import Team
from ..coordinator import SchedulingPolicy
from ..coordinator.factory import make_coordinator
from ..data.prepare import Preparer
from ..hosts.orders import Restore, Save
from ..report.metrics import Summary
from ..rewards import Scorer
from .checkpoint import ResumeError
from .parts import Parts
from .snapshots import GangSnapshots


class RunState:
    """The coordinator, the position in the prompts, what the rewards and the summary count, replayed groups, and the
    arrays of the models. It is the `runtime.ports.Checkpointer` of the run; process 0 has it, and tells the others to
    save or restore their parts."""

    def __init__(
        self,
        parts: Parts,
        gang: Team,
        run_dir: pathlib.Path,
        prompts: Preparer,
        rewards: Scorer,
        summary: Summary,
        policy: Callable[[], SchedulingPolicy] | None,
        *,
        began: float,
        read_only: bool = False,
    ) -> None:
        """`policy` makes the scheduling policy of a user; None: that of the configuration. The summary's total counts
        from `began` on, on `time.monotonic`."""
        self._parts, self._gang, self._policy, self._read_only = parts, gang, policy, read_only
        self.prompts, self._rewards, self.summary = prompts, rewards, summary
        self.snapshots = GangSnapshots(parts.config.checkpoint, run_dir, gang)
        self.prepared: dict[int, PreparedPrompt] = {}  # prompts in the books of a resumed run, by draw
        self.loaded: int | None = None  # the step from which the run goes on
        self.started = False  # whether the warm start is behind
        self._since = began  # when the summary's total was last counted
        self.begin()

    def begin(self) -> None:
        """Begins with step 0."""
        self.coordinator = make_coordinator(self._parts.config, self._policy)
        self.replay = None
        if self._parts.config.replay.share:
            from ..learner.replay import ReplayBuffer

            self.replay = ReplayBuffer(self._parts.config.replay)

    # --- restoring -------------------------------------------------------------------------------

    def resume(self) -> None:
        """Loads the state from which the run goes on, if it resumes one: that of the newest snapshot or checkpoint.
        Loads it again even if it is loaded already, for the steps, intervals and prompts that `fit` was given."""
        checkpoint = self.loaded
        if checkpoint is None:
            snapshot = self.snapshots.newest(self._parts.models.abstract())
            checkpoint = self._parts.checkpoints.undamaged(above=snapshot)
            if checkpoint is None and snapshot >= 0:
                self._load(snapshot, self.snapshots.restore)
                return
        if checkpoint is not None:
            self.load(checkpoint)
        self.snapshots.begin()

    def load(self, step: int | None = None) -> int:
        """Loads the checkpoint of a step, by default the newest; returns its step. Raises `ResumeError`."""
        checkpoints = self._parts.checkpoints
        step = checkpoints.newest() if step is None else checkpoints.checked(step)
        self._gang.tell(Restore(step))
        return self._load(step, checkpoints.restore)

    def _load(self, step: int, restore: Callable[..., tuple[int, Any, dict[str, Any]]]) -> int:
        models = self._parts.models
        step, arrays, state = restore(models.abstract(), step, models.forget)
        models.load(arrays)
        self.begin()
        self.prompts.load_state_dict(state["source"])
        if not self._read_only:
            self.prompts.loader.check(state["source"].get("contents", {}))  # none in checkpoints of earlier releases
        held = state["coordinator"]["ledger"].get("entries", [])  # none in checkpoints of earlier releases
        self.prepared = self._again(entry["draw"] for entry in held)
        prompts = {draw: prepared.prompt for draw, prepared in self.prepared.items()}
        self.coordinator.load_state_dict(state["coordinator"], prompts)
        if self.replay is not None:
            from ..learner.replay import draws_of

            kept = state.get("replay", {})
            self.replay.load_state_dict(kept, self._again(draws_of(kept)))
        self._rewards.load_state_dict(state.get("rewards", {}))  # none in checkpoints of earlier releases
        self.summary = Summary.from_state_dict(state["summary"])
        shapes = self._parts.composer.shapes
        shapes.load_state(state.get("shapes", shapes.state()))
        self.summary.devices = self._parts.learner.mesh.size  # perhaps another mesh now
        self.summary.resumed_from.append(step)
        self.loaded, self.started = step, True
        return step

    def _again(self, draws: Iterable[int]) -> dict[int, PreparedPrompt]:
        return {prepared.prompt.draw: prepared for prepared in self.prompts.again(draws)}

    # --- saving ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns all of the run's state that is no array; see `runtime.ports.Checkpointer`."""
        return {
            "coordinator": self.coordinator.state_dict(),
            "source": self.prompts.state_dict(),
            "rewards": self._rewards.state_dict(),
        }

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Starts a checkpoint; see `runtime.ports.Checkpointer`."""
        with self.summary.stage("checkpoint"):
            self._save(step, state)

    def snapshot(self, step: int, state: dict[str, Any]) -> None:
        """Saves like `save`, but in the memory of the hosts."""
        with self.summary.stage("checkpoint"):
            self.snapshots.write(step, self._parts.models.arrays(), self._whole(state))

    def save_now(self) -> None:
        """Starts a checkpoint while nothing is generated or trained. Raises `ResumeError` before the run's start."""
        if not self.started:
            raise ResumeError("there is nothing to save yet: the run has not started")
        self._save(self.coordinator.step, self.state())

    def _save(self, step: int, state: dict[str, Any]) -> None:
        arrays = self._parts.models.arrays()
        if self._parts.checkpoints.may_save(step, arrays):
            self._gang.tell(Save(step))
            self._parts.checkpoints.write(step, arrays, self._whole(state))

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        self.count_total()
        further = {"summary": self.summary.state_dict(), "shapes": self._parts.composer.shapes.state()}
        if self.replay is not None:
            further["replay"] = self.replay.state_dict()
        return state | further

    def count_total(self) -> None:
        """Adds the time since the last call to the summary's total."""
        now = time.monotonic()
        self.summary.add_seconds("total", now - self._since)
        self._since = now
