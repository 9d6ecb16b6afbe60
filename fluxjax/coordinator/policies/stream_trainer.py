"""The stream trainer: gradients of complete groups while the rest of the round is generated (Flexes, section 4.4).

Engines run out of work towards the end of a round. At milestones of its progress, it is asked whether the others could
hold everything that still runs: the projected peak of their caches decides. If so, half of the engines are lent to
training until the round is over. What runs on them goes on elsewhere, from where it is: its tokens are kept, its cache
is computed again. The devices of the lent engines then compute the gradients of what is complete, a few groups at a
time; the update waits for the end of the round, so that nothing is ever trained on older weights than without this.
"""

import dataclasses
import math
from collections.abc import Sequence

from ...config import StreamTrainerConfig
from ..ledger import Entry, PromptStage
from ..machine import Coordinator
from ..messages import Accumulate, Instruction, Lend


@dataclasses.dataclass(eq=False)
class StreamTrainer:
    """A helper that policies which train in rounds ask when they would wait. `lent` and `refused` are for displays."""

    settings: StreamTrainerConfig = dataclasses.field(default_factory=StreamTrainerConfig)
    lent: int = dataclasses.field(default=0, init=False)  # rounds in which engines were lent
    refused: int = dataclasses.field(default=0, init=False)  # milestones at which the projection was against it
    _looked: float = dataclasses.field(default=0.0, init=False)  # progress of the round at the last milestone

    def reset(self) -> None:
        """Ends a round."""
        self._looked = 0.0

    def consult(self, coordinator: Coordinator, ready: Sequence[Entry]) -> Sequence[Instruction]:
        """Returns what to do while a round goes on; the round will train on the `ready` groups, whatever else comes."""
        if coordinator.awaiting:
            return []
        if not coordinator.fleet.lent:
            return self._scale_down(coordinator)
        chunk = self.settings.chunk or math.ceil(coordinator.settings.prompts_per_step / 8)
        if len(ready) < chunk:
            return []
        # No larger portions: when the round ends, training goes on on all devices as soon as one is done.
        groups = tuple(entry.group() for entry in ready[:chunk])
        return [Accumulate(coordinator.step + 1, groups, tuple(sorted(coordinator.fleet.lent)))]

    def _scale_down(self, coordinator: Coordinator) -> Sequence[Instruction]:
        """Decides whether half of the engines are lent to training: algorithm 1, lines 14 to 21."""
        settings, progress = self.settings, _progress(coordinator)
        if not settings.first <= progress <= settings.last or progress - self._looked < settings.every:
            return []
        self._looked = progress
        fleet = coordinator.fleet
        spared = sorted(range(len(fleet)), key=lambda engine: (fleet.load[engine], -engine))[: len(fleet) // 2]
        capacity = fleet.kv_tokens * (len(fleet) - len(spared))
        if not spared or (capacity and projected_tokens(coordinator) > capacity):
            self.refused += 1
            return []
        self.lent += 1
        moved = [entry for entry in coordinator.ledger.at(PromptStage.RUNNING) if entry.engine in spared]
        return [*(entry.park(keep=True) for entry in moved), Lend(tuple(sorted(spared)))]


def projected_tokens(coordinator: Coordinator) -> float:
    """Predicts the tokens in all caches when everything that runs now has its predicted length.

    Responses of a group begin together and grow at the same pace: one that still runs is at least as long as those of
    its group that have ended.
    """
    total, reserved = 0.0, coordinator.settings.kv_reserved
    for entry in coordinator.ledger.at(PromptStage.RUNNING):
        tokens = entry.prompt.tokens + coordinator.lengths.predict(entry.prompt, running=entry.longest).mean
        total += (entry.n - len(entry.responses)) * max(tokens, reserved)
    return total


def _progress(coordinator: Coordinator) -> float:
    """Returns the share of the round's responses that have ended."""
    ledger = coordinator.ledger
    over = sum(entry.n for entry in ledger.at(PromptStage.COMPLETE, PromptStage.SCORED, PromptStage.TRAINING))
    running = ledger.at(PromptStage.RUNNING, PromptStage.STOPPING)
    done = over + sum(len(entry.responses) for entry in running)
    return done / max(over + sum(entry.n for entry in running), 1)
