"""Tail batching: rounds that do not wait for a few long responses (Flexes, section 3).

A *short round* launches more prompts than a step needs, and more responses than a group needs. The first complete
groups win; the other prompts are deferred. When enough prompts for a step are deferred, these prompts get a *long
round*, which launches no excess prompts or responses and cuts no response off. No prompt is therefore lost. If
`max_staleness` is 0, the newest weights have generated all trained tokens.

If `max_staleness` is above 0, a long round also generates new prompts for its step. The groups of its deferred prompts
are *held*: a few join this step and each of the next steps, so that every step has its share of long prompts. A held
group may be up to `max_staleness` versions old.

With dynamic sampling (Flexes, section 7) a round continues until enough groups have differing rewards; groups of equal
rewards are skipped, and new prompts are launched instead.
"""

import dataclasses
import math
from collections.abc import Sequence

from ...base.types import SavedState, State
from ..ledger import Entry, PromptStage
from ..machine import Coordinator
from ..messages import DrawPrompts, Instruction
from .rounds import Rounds, generate


@dataclasses.dataclass(eq=False)
class TailBatching(Rounds):
    """In short rounds, launches `prompts` and `responses` (the paper's eta) times the needed prompts and responses."""

    prompts: float | str = 2.0  # a text is a schedule, which the coordinator computes
    responses: float | str = 1.0
    max_staleness: int = 1  # 0: the groups of a long round are a step by themselves
    round: str = dataclasses.field(default="", init=False)  # "short" or "long" during a round
    rounds: dict[str, int] = dataclasses.field(default_factory=lambda: {"short": 0, "long": 0}, init=False)  # counts
    # draws of deferred prompts whose groups are for this step and later steps
    held: set[int] = dataclasses.field(default_factory=set, init=False)
    # the draws of `held` that this step trains on
    _joining: set[int] = dataclasses.field(default_factory=set, init=False)

    def _in_round(self, coordinator: Coordinator) -> bool:
        return bool(self.round)

    def _begin(self, coordinator: Coordinator) -> Sequence[Instruction]:
        ledger, oldest = coordinator.ledger, coordinator.version - self.max_staleness
        held = [entry for entry in ledger.at(PromptStage.SCORED) if entry.prompt.draw in self.held]
        self.held = {entry.prompt.draw for entry in held}
        if old := [entry for entry in held if entry.born < oldest]:  # a resumed run may have a smaller `max_staleness`
            return [entry.park() for entry in old]
        waiting, needed = ledger.at(PromptStage.DEFERRED), coordinator.settings.prompts_per_step
        long = len(waiting) >= needed or coordinator.exhausted
        self.round = "long" if long else "short"
        self.rounds[self.round] += 1
        if long and self.max_staleness and not coordinator.exhausted:
            self.held |= {entry.prompt.draw for entry in waiting[:needed]}
            held += waiting[:needed]
        self._joining = self._share(coordinator, held)
        return self._round(coordinator)

    def _round(self, coordinator: Coordinator) -> Sequence[Instruction]:
        """Returns the next instructions of the round. All prompts are drawn before any is launched: otherwise timing
        would decide how far responses are when a draw ends."""
        ledger, needed = coordinator.ledger, self._needed(coordinator)
        scored = self._count(coordinator, PromptStage.SCORED, PromptStage.TRAINING)
        complete = scored + self._count(coordinator, PromptStage.COMPLETE)
        running = self._count(coordinator, PromptStage.RUNNING, PromptStage.STOPPING)
        won = (scored if self.dynamic_sampling else complete) >= needed
        if not won and (moving := self._moving(coordinator)):
            return generate(coordinator, moving, 0, 0, keep=lambda entry: True)
        deferred, fresh = ledger.at(PromptStage.DEFERRED), ledger.at(PromptStage.WAITING)
        held = [entry for entry in deferred if entry.prompt.draw in self.held]
        again = [entry for entry in deferred if entry.prompt.draw not in self.held]
        if self.round == "short" and not coordinator.exhausted:
            again = []
        wanted = needed  # prompts that are to be running or complete, without held prompts
        if self.round == "short":
            wanted = math.ceil(float(coordinator.scheduled("tail_prompts", self.prompts)) * needed)
        missing = 0 if won else max(wanted - running - complete - len(fresh), 0)
        if missing > len(again) and not coordinator.exhausted:
            return [DrawPrompts(missing - len(again))]
        if beginning := [*held, *again[:missing], *fresh]:
            need = coordinator.settings.group_size
            excess = float(coordinator.scheduled("tail_responses", self.responses)) if self.round == "short" else 1.0
            return generate(coordinator, beginning, math.ceil(excess * need), need)
        if not won and (running or complete > scored or self._held_unscored(coordinator)):
            return []
        return self._close(coordinator, needed)

    def _close(self, coordinator: Coordinator, needed: int) -> Sequence[Instruction]:
        """Defers running prompts, then closes the round. If the round has too many groups, the lowest draws win."""
        ledger = coordinator.ledger
        if self._held_unscored(coordinator):
            return []
        needed -= ledger.count(PromptStage.TRAINING)
        if late := ledger.at(PromptStage.RUNNING):
            return [entry.park() for entry in late]
        if ledger.count(PromptStage.STOPPING) or (
            ledger.count(PromptStage.COMPLETE) and self._count(coordinator, PromptStage.SCORED) < needed
        ):
            return []
        scored = [entry for entry in ledger.at(PromptStage.SCORED) if entry.prompt.draw not in self.held]
        if surplus := [*ledger.at(PromptStage.COMPLETE), *scored[needed:]]:  # the next weights will differ
            return [entry.park() for entry in surplus]
        if coordinator.awaiting:
            return []
        self.round = ""
        self.held -= self._joining
        scored = [entry for entry in ledger.at(PromptStage.SCORED) if entry.prompt.draw not in self.held]
        if not (scored or ledger.count(PromptStage.TRAINING)):
            return self._between(coordinator)
        return self._train(coordinator, scored)

    def _share(self, coordinator: Coordinator, held: Sequence[Entry]) -> set[int]:
        """Returns the draws of the held groups that join this step. Groups are spread evenly over the steps in which
        their age is allowed. When the data ends, as many groups join as the step needs."""
        needed, version = coordinator.settings.prompts_per_step, coordinator.version
        born = {entry.prompt.draw: version if entry.stage is PromptStage.DEFERRED else entry.born for entry in held}
        share = needed if coordinator.exhausted else 0
        first = sorted(born, key=lambda draw: (born[draw], draw))
        for number, draw in enumerate(first, 1):
            share = max(share, math.ceil(number / (born[draw] + self.max_staleness - version + 1)))
        return set(first[: min(share, needed)])

    def _needed(self, coordinator: Coordinator) -> int:
        """Returns the number of groups that the step needs beside the held groups that join it."""
        return coordinator.settings.prompts_per_step - len(self._joining & coordinator.ledger.entries.keys())

    def _count(self, coordinator: Coordinator, *stages: PromptStage) -> int:
        """Returns the number of prompts that are at these stages and are not held."""
        entries = coordinator.ledger.entries
        held = sum(draw in entries and entries[draw].stage in stages for draw in self.held)
        return coordinator.ledger.count(*stages) - held

    def _held_unscored(self, coordinator: Coordinator) -> int:
        """Returns the number of held prompts without a scored group: the round waits until all are scored."""
        entries = coordinator.ledger.entries
        return sum(draw in entries and entries[draw].stage is not PromptStage.SCORED for draw in self.held)

    def _missing(self, coordinator: Coordinator) -> int:
        unscored = self._needed(coordinator) - self._count(coordinator, PromptStage.SCORED, PromptStage.TRAINING)
        return max(unscored, 0) + self._held_unscored(coordinator)

    def metrics(self) -> dict[str, float]:
        return {"short_rounds": self.rounds["short"], "long_rounds": self.rounds["long"], "held": len(self.held)}

    def state_dict(self) -> State:
        return {"rounds": dict(self.rounds), "held": sorted(self.held)}

    def load_state_dict(self, state: SavedState) -> None:
        self.rounds = dict(state.get("rounds", self.rounds))
        self.held = set(state.get("held", ()))
