"""Strictly on-policy training, one thing after the other: the reference that every other policy is compared with.

One step: draw P prompts, generate G responses to each under one weight version, score each response as soon as it
ends, train on all P groups in draw order, publish the new weights. Evaluations and checkpoints come between steps,
when nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..types import Group
from .ledger import CoordinatorError, Entry, Stage
from .machine import Coordinator
from .messages import (
    Abort,
    DrawPrompts,
    Finish,
    Generate,
    Instruction,
    PublishWeights,
    Score,
    Skip,
    Train,
    request_id,
)

_PATIENCE = 3  # prompts given up in a row, without one response in between, until the engines count as lost


class EngineLost(CoordinatorError):
    """Prompt after prompt fails on the engines and no response comes back: going on would only burn the data."""


class Synchronous:
    """See the module's docstring. What to do follows from the books alone; nothing is kept from step to step."""

    def __init__(self) -> None:
        self._given_up = 0  # prompts given up in a row, without a response in between
        self._accepted = 0  # responses taken in when the last one was given up

    def decide(self, coordinator: Coordinator) -> Sequence[Instruction]:
        ledger = coordinator.ledger
        if ledger.unscored:
            return [Score(response) for response in ledger.unscored.values()]
        if lost := ledger.at(Stage.LOST):
            return self._again(coordinator, lost[0])
        if coordinator.awaiting:
            return []
        if coordinator.served != coordinator.version:
            return [PublishWeights(coordinator.version)]
        return self._rollout(coordinator) if ledger.live else self._between_steps(coordinator)

    def _between_steps(self, coordinator: Coordinator) -> Sequence[Instruction]:
        stopped = coordinator.stop_reason
        evaluation = coordinator.evaluation_due()
        if evaluation and not stopped:  # a stop should be quick; the resumed run makes up for it
            return [evaluation]
        if checkpoint := coordinator.checkpoint_due():
            return [checkpoint]
        if coordinator.ending and not evaluation:
            return [Finish(coordinator.step, coordinator.ending)]
        if stopped:
            return [Finish(coordinator.step, stopped, complete=False)]
        return [DrawPrompts(coordinator.settings.prompts_per_step)]

    def _rollout(self, coordinator: Coordinator) -> Sequence[Instruction]:
        ledger, settings = coordinator.ledger, coordinator.settings
        missing = settings.prompts_per_step - ledger.live
        if missing and not coordinator.exhausted:
            return [DrawPrompts(missing)]
        if waiting := ledger.at(Stage.WAITING):
            return [Generate(tuple(entry.prompt for entry in waiting), settings.group_size)]
        if ledger.count(Stage.RUNNING):
            return []
        groups = tuple(entry.group() for entry in ledger.at(Stage.SCORED))
        self._check_versions(groups, coordinator.version)
        return [Train(coordinator.step + 1, groups)]

    def _again(self, coordinator: Coordinator, entry: Entry) -> Sequence[Instruction]:
        """The whole group once more: draws depend on the seed of the prompt only, so nothing is biased by it."""
        abort = Abort(request_id(entry.prompt.draw, entry.attempt))  # responses may still be running
        attempts, settings = entry.attempt + 1, coordinator.settings
        if attempts < settings.max_attempts:
            return [abort, Generate((entry.prompt,), entry.n, attempts)]
        accepted = coordinator.ledger.accepted
        self._given_up = self._given_up + 1 if accepted == self._accepted else 1
        self._accepted = accepted
        if self._given_up >= _PATIENCE:
            raise EngineLost(
                f"{self._given_up} prompts in a row failed {attempts} times each and no response came back; "
                f"the last time because: {entry.failure}"
            )
        return [abort, Skip(entry.prompt, f"failed {attempts} times, last: {entry.failure}")]

    @staticmethod
    def _check_versions(groups: Sequence[Group], version: int) -> None:
        for sample in (sample for group in groups for sample in group.samples):
            if set(sample.response.versions) - {version}:
                raise CoordinatorError(
                    f"response {sample.response.rid} is of versions {sorted(set(sample.response.versions))}, "
                    f"on-policy training needs {version} only"
                )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to remember: between steps the books say it all."""
