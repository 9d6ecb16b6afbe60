"""Active partial rollouts (APRIL; Flux, component 2): more prompts than a step needs, continued over rounds.

A round ends when the groups of a step are complete. The tokens of unfinished groups stay in the books with their
log-probs and versions; these groups continue in the next round under the new weights. A response may thus have several
versions, for which the algorithm's importance correction accounts. Prompts that are predicted to end first are
submitted first. A round waits for prompts that would be too old for the next round: older than `max_staleness`
versions. Groups that are nevertheless too old lose their tokens and are generated again.
"""

import dataclasses
import math
from collections.abc import Sequence

from ..ledger import Entry, PromptStage
from ..machine import Coordinator
from ..messages import DrawPrompts, Instruction
from .rounds import Rounds, generate


@dataclasses.dataclass(eq=False)
class April(Rounds):
    """Has `oversample` prompts under way for each that a step needs; trains on no token older than `max_staleness`."""

    oversample: float = 1.5
    max_staleness: int = 4
    _open: bool = dataclasses.field(default=False, init=False)

    def _in_round(self, coordinator: Coordinator) -> bool:
        return self._open

    def _begin(self, coordinator: Coordinator) -> Sequence[Instruction]:
        self._open = True
        return super()._begin(coordinator)

    def _round(self, coordinator: Coordinator) -> Sequence[Instruction]:
        ledger, needed = coordinator.ledger, coordinator.settings.prompts_per_step
        oldest = coordinator.version - self.max_staleness
        if late := [entry for entry in ledger.at(PromptStage.SCORED) if entry.born < oldest]:
            return [entry.park() for entry in late]
        missing = math.ceil(self.oversample * needed) - ledger.live
        scored = ledger.count(PromptStage.SCORED, PromptStage.TRAINING)
        if missing > 0 and not coordinator.exhausted and scored < needed:
            return [DrawPrompts(missing)]
        if waiting := ledger.at(PromptStage.DEFERRED, PromptStage.WAITING):
            # A prompt that became too old starts afresh.
            waiting.sort(key=lambda entry: (_left(coordinator, entry), entry.prompt.draw))
            size = coordinator.settings.group_size
            return generate(coordinator, waiting, size, size, keep=lambda entry: entry.born >= oldest)

        def waited_for(*stages: PromptStage) -> bool:
            return any(entry.born <= oldest for entry in ledger.at(*stages))

        running = ledger.count(PromptStage.RUNNING, PromptStage.STOPPING)
        enough = scored if self.dynamic_sampling else scored + ledger.count(PromptStage.COMPLETE)
        if running and (enough < needed or waited_for(PromptStage.RUNNING, PromptStage.STOPPING)):
            return []
        if ledger.count(PromptStage.COMPLETE) and (scored < needed or waited_for(PromptStage.COMPLETE)):
            return []
        if coordinator.awaiting:
            return []
        self._open = False
        park = [entry.park(keep=True) for entry in ledger.at(PromptStage.RUNNING)]
        training = ledger.count(PromptStage.TRAINING)
        winners = sorted(ledger.at(PromptStage.SCORED), key=_oldest_first)[: needed - training]
        if not (winners or training):
            return park or self._between(coordinator)
        winners.sort(key=lambda entry: entry.prompt.draw)
        return [*park, *self._train(coordinator, winners)]

    def _ready(self, coordinator: Coordinator) -> Sequence[Entry]:
        """Returns the scored groups among the `prompts_per_step` oldest: the step trains on these in any case."""
        entries = sorted(coordinator.ledger.entries.values(), key=_oldest_first)
        first = entries[: coordinator.settings.prompts_per_step]
        return [entry for entry in first if entry.stage is PromptStage.SCORED]


def _oldest_first(entry: Entry) -> tuple[int, int]:
    return entry.born, entry.prompt.draw


def _left(coordinator: Coordinator, entry: Entry) -> float:
    """Predicts the remaining tokens of the prompt's longest response."""
    begun = [response.num_tokens for response in entry.begun.values()] or [0]
    return max(coordinator.lengths.predict(entry.prompt, running=tokens) - tokens for tokens in begun)
