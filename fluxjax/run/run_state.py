"""Saves and restores the state that decides the rest of a run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from models.decoder import parameter_count

from ..base.types import PreparedPrompt, State
from ..batch.composer import Team
from ..coordinator import SchedulingPolicy
from ..coordinator.factory import make_coordinator
from ..data.prepare import Preparer
from ..hosts.orders import Restore, Save
from ..report.metrics import Summary
from ..rewards import Scorer
from .checkpoint import ResumeError
from .parts import Parts

if TYPE_CHECKING:
    from .play import Play


class RunState:
    """The coordinator, the position in the prompts, the counts of rewards and summary, the replay buffer, and the
    models' arrays. Only process 0 has this `runtime.ports.Checkpointer`, which makes the others save or restore."""

    def __init__(
        self,
        parts: Parts,
        gang: Team,
        prompts: Preparer,
        rewards: Scorer,
        summary: Summary,
        policy: Callable[[], SchedulingPolicy] | None,
        play: Play | None = None,
        *,
        began: float,
        read_only: bool = False,
    ) -> None:
        """`policy` makes a user's scheduling policy (None: the configuration names the policy). The summary's total
        time begins at `began` (`time.monotonic`). `asked` has the run's steps and intervals; `fit` replaces it."""
        self._parts, self._gang, self._policy, self._play, self._read_only = parts, gang, policy, play, read_only
        self.asked, self.prompts, self._rewards, self.summary = parts.config, prompts, rewards, summary
        self.prepared: dict[int, PreparedPrompt] = {}  # by draw: prompts that a resumed coordinator still needs
        self.loaded: int | None = None  # the step of the state loaded last; None: no state was loaded
        self.started = False  # whether the warm start is over
        self._since = began  # `time.monotonic` when the summary's total was last counted
        self.begin()

    def begin(self) -> None:
        """Makes a coordinator at step 0, and an empty replay buffer if the configuration has replay."""
        asked = self.asked
        every = {"evaluate_every": asked.evaluation.every, "checkpoint_every": asked.checkpoint.every}
        model = self._parts.model
        tower = parameter_count(visual) if (visual := getattr(model, "visual", None)) else 0
        sizes = {"patch_tokens": tower / (parameter_count(model) - tower)}
        self.coordinator = make_coordinator(self._parts.config, self._policy, steps=asked.steps, **every, **sizes)
        self.replay = None
        if self._parts.config.replay.share:
            from ..learner.replay import ReplayBuffer

            self.replay = ReplayBuffer(self._parts.config.replay)

    def resume(self) -> int | None:
        """Loads again the checkpoint that `load` loaded last, or else the newest undamaged one. Returns the step, or
        None without a checkpoint. `fit` may have changed the run's steps and prompts."""
        step = self._parts.checkpoints.undamaged() if self.loaded is None else self.loaded
        return None if step is None else self.load(step)

    def load(self, step: int | None = None) -> int:
        """Loads the checkpoint of a step, by default the newest undamaged checkpoint. Returns the step. Raises
        `ResumeError`, and `DataError` if a source has changed."""
        checkpoints, models = self._parts.checkpoints, self._parts.models
        step = checkpoints.chosen(step)
        self._gang.tell(Restore(step, self.asked.steps))
        step, arrays, state = checkpoints.restore(models.abstract(), step, models.forget)
        models.load(arrays, self.asked.steps)
        self.begin()
        self.summary = Summary(**state["summary"])
        self.prompts.load_state_dict(state["source"])
        if not self._read_only:
            self.prompts.loader.check(state["source"].get("contents", {}))  # earlier releases saved no contents
        held = state["coordinator"]["ledger"].get("entries", [])  # earlier releases saved no entries
        self.prepared = self._again(held)
        prompts = {draw: prepared.prompt for draw, prepared in self.prepared.items()}
        self.coordinator.load_state_dict(state["coordinator"], prompts)
        if self._play is not None:
            self._play.snapshots = state.get("episodes", {})
        if self.replay is not None:
            kept = state.get("replay", {})
            self.replay.load_state_dict(kept, self._again(kept.get("groups", [])))
        self._rewards.load_state_dict(state.get("rewards", {}))  # earlier releases saved no counts
        shapes = self._parts.composer.shapes
        shapes.load_state(state.get("shapes", shapes.state()))
        self.summary.devices = self._parts.learner.mesh.size  # the checkpoint's run may have had another mesh
        self.summary.resumed_from.append(step)
        self.loaded, self.started = step, True
        return step

    def _again(self, saved: Sequence[State]) -> dict[int, PreparedPrompt]:
        """Prepares prompts of a checkpoint again, with the inputs of their responses."""
        state, play = {prompt["draw"]: prompt for prompt in saved}, None if self._read_only else self._play
        prepared = {prepared.prompt.draw: prepared for prepared in self.prompts.again(state)}
        return prepared if play is None else {draw: play.restored(p, state[draw]) for draw, p in prepared.items()}

    def state(self) -> dict[str, Any]:
        """Returns the state of coordinator, prompts and rewards (`runtime.ports.Checkpointer`)."""
        return {
            "coordinator": self.coordinator.state_dict(),
            "source": self.prompts.state_dict(),
            "rewards": self._rewards.state_dict(),
            "episodes": {} if self._play is None else self._play.state_dict(),
        }

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Starts a checkpoint (`runtime.ports.Checkpointer`)."""
        checkpoints, arrays = self._parts.checkpoints, self._parts.models.arrays()
        with self.summary.stage("checkpoint"):
            if not checkpoints.may_save(step, arrays):
                return
            self._gang.tell(Save(step))
            self.count_total()
            further = {"summary": dataclasses.asdict(self.summary), "shapes": self._parts.composer.shapes.state()}
            if self.replay is not None:
                further["replay"] = self.replay.state_dict()
            checkpoints.write(step, arrays, state | further)

    def save_now(self) -> None:
        """Starts a checkpoint, while nothing generates or trains. Raises `ResumeError` during the warm start."""
        if not self.started:
            raise ResumeError("there is nothing to save yet: the run has not started")
        self.save(self.coordinator.step, self.state())

    def count_total(self) -> None:
        """Adds the time since the last call to the summary's total."""
        now = time.monotonic()
        self.summary.add_seconds("total", now - self._since)
        self._since = now
