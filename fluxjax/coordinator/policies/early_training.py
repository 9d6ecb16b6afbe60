"""Two helpers begin training before a round is over. Policies that train in rounds consult these helpers.

The stream trainer computes gradients of complete groups while other responses are generated (Flexes, section 4.4).

Engines run out of work towards the end of a round. At milestones of the round, the helper projects whether the caches
of half of the engines can hold all running responses. If the caches suffice, the other engines are lent to training
until the round is over. The responses on lent engines continue on other engines: their tokens stay, their cache is
computed again. The devices of the lent engines then compute the gradients of complete groups, a few groups at a time.
The update waits for the end of the round, so that the trained tokens are no older than without this helper.

Speculative sync begins to train before a batch is complete, if the batch is predicted to be complete in time.

Source: Flux, insight 2 and its table ("predicts long-tail rollouts, starts training early"). The gradients of the
complete groups take some time. If the missing responses are predicted to end within that time, with at least the set
confidence, these gradients are computed at once, on the trainer's devices; the update waits for the missing groups.
Training is thus exactly as on-policy as without the helper. A wrong prediction costs only time, and only if engines and
trainer share devices: the running responses then end later.
"""

import dataclasses
import math
from collections.abc import Sequence

from ..engine_states import trained_tokens
from ..ledger import Entry, PromptStage
from ..machine import Coordinator
from ..messages import Accumulate, Instruction, Lend, response_id

_LOOKS = 16  # predictions made in the time that the gradients take; each prediction looks at all running responses


@dataclasses.dataclass(eq=False)
class StreamTrainer:
    """A helper that round policies consult when they would wait. `lent` and `refused` are for displays. `consult`
    returns the next instructions of a round, which trains on the `ready` groups in any case. `reset` ends a round."""

    chunk: int = 0  # groups of a portion; 0: an eighth of a step
    first: float = 0.2  # share of a round's ended responses at which lending is first considered
    last: float = 0.5  # share at which lending is last considered
    every: float = 0.05  # share between two milestones
    lent: int = dataclasses.field(default=0, init=False)  # rounds in which engines were lent
    refused: int = dataclasses.field(default=0, init=False)  # milestones at which the projection refused to lend
    _looked: float = dataclasses.field(default=0.0, init=False)  # progress of the round at the last milestone

    def reset(self) -> None:
        self._looked = 0.0

    def consult(self, coordinator: Coordinator, ready: Sequence[Entry]) -> Sequence[Instruction]:
        if coordinator.awaiting:
            return []
        if not coordinator.fleet.lent:
            return self._scale_down(coordinator)
        chunk = self.chunk or math.ceil(coordinator.settings.prompts_per_step / 8)
        if len(ready) < chunk:
            return []
        # Portions are small because training on all devices waits, when the round ends, for the portion under way.
        groups = tuple(entry.group() for entry in ready[:chunk])
        return [Accumulate(coordinator.step + 1, groups, tuple(sorted(coordinator.fleet.lent)))]

    def _scale_down(self, coordinator: Coordinator) -> Sequence[Instruction]:
        """Decides whether half of the engines are lent to training (Flexes, algorithm 1, lines 14 to 21)."""
        ledger = coordinator.ledger
        over = sum(entry.n for entry in ledger.at(PromptStage.COMPLETE, PromptStage.SCORED, PromptStage.TRAINING))
        running = ledger.at(PromptStage.RUNNING, PromptStage.STOPPING)
        done = over + sum(len(entry.responses) for entry in running)
        progress = done / max(over + sum(entry.n for entry in running), 1)  # share of the round's responses that ended
        if not self.first <= progress <= self.last or progress - self._looked < self.every:
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
    """Predicts the tokens in all caches when all running responses have their predicted lengths. A group's responses
    begin together and grow at one pace, so that a running response is at least as long as the ended ones."""
    total, reserved = 0.0, coordinator.settings.kv_reserved
    for entry in coordinator.ledger.at(PromptStage.RUNNING):
        tokens = entry.prompt.tokens + coordinator.lengths.predict(entry.prompt, running=entry.longest)
        total += (entry.n - len(entry.responses)) * max(tokens, reserved)
    return total


@dataclasses.dataclass(eq=False)
class SpeculativeSync:
    """A helper that round policies consult when they would wait. Its methods are those of `StreamTrainer`."""

    confidence: float = 0.5  # training begins early if the missing responses end in time with at least this probability
    begun: int = dataclasses.field(default=0, init=False)  # times that training began early
    _next: float = dataclasses.field(default=0.0, init=False)  # time of the next prediction

    def reset(self) -> None:
        self._next = 0.0

    def consult(self, coordinator: Coordinator, ready: Sequence[Entry]) -> Sequence[Instruction]:
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
    """Returns the predicted probability that the batch's missing groups are complete within `seconds`; the groups'
    rewards may arrive later. If more prompts run than are needed, the likeliest prompts count."""
    ledger = coordinator.ledger
    ended = ledger.count(PromptStage.COMPLETE, PromptStage.SCORED, PromptStage.TRAINING)
    missing = coordinator.settings.prompts_per_step - ended
    running = sorted((_in_time(coordinator, entry, seconds) for entry in ledger.at(PromptStage.RUNNING)), reverse=True)
    if coordinator.exhausted:
        missing = min(missing, len(running) + ledger.count(PromptStage.STOPPING))
    return math.prod(running[: max(missing, 0)], start=1.0) if missing <= len(running) else 0.0


def _in_time(coordinator: Coordinator, entry: Entry, seconds: float) -> float:
    """Returns the probability that enough responses of a group end within `seconds`, if responses are independent."""
    pace, lengths, now = coordinator.pace, coordinator.lengths, coordinator.now
    chances = []
    for sample in set(range(entry.n)) - entry.responses.keys():
        waits = entry.acting.get(sample)
        tokens = max(pace.tokens(response_id(entry.prompt.draw, entry.attempt, sample), now), entry.longest)
        tokens = tokens if waits is None else max(tokens, waits.num_tokens)
        chances.append(lengths.ends_by(entry.prompt, tokens + int(pace.growth * seconds), running=tokens))
    return math.prod(sorted(chances, reverse=True)[: entry.need - len(entry.responses)], start=1.0)
