"""Speculative sync: training begins before a batch is complete, if the batch is predicted to be complete in time.

Source: Flux, insight 2 and its table ("predicts long-tail rollouts, starts training early"). The gradients of the
complete groups take some time. If the missing responses are predicted to end within that time, with at least the set
confidence, these gradients are computed now, on the trainer's devices; the update waits for the rest of the batch. So
training stays exactly as on-policy as without it. A wrong prediction costs only time, and only if engines and trainer
share devices: the running responses then end later.
"""

import dataclasses
import math
from collections.abc import Sequence

from ..engine_states import trained_tokens
from ..ledger import Entry, PromptStage
from ..machine import Coordinator
from ..messages import Accumulate, Instruction, response_id

_LOOKS = 16  # predictions made in the time that the gradients take; each costs work for many responses


@dataclasses.dataclass(eq=False)
class SpeculativeSync:
    """A helper that policies which train in rounds ask when they would wait."""

    confidence: float = 0.5  # that the rest ends while gradients of what is there are computed
    begun: int = dataclasses.field(default=0, init=False)  # times that training began early
    _next: float = dataclasses.field(default=0.0, init=False)  # time of the next prediction

    def reset(self) -> None:
        """Ends a round."""
        self._next = 0.0

    def consult(self, coordinator: Coordinator, ready: Sequence[Entry]) -> Sequence[Instruction]:
        """Returns the next instructions within a round; the round trains on the `ready` groups in any case."""
        pace, now = coordinator.pace, coordinator.now
        if coordinator.awaiting or not ready or not (pace.training and pace.growth) or now < self._next:
            return []
        groups = tuple(entry.group() for entry in ready)
        seconds = trained_tokens(groups) / pace.training
        self._next = now + seconds / _LOOKS
        if probability(coordinator, seconds) < self.confidence:
            return []
        self.begun += 1
        return [Accumulate(coordinator.step + 1, groups)]


def probability(coordinator: Coordinator, seconds: float) -> float:
    """Returns the predicted probability that the groups which the batch lacks are complete within `seconds`; their
    rewards may come later. If more prompts run than are needed, the likeliest count."""
    ledger = coordinator.ledger
    missing = coordinator.settings.prompts_per_step - ledger.count(
        PromptStage.COMPLETE, PromptStage.SCORED, PromptStage.TRAINING
    )
    running = sorted((_in_time(coordinator, entry, seconds) for entry in ledger.at(PromptStage.RUNNING)), reverse=True)
    if coordinator.exhausted:
        missing = min(missing, len(running) + ledger.count(PromptStage.STOPPING))
    return math.prod(running[: max(missing, 0)], start=1.0) if missing <= len(running) else 0.0


def _in_time(coordinator: Coordinator, entry: Entry, seconds: float) -> float:
    """Returns the probability that enough responses of a group end within `seconds`, as if they were independent."""
    pace, lengths, now = coordinator.pace, coordinator.lengths, coordinator.now
    chances = []
    for sample in set(range(entry.n)) - entry.responses.keys():
        tokens = max(pace.tokens(response_id(entry.prompt.draw, entry.attempt, sample), now), entry.longest)
        chances.append(lengths.ends_by(entry.prompt, tokens + int(pace.growth * seconds), running=tokens))
    return math.prod(sorted(chances, reverse=True)[: entry.need - len(entry.responses)], start=1.0)
