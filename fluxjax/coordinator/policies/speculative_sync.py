"""Speculative sync: training begins before a batch is complete, if it is predicted to be complete in time.

Flux, insight 2 and its table ("predicts long-tail rollouts, starts training early"). Gradients of the complete groups
take some time. When the responses that are missing are predicted to end within that time, with the wanted confidence,
these gradients are computed now, on the trainer's devices; the update waits for the rest of the batch. So training is
exactly as on-policy as without, and a wrong prediction costs nothing but a later end of what still runs, where engines
and trainer share their devices.
"""

import dataclasses
import math
from collections.abc import Sequence

from ...config import SpeculativeSyncConfig
from ..engine_states import trained_tokens
from ..ledger import Entry, PromptStage
from ..machine import Coordinator
from ..messages import Accumulate, Instruction, response_id

_LOOKS = 16  # in the time that the gradients take: predictions of many responses are work, too


@dataclasses.dataclass(eq=False)
class SpeculativeSync:
    """A helper that policies which train in rounds ask when they would wait."""

    settings: SpeculativeSyncConfig = dataclasses.field(default_factory=SpeculativeSyncConfig)
    begun: int = dataclasses.field(default=0, init=False)  # times that training began early
    _next: float = dataclasses.field(default=0.0, init=False)  # when to look again

    def reset(self) -> None:
        """Ends a round."""
        self._next = 0.0

    def consult(self, coordinator: Coordinator, ready: Sequence[Entry]) -> Sequence[Instruction]:
        """Returns what to do while a round goes on; the round will train on the `ready` groups, whatever else comes."""
        pace, now = coordinator.pace, coordinator.now
        if coordinator.awaiting or not ready or not (pace.training and pace.growth) or now < self._next:
            return []
        groups = tuple(entry.group() for entry in ready)
        seconds = trained_tokens(groups) / pace.training
        self._next = now + seconds / _LOOKS
        if probability(coordinator, seconds) < self.settings.confidence:
            return []
        self.begun += 1
        return [Accumulate(coordinator.step + 1, groups)]


def probability(coordinator: Coordinator, seconds: float) -> float:
    """Returns the predicted probability that the groups which the batch lacks are complete within this time; their
    rewards may come later. Of more prompts than are needed, those count that are likeliest to be in time."""
    ledger = coordinator.ledger
    missing = coordinator.settings.prompts_per_step - ledger.count(
        PromptStage.COMPLETE, PromptStage.SCORED, PromptStage.TRAINING
    )
    running = sorted((_in_time(coordinator, entry, seconds) for entry in ledger.at(PromptStage.RUNNING)), reverse=True)
    if coordinator.exhausted:
        missing = min(missing, len(running) + ledger.count(PromptStage.STOPPING))
    return math.prod(running[: max(missing, 0)], start=1.0) if missing <= len(running) else 0.0


def _in_time(coordinator: Coordinator, entry: Entry, seconds: float) -> float:
    """Returns the probability that enough responses of a group end within this time, taken for independent."""
    pace, lengths, now = coordinator.pace, coordinator.lengths, coordinator.now
    chances = []
    for sample in set(range(entry.n)) - entry.responses.keys():
        tokens = max(pace.tokens(response_id(entry.prompt.draw, entry.attempt, sample), now), entry.longest)
        chances.append(lengths.ends_by(entry.prompt, tokens + int(pace.growth * seconds), running=tokens))
    return math.prod(sorted(chances, reverse=True)[: entry.need - len(entry.responses)], start=1.0)
