"""The common part of policies that train in rounds: scoring, failures, and the actions between two rounds.
`Synchronous` is the simplest of these policies.

A round ends with a training step and the publication of the step's weights. Evaluations and checkpoints come between
rounds. Gradients of some groups may be computed while a round goes on.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...base.types import Group, SavedState, State
from .. import messages
from ..ledger import CoordinatorError, Entry, PromptStage, RunGivenUp
from ..machine import Coordinator

if TYPE_CHECKING:
    from .early_training import SpeculativeSync, StreamTrainer

_PATIENCE = 3  # prompts given up in a row, without a response in between, after which the engines count as lost
NO_VARIANCE = "dynamic sampling finds no difference between its responses"


class EngineLost(RunGivenUp):
    """Prompt after prompt fails on the engines and no response arrives: a longer run would only use up the data."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Base:
    """The part that all policies have in common."""

    dynamic_sampling: bool = False
    _failed: int = dataclasses.field(default=0, init=False)  # prompts given up in a row, with no response in between
    _accepted: int = dataclasses.field(default=0, init=False)  # `Ledger.accepted` when the last prompt was given up

    def metrics(self) -> dict[str, float]:
        return {}

    def _urgent(self, coordinator: Coordinator) -> Sequence[messages.Instruction]:
        """Returns the instructions that are due at once, in any situation."""
        ledger = coordinator.ledger
        if ledger.unscored:
            return [messages.Score(response) for response in ledger.unscored.values()]
        if ledger.surplus:
            return [messages.Abort(rid) for rid in ledger.surplus]
        if ledger.unacted:
            return [messages.Act(response) for response in ledger.unacted.values()]
        if ledger.unturned:
            turns = [(ledger.entries[response.draw], response) for response in ledger.unturned.values()]
            return [messages.Continue(tuple(messages.Turn(e.prompt, response, e.engine) for e, response in turns))]
        if ledger.count(PromptStage.LOST):
            return self._again(coordinator, ledger.at(PromptStage.LOST)[0])
        # Groups without variance teach nothing (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2).
        scored = ledger.at(PromptStage.SCORED) if self.dynamic_sampling else []
        return [messages.Skip(entry.prompt, NO_VARIANCE) for entry in scored if not entry.varied]

    def _again(self, coordinator: Coordinator, entry: Entry) -> Sequence[messages.Instruction]:
        """Generates a lost group again, or skips its prompt after `max_attempts` failures. Raises EngineLost."""
        abort = messages.Abort(messages.request_id(entry.prompt.draw, entry.attempt))  # responses may still run
        if entry.failures < coordinator.settings.max_attempts:
            return [abort, *generate(coordinator, [entry], entry.n, entry.need, avoid=entry.engine)]
        accepted = coordinator.ledger.accepted
        self._failed = self._failed + 1 if accepted == self._accepted else 1
        self._accepted = accepted
        if self._failed >= _PATIENCE:
            raise EngineLost(
                f"{self._failed} prompts in a row failed {entry.failures} times each and no response came back; "
                f"the last time because: {entry.failure}"
            )
        return [abort, messages.Skip(entry.prompt, f"failed {entry.failures} times, last: {entry.failure}")]

    def _due(self, coordinator: Coordinator) -> Sequence[messages.Instruction]:
        """Returns the instruction after a step, if any: evaluation, checkpoint, the end of the run."""
        stopped = coordinator.stop_reason
        evaluation = coordinator.evaluation_due()
        if evaluation and not stopped:  # a stop should be quick; the resumed run evaluates
            return [evaluation]
        if checkpoint := coordinator.checkpoint_due():
            return [checkpoint]
        if coordinator.ending and not evaluation:
            return [messages.Finish(coordinator.step, coordinator.ending)]
        if stopped:
            return [messages.Finish(coordinator.step, stopped, complete=False)]
        return []


@dataclasses.dataclass(eq=False, kw_only=True)
class Rounds(Base, abc.ABC):
    """The base of policies that train in rounds: subclasses define a round's beginning, its course, and its groups.
    While a round waits for responses, `stream` and `speculative` may order gradients of complete groups. No token
    that is more than `max_staleness` versions old is trained on."""

    stream: StreamTrainer | None = None
    speculative: SpeculativeSync | None = None
    max_staleness = 0  # a constant, unless a subclass makes it a field

    def decide(self, coordinator: Coordinator) -> Sequence[messages.Instruction]:
        if urgent := self._urgent(coordinator):
            return urgent
        if coordinator.awaiting.keys() - {messages.Accumulate, messages.Lend}:
            return []
        if degree := self._other_degree(coordinator):  # before new weights go to the engines
            return [messages.SetParallelism(degree)]
        if coordinator.served != coordinator.version:
            return [messages.PublishWeights(coordinator.version)]
        if not self._in_round(coordinator) or self._given_up(coordinator):
            return self._between(coordinator)
        return self._round(coordinator) or self._early(coordinator)

    @property
    def _helpers(self) -> Sequence[StreamTrainer | SpeculativeSync]:
        return [helper for helper in (self.stream, self.speculative) if helper is not None]

    @abc.abstractmethod
    def _in_round(self, coordinator: Coordinator) -> bool: ...

    def _begin(self, coordinator: Coordinator) -> Sequence[messages.Instruction]:
        """Opens a round; earlier rounds may have left deferred prompts."""
        return self._round(coordinator)

    @abc.abstractmethod
    def _round(self, coordinator: Coordinator) -> Sequence[messages.Instruction]:
        """Returns the instructions within a round. Must not end the round unless `coordinator.awaiting` is empty."""

    def _given_up(self, coordinator: Coordinator) -> bool:
        """Returns True if a stop ends the round at once, since dynamic sampling may delay the step's end for ever.
        Scored groups stay in the books, and the resumed run continues with these groups."""
        return bool(coordinator.stop_reason and coordinator.ledger.dropped and self._missing(coordinator) > 0)

    def _missing(self, coordinator: Coordinator) -> int:
        trained = coordinator.ledger.count(PromptStage.SCORED, PromptStage.TRAINING)
        return coordinator.settings.prompts_per_step - trained

    def _ready(self, coordinator: Coordinator) -> Sequence[Entry]:
        """Returns the scored groups that the round will train on in any case."""
        ledger = coordinator.ledger
        left = coordinator.settings.prompts_per_step - ledger.count(PromptStage.TRAINING)
        return ledger.at(PromptStage.SCORED)[: max(left, 0)]

    def _early(self, coordinator: Coordinator) -> Sequence[messages.Instruction]:
        """Returns the instructions that begin the round's training while the round waits for responses."""
        if not self._helpers or not self._in_round(coordinator):
            return []
        ready = self._ready(coordinator)
        said = next(filter(None, (helper.consult(coordinator, ready) for helper in self._helpers)), [])
        for order in said:
            if isinstance(order, messages.Accumulate):
                self._check_versions(coordinator, order.groups)
        return said

    def _train(self, coordinator: Coordinator, entries: Sequence[Entry]) -> Sequence[messages.Instruction]:
        groups = tuple(entry.group() for entry in entries)
        self._check_versions(coordinator, groups)
        return [messages.Train(coordinator.step + 1, groups)]

    def _check_versions(self, coordinator: Coordinator, groups: Sequence[Group]) -> None:
        oldest = coordinator.version - self.max_staleness
        for sample in (sample for group in groups for sample in group.samples):
            response = sample.response
            if response.num_trained and response.version_span[0] < oldest:
                raise CoordinatorError(
                    f"response {response.rid} has tokens of versions {sorted(set(response.versions))}, but training "
                    f"needs version {oldest} or newer"
                )

    def _other_degree(self, coordinator: Coordinator) -> int:
        """Returns the number of devices that an engine should have from now on; 0 if the number does not change now."""
        planner, ledger = coordinator.parallelism, coordinator.ledger
        if planner is None or planner.degree == coordinator.fleet.degree or self._in_round(coordinator):
            return 0
        late = coordinator.awaiting or coordinator.ending or coordinator.stop_reason
        return 0 if late or ledger.count(PromptStage.RUNNING, PromptStage.STOPPING) else planner.degree

    def _between(self, coordinator: Coordinator) -> Sequence[messages.Instruction]:
        if coordinator.awaiting or coordinator.ledger.count(PromptStage.STOPPING):
            return []
        for helper in self._helpers:
            helper.reset()
        if lent := coordinator.fleet.lent:  # no step was trained: the lent engines get the present weights
            return [messages.PublishWeights(coordinator.version, tuple(sorted(lent)))]
        last = coordinator.ending or coordinator.stop_reason
        # a request that runs between rounds was lost after a park, and began again
        if last and (begun := coordinator.ledger.at(PromptStage.RUNNING)):
            return [entry.park(keep=True) for entry in begun]
        return self._due(coordinator) or self._begin(coordinator)

    def _moving(self, coordinator: Coordinator) -> Sequence[Entry]:
        """Returns the deferred prompts of lent engines, to be continued on other engines under the same weights."""
        if not coordinator.fleet.lent:
            return []
        deferred = coordinator.ledger.at(PromptStage.DEFERRED)
        return [entry for entry in deferred if entry.born == coordinator.version and entry.so_far()]

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: SavedState) -> None:
        """Restores nothing: between rounds the books contain everything."""


def generate(
    coordinator: Coordinator,
    entries: Sequence[Entry],
    n: int,
    need: int,
    *,
    keep: Callable[[Entry], bool] = lambda entry: False,
    engines: Sequence[int] = (),
    avoid: int = -1,
) -> Sequence[messages.Instruction]:
    """Returns the instruction to generate each entry on the engine of `engines` (empty: of all) that is not lent and
    has the least predicted work. Engine `avoid` gets entries only if all other engines are lent or not among `engines`.
    Entries with `keep(entry)` continue their begun responses, with as many responses as before."""
    fleet = coordinator.fleet
    loads, requests = list(fleet.load), []
    for entry in entries:
        begun = entry.so_far() if keep(entry) else ()
        engine = fleet.route(loads, engines or range(len(fleet)), avoid)
        first = next(filter(None, begun), None)
        if first is not None:  # the group keeps the temperature of its first tokens
            count, wanted, temperature = entry.n, entry.need, first.temperature
        else:
            count, wanted, temperature = n, need, coordinator.scheduled("temperature", None, entry.prompt)
        loads[engine] += count * coordinator.lengths.predict(entry.prompt) + coordinator.work_of(entry.prompt)
        requests.append(messages.Request(entry.prompt, count, entry.attempt + 1, wanted, engine, begun, temperature))
    return [messages.Generate(tuple(requests))]


class Synchronous(Rounds):
    """Strictly on-policy training, step by step, with which every other policy is compared. All groups of a step are
    generated under one weight version, and trained on in draw order. Evaluations and checkpoints come between steps."""

    def _in_round(self, coordinator: Coordinator) -> bool:
        return coordinator.ledger.live > 0

    def _round(self, coordinator: Coordinator) -> Sequence[messages.Instruction]:
        ledger, settings = coordinator.ledger, coordinator.settings
        size = settings.group_size
        missing = settings.prompts_per_step - ledger.live
        if missing > 0 and not coordinator.exhausted:
            return [messages.DrawPrompts(missing)]
        # A prompt is deferred if its engine was lent, or if another policy's run was resumed with this policy.
        if waiting := ledger.at(PromptStage.DEFERRED, PromptStage.WAITING):
            moving = {entry.prompt.draw for entry in self._moving(coordinator) if entry.need == size}
            return generate(coordinator, waiting, size, size, keep=lambda entry: entry.prompt.draw in moving)
        if ledger.count(PromptStage.RUNNING, PromptStage.STOPPING, PromptStage.COMPLETE) or coordinator.awaiting:
            return []
        return self._train(coordinator, ledger.at(PromptStage.SCORED))
