"""What a run's trace of events and instructions tells about every prompt, read without looking into the coordinator.

These books are kept apart from the coordinator's `Ledger` on purpose: what a policy promises is checked with them, and
a fault in the ledger must not hide itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ...base.types import Group, Prompt, Response, Reward, Sample
from ...coordinator.ledger import ABORTED, PromptStage
from ...coordinator.messages import (
    Abort,
    Accumulate,
    Accumulated,
    CheckpointSaved,
    DrawPrompts,
    EngineFailed,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Generate,
    Instruction,
    Lend,
    Lent,
    ParallelismSet,
    Park,
    PromptsDrawn,
    PublishWeights,
    Request,
    ResponseFinished,
    RewardReady,
    SaveCheckpoint,
    Score,
    SetParallelism,
    Skip,
    Started,
    StopRequested,
    Train,
    Trained,
    WeightsPublished,
)

_ANSWERS: dict[type, type] = {
    PromptsDrawn: DrawPrompts,
    Trained: Train,
    Accumulated: Accumulate,
    Lent: Lend,
    ParallelismSet: SetParallelism,
    WeightsPublished: PublishWeights,
    Evaluated: Evaluate,
    CheckpointSaved: SaveCheckpoint,
}
_ANSWERED = frozenset(_ANSWERS.values())
UNDER_WAY = (PromptStage.RUNNING, PromptStage.STOPPING, PromptStage.COMPLETE, PromptStage.LOST)


@dataclasses.dataclass
class Seen:
    """A prompt that is neither trained on nor skipped yet; responses and rewards by sample."""

    prompt: Prompt
    stage: PromptStage = PromptStage.WAITING
    request: Request | None = None  # the newest one
    born: int = -1  # weight version of the engine when the oldest of its responses began
    failures: int = 0
    ended: dict[int, Response] = dataclasses.field(default_factory=dict)
    partial: dict[int, Response] = dataclasses.field(default_factory=dict)  # what aborted responses had
    rewards: dict[int, Reward] = dataclasses.field(default_factory=dict)

    @property
    def draw(self) -> int:
        return self.prompt.draw

    def kept(self) -> tuple[Response | None, ...]:
        """What there is of each response; empty if there is nothing of any."""
        n = self.request.n if self.request is not None else 0
        found = tuple(self.ended.get(i) or self.partial.get(i) for i in range(n))
        return found if any(found) else ()

    def group(self) -> Group:
        return Group(self.prompt, tuple(Sample(self.ended[i], self.rewards[i]) for i in sorted(self.ended)))

    def varied(self) -> bool:
        return len({reward.value for reward in self.rewards.values()}) > 1


class Books:
    """`hear` an event, `say` an instruction, in their order. `running` has the engine of every response under way."""

    def __init__(self, engines: int) -> None:
        self.prompts: dict[int, Seen] = {}  # by draw
        self.served = [-1] * engines
        self.lent: set[int] = set()
        self.version, self.step = -1, 0
        self.exhausted, self.stop = False, ""
        self.awaiting: dict[type, Instruction] = {}
        self.running: dict[str, int] = {}
        self.unscored: set[str] = set()  # whole responses that nobody was told to score yet
        self.scoring: set[str] = set()
        self.surplus: set[str] = set()  # of groups that are complete: to be aborted
        self.finished = False

    def at(self, *stages: PromptStage) -> list[Seen]:
        """Those at some stages, in draw order."""
        return [self.prompts[draw] for draw in sorted(self.prompts) if self.prompts[draw].stage in stages]

    def count(self, *stages: PromptStage) -> int:
        return sum(seen.stage in stages for seen in self.prompts.values())

    def busy(self, engine: int) -> bool:
        return engine in self.running.values()

    # --- events ---------------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        order = self.awaiting.pop(_ANSWERS[type(event)], None) if type(event) in _ANSWERS else None
        match event:
            case Started(version):
                self.served, self.version = [version] * len(self.served), max(self.version, version)
            case PromptsDrawn(prompts, skipped):
                assert isinstance(order, DrawPrompts)
                self.exhausted = len(prompts) + len(skipped) < order.count
                self.prompts |= {prompt.draw: Seen(prompt) for prompt in prompts}
            case ResponseFinished(response):
                self.running.pop(response.rid, None)
                self._finish(response)
            case RewardReady(rid, reward):
                self._reward(rid, reward)
            case EngineFailed(requests):
                for request in requests:
                    self._end(request)
                    seen = self.prompts.get(int(request.partition(".")[0]))
                    if seen and seen.request and seen.request.rid == request and seen.stage in UNDER_WAY[:2]:
                        self._lose(seen)
            case Trained(version):
                self.version, self.step = version, self.step + 1
                self.prompts = {d: seen for d, seen in self.prompts.items() if seen.stage is not PromptStage.TRAINING}
            case WeightsPublished(version):
                assert isinstance(order, PublishWeights)
                for engine in order.engines or range(len(self.served)):
                    self.served[engine] = version
                    self.lent.discard(engine)
            case ParallelismSet(_, engines):
                self.served, self.lent, self.running = [min(self.served)] * engines, set(), {}
            case StopRequested(reason):
                self.stop = self.stop or reason or "stopped"

    def _finish(self, response: Response) -> None:
        seen = self.prompts.get(response.draw)
        if seen is None or seen.request is None or response.rid.partition("/")[0] != seen.request.rid:
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
        else:
            seen.ended[response.sample] = response
            self.unscored.add(response.rid)
        need = seen.request.need or seen.request.n
        if len(seen.ended) == need:
            if seen.stage is PromptStage.RUNNING:
                self.surplus |= {f"{seen.request.rid}/{i}" for i in range(seen.request.n) if i not in seen.ended}
            seen.partial = {}
            seen.stage = PromptStage.SCORED if len(seen.rewards) == need else PromptStage.COMPLETE
        elif seen.stage is PromptStage.STOPPING and len(seen.ended) + len(seen.partial) == seen.request.n:
            seen.stage = PromptStage.DEFERRED

    def _reward(self, rid: str, reward: Reward) -> None:
        seen = self.prompts.get(int(rid.partition(".")[0]))
        sample = int(rid.partition("/")[2])
        if seen is None or sample not in seen.ended or seen.ended[sample].rid != rid or sample in seen.rewards:
            return
        self.scoring.discard(rid)
        seen.rewards[sample] = reward
        if seen.stage is PromptStage.COMPLETE and len(seen.rewards) == len(seen.ended):
            seen.stage = PromptStage.SCORED

    # --- instructions ---------------------------------------------------------------------------

    def say(self, instruction: Instruction) -> None:
        if type(instruction) in _ANSWERED:
            self.awaiting[type(instruction)] = instruction
        match instruction:
            case Generate(requests):
                for request in requests:
                    self._generate(self.prompts[request.prompt.draw], request)
            case Park(prompt, keep):
                seen = self.prompts[prompt.draw]
                if keep:
                    seen.stage = PromptStage.STOPPING
                else:
                    self._end(seen.request.rid if seen.request else "")
                    self._forget(seen)
                    seen.stage = PromptStage.DEFERRED
            case Abort(rid):
                self.surplus.discard(rid)
            case Score(response):
                self.unscored.discard(response.rid)
                self.scoring.add(response.rid)
            case Skip(prompt):
                self._forget(self.prompts.pop(prompt.draw))
            case Train(_, groups) | Accumulate(_, groups):
                for group in groups:
                    self.prompts[group.prompt.draw].stage = PromptStage.TRAINING
            case Lend(engines):
                self.lent |= set(engines)
            case Finish():
                self.finished = True

    def _generate(self, seen: Seen, request: Request) -> None:
        if not request.begun:
            self._forget(seen)
            seen.born = self.served[request.engine]
        seen.partial = {}
        seen.request, seen.stage = request, PromptStage.RUNNING
        for sample in range(request.n):
            before = request.begun[sample] if request.begun else None
            if before is None or before.finish == ABORTED:
                self.running[f"{request.rid}/{sample}"] = request.engine

    def _lose(self, seen: Seen) -> None:
        self._forget(seen)
        seen.failures += 1
        seen.stage = PromptStage.LOST

    def _forget(self, seen: Seen) -> None:
        rids: Iterable[str] = [response.rid for response in seen.ended.values()]
        self.unscored -= set(rids)
        self.scoring -= set(rids)
        if seen.request is not None:
            self.surplus -= {f"{seen.request.rid}/{i}" for i in range(seen.request.n)}
        seen.ended, seen.partial, seen.rewards = {}, {}, {}

    def _end(self, request: str) -> None:
        """All that runs of a request."""
        for rid in [rid for rid in self.running if rid.partition("/")[0] == request]:
            del self.running[rid]
