"""Reads from a run's trace of events and instructions what became of every prompt, without looking into the
coordinator.

These books are kept apart from the coordinator's `Ledger` on purpose: a policy's promises are checked with them, and a
fault in the ledger must not hide itself.
"""

import dataclasses
from typing import Final

from fluxjax.base.types import Group, Prompt, Response, Reward, Sample, without_rounding
from fluxjax.coordinator import messages
from fluxjax.coordinator.ledger import ABORTED, PromptStage
from fluxjax.coordinator.messages import Handlers

UNDER_WAY = (PromptStage.RUNNING, PromptStage.STOPPING, PromptStage.COMPLETE, PromptStage.LOST)


@dataclasses.dataclass
class Seen:
    """A prompt that is neither trained on nor skipped yet; responses and rewards by sample."""

    prompt: Prompt
    stage: PromptStage = PromptStage.WAITING
    request: messages.Request | None = None  # the newest one
    born: int = -1  # weight version of the engine when the oldest of its responses began
    failures: int = 0
    ended: dict[int, Response] = dataclasses.field(default_factory=dict)
    partial: dict[int, Response] = dataclasses.field(default_factory=dict)  # what aborted responses had
    rewards: dict[int, Reward] = dataclasses.field(default_factory=dict)
    acting: dict[int, Response] = dataclasses.field(default_factory=dict)  # an ended turn that nobody answered yet
    observed: dict[int, Response] = dataclasses.field(default_factory=dict)  # an answer that begins the next turn
    turns: dict[int, int] = dataclasses.field(default_factory=dict)  # tokens that the present turn began with

    @property
    def draw(self) -> int:
        return self.prompt.draw

    def kept(self) -> tuple[Response | None, ...]:
        """Returns the part of each response that is there; empty if no response has any."""
        n = self.request.n if self.request is not None else 0
        found = tuple(self.ended.get(i) or self.partial.get(i) for i in range(n))
        return found if any(found) else ()

    def group(self) -> Group:
        return Group(self.prompt, tuple(Sample(self.ended[i], self.rewards[i]) for i in sorted(self.ended)))

    def varied(self, by: str) -> bool:
        return len(set(without_rounding([float(getattr(reward, by)) for reward in self.rewards.values()]))) > 1


class Books:
    """The books of one run: `hear` an event, `say` an instruction, in their order. `running` has the engine of every
    response under way."""

    def __init__(self, engines: int) -> None:
        self.prompts: dict[int, Seen] = {}  # by draw
        self.served = [-1] * engines
        self.lent: set[int] = set()
        self.version, self.step = -1, 0
        self.exhausted, self.stop = False, ""
        self.awaiting: dict[type, messages.Instruction] = {}
        self.running: dict[str, int] = {}
        self.unscored: set[str] = set()  # whole responses that nobody was told to score yet
        self.scoring: set[str] = set()
        self.unacted: set[str] = set()  # ended turns that no environment was told of yet
        self.surplus: set[str] = set()  # of groups that are complete: to be aborted
        self.finished = False

    def at(self, *stages: PromptStage) -> list[Seen]:
        """Returns the prompts at some stages, in draw order."""
        return [self.prompts[draw] for draw in sorted(self.prompts) if self.prompts[draw].stage in stages]

    def count(self, *stages: PromptStage) -> int:
        return sum(seen.stage in stages for seen in self.prompts.values())

    def of(self, rid: str) -> Seen | None:
        """Returns the prompt of a request or a response."""
        return self.prompts.get(int(rid.partition(".")[0]))

    # --- events ---------------------------------------------------------------------------------

    _hear: Final = Handlers(messages.Event)
    _say: Final = Handlers(messages.Instruction)

    def hear(self, event: messages.Event) -> Seen | None:
        """Returns the prompt whose group is scored by this event, if one is."""
        scored = self._hear[type(event)](self, event)
        if type(event) in messages.ANSWERS:
            self.awaiting.pop(messages.ANSWERS[type(event)], None)
        return scored

    @_hear.of(messages.Accumulated, messages.CheckpointSaved, messages.Evaluated, messages.Lent, messages.Tick)
    def _only_answered(self, event: messages.Event) -> None:
        """Notes only that the instruction is answered: nothing else changes with this event."""

    @_hear.of(messages.Started)
    def _started(self, event: messages.Started) -> None:
        self.served, self.version = [event.version] * len(self.served), max(self.version, event.version)

    @_hear.of(messages.PromptsDrawn)
    def _drawn(self, event: messages.PromptsDrawn) -> None:
        order = self.awaiting[messages.DrawPrompts]
        assert isinstance(order, messages.DrawPrompts)
        self.exhausted = len(event.prompts) + len(event.skipped) < order.count
        self.prompts |= {prompt.draw: Seen(prompt) for prompt in event.prompts}

    @_hear.of(messages.EngineFailed)
    def _failed(self, event: messages.EngineFailed) -> None:
        for request in event.request_ids:
            self._end(request)
            seen = self.of(request)
            if seen and seen.request and seen.request.rid == request and seen.stage in UNDER_WAY[:2]:
                self._lose(seen)

    @_hear.of(messages.Trained)
    def _trained(self, event: messages.Trained) -> None:
        self.version, self.step = event.version, self.step + 1
        self.prompts = {d: seen for d, seen in self.prompts.items() if seen.stage is not PromptStage.TRAINING}

    @_hear.of(messages.WeightsPublished)
    def _published(self, event: messages.WeightsPublished) -> None:
        order = self.awaiting[messages.PublishWeights]
        assert isinstance(order, messages.PublishWeights)
        for engine in order.engines or range(len(self.served)):
            self.served[engine] = event.version
            self.lent.discard(engine)

    @_hear.of(messages.ParallelismSet)
    def _parallelism(self, event: messages.ParallelismSet) -> None:
        self.served, self.lent, self.running = [min(self.served)] * event.engines, set(), {}

    @_hear.of(messages.StopRequested)
    def _stop(self, event: messages.StopRequested) -> None:
        self.stop = self.stop or event.reason or "stopped"

    @_hear.of(messages.ResponseFinished)
    def _finished(self, event: messages.ResponseFinished) -> None:
        response, seen = event.response, self.prompts.get(event.response.draw)
        self.running.pop(response.rid, None)
        if seen is None or seen.request is None or response.rid.partition("/")[0] != seen.request.rid:
            return
        if response.num_tokens < seen.turns.get(response.sample, 0):
            self.running |= {response.rid: seen.request.engine} if self._generates(seen, response.sample) else {}
            return  # of an earlier turn
        if response.sample in seen.acting or response.sample in seen.observed:
            return
        if response.sample in seen.ended or seen.stage not in (PromptStage.RUNNING, PromptStage.STOPPING):
            self.surplus.discard(response.rid)
            return
        if seen.stage is PromptStage.STOPPING and response.sample in seen.partial:
            return
        if response.finish == ABORTED:
            if seen.stage is PromptStage.RUNNING:
                self._lose(seen)
                return
            seen.partial[response.sample] = response
        elif seen.prompt.environment and response.finish == "stop":
            if seen.stage is PromptStage.RUNNING:
                seen.acting[response.sample] = response
                self.unacted.add(response.rid)
                return
            seen.partial[response.sample] = dataclasses.replace(response, finish=ABORTED)
        else:
            self._ends(seen, response)
        self._complete(seen)

    def _ends(self, seen: Seen, response: Response) -> None:
        seen.ended[response.sample] = response
        self.unscored.add(response.rid)

    @staticmethod
    def _generates(seen: Seen, sample: int) -> bool:
        """Says whether an engine generates a turn of this sample now."""
        waits = sample in seen.acting or sample in seen.observed or sample in seen.ended
        return seen.stage is PromptStage.RUNNING and not waits

    @_hear.of(messages.TurnObserved)
    def _observed(self, event: messages.TurnObserved) -> None:
        response, seen = event.response, self.of(event.response.rid)
        if seen is None or seen.stage is not PromptStage.RUNNING or response.sample not in seen.acting:
            return
        if seen.acting[response.sample].rid != response.rid:
            return
        del seen.acting[response.sample]
        if event.done:
            self._ends(seen, response)
            self._complete(seen)
        else:
            seen.observed[response.sample] = response

    @_hear.of(messages.EnvironmentFailed)
    def _environment_failed(self, event: messages.EnvironmentFailed) -> None:
        seen, sample = self.of(event.rid), int(event.rid.partition("/")[2])
        if (
            seen
            and seen.stage is PromptStage.RUNNING
            and sample in seen.acting
            and seen.acting[sample].rid == event.rid
        ):
            self._end(event.rid.partition("/")[0])
            self._lose(seen)

    def _complete(self, seen: Seen) -> None:
        assert seen.request is not None
        need = seen.request.need or seen.request.n
        if len(seen.ended) == need:
            if seen.stage is PromptStage.RUNNING:
                self.surplus |= {f"{seen.request.rid}/{i}" for i in range(seen.request.n) if i not in seen.ended}
            seen.partial = {}
            self._end_turns(seen)
            seen.stage = PromptStage.SCORED if len(seen.rewards) == need else PromptStage.COMPLETE
        elif seen.stage is PromptStage.STOPPING and len(seen.ended) + len(seen.partial) == seen.request.n:
            seen.stage = PromptStage.DEFERRED

    @_hear.of(messages.RewardReady)
    def _reward(self, event: messages.RewardReady) -> Seen | None:
        rid, seen = event.rid, self.of(event.rid)
        sample = int(rid.partition("/")[2])
        if seen is None or sample not in seen.ended or seen.ended[sample].rid != rid or sample in seen.rewards:
            return None
        self.scoring.discard(rid)
        seen.rewards[sample] = event.reward
        if seen.stage is not PromptStage.COMPLETE or len(seen.rewards) != len(seen.ended):
            return None
        seen.stage = PromptStage.SCORED
        return seen

    # --- instructions ---------------------------------------------------------------------------

    def say(self, instruction: messages.Instruction) -> None:
        if type(instruction) in messages.ANSWERED:
            self.awaiting[type(instruction)] = instruction
        self._say[type(instruction)](self, instruction)

    @_say.of(
        messages.DrawPrompts,
        messages.Evaluate,
        messages.PublishWeights,
        messages.SaveCheckpoint,
        messages.SetParallelism,
    )
    def _only_awaited(self, order: messages.Instruction) -> None:
        """Notes only that an answer is awaited: everything else changes with the answer."""

    @_say.of(messages.Generate)
    def _generate(self, order: messages.Generate) -> None:
        for request in order.requests:
            seen = self.prompts[request.prompt.draw]
            if not request.begun:
                self._forget(seen)
                seen.born = self.served[request.engine]
            seen.partial, seen.turns = {}, {}
            seen.request, seen.stage = request, PromptStage.RUNNING
            for sample in range(request.n):
                before = request.begun[sample] if request.begun else None
                if before is None or before.finish == ABORTED:
                    self.running[f"{request.rid}/{sample}"] = request.engine

    @_say.of(messages.Park)
    def _park(self, order: messages.Park) -> None:
        seen = self.prompts[order.prompt.draw]
        if order.keep:
            seen.stage = PromptStage.STOPPING
            kept = {k: dataclasses.replace(r, finish=ABORTED) for k, r in (seen.acting | seen.observed).items()}
            seen.partial |= kept
            self._end_turns(seen)
            self._complete(seen)
        else:
            self._end(seen.request.rid if seen.request else "")
            self._forget(seen)
            seen.stage = PromptStage.DEFERRED

    @_say.of(messages.Act)
    def _act(self, order: messages.Act) -> None:
        self.unacted.discard(order.response.rid)

    @_say.of(messages.Continue)
    def _continue(self, order: messages.Continue) -> None:
        for turn in order.turns:
            seen, response = self.prompts[turn.prompt.draw], turn.response
            seen.observed.pop(response.sample, None)
            seen.turns[response.sample] = response.num_tokens
            self.running[response.rid] = turn.engine

    @_say.of(messages.Abort)
    def _abort(self, order: messages.Abort) -> None:
        self.surplus.discard(order.rid)

    @_say.of(messages.Score)
    def _score(self, order: messages.Score) -> None:
        self.unscored.discard(order.response.rid)
        self.scoring.add(order.response.rid)

    @_say.of(messages.Skip)
    def _skip(self, order: messages.Skip) -> None:
        self._forget(self.prompts.pop(order.prompt.draw))

    @_say.of(messages.Accumulate, messages.Train)
    def _train(self, order: messages.Accumulate | messages.Train) -> None:
        for group in order.groups:
            self.prompts[group.prompt.draw].stage = PromptStage.TRAINING

    @_say.of(messages.Lend)
    def _lend(self, order: messages.Lend) -> None:
        self.lent |= set(order.engines)

    @_say.of(messages.Finish)
    def _end_of_run(self, order: messages.Finish) -> None:
        self.finished = True

    def _lose(self, seen: Seen) -> None:
        self._forget(seen)
        seen.failures += 1
        seen.stage = PromptStage.LOST

    def _forget(self, seen: Seen) -> None:
        rids = {response.rid for response in seen.ended.values()}
        self.unscored -= rids
        self.scoring -= rids
        if seen.request is not None:
            self.surplus -= {f"{seen.request.rid}/{i}" for i in range(seen.request.n)}
        self._end_turns(seen)
        seen.ended, seen.partial, seen.rewards = {}, {}, {}

    def _end_turns(self, seen: Seen) -> None:
        self.unacted -= {response.rid for response in seen.acting.values()}
        seen.acting, seen.observed = {}, {}

    def _end(self, request: str) -> None:
        """Notes that nothing of a request runs any more."""
        self.running = {rid: engine for rid, engine in self.running.items() if rid.partition("/")[0] != request}
