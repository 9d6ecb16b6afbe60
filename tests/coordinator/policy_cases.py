"""A world around any policy: responses grow token by token in random order, engines fail, and parked ones keep what
they have. Everything that happens is drawn from one random generator, so that a seed is a history."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, Self

from fluxjax.base.types import Group, Prompt, Response, Reward
from fluxjax.coordinator import Coordinator, SchedulingPolicy, Settings, messages
from fluxjax.coordinator.messages import Event, Instruction, Request, ResponseFinished


@dataclasses.dataclass
class Running:
    """A response that an engine generates."""

    request: Request
    sample: int
    versions: list[int]
    length: int

    @property
    def rid(self) -> str:
        return f"{self.request.rid}/{self.sample}"

    def ended(self, finish: str) -> ResponseFinished:
        n = len(self.versions)
        draw = self.request.prompt.draw
        response = Response(self.rid, draw, self.sample, (7,) * n, (-1.0,) * n, tuple(self.versions), finish)
        return ResponseFinished(response)


def prompt(draw: int) -> Prompt:
    return Prompt(f"p{draw}", "scripted", "?" * (1 + draw % 7), "!", draw=draw, epoch=draw // 10, row=draw % 10)


def reward(rid: str) -> Reward:
    draw, sample = int(rid[:8]), int(rid.rpartition("/")[2])
    right = draw % 4 == 0 or sample % 2 == 1  # every fourth group has no variance
    return Reward(float(right), right)


class PolicyWorld:
    """`faults` requests are lost on the way; every other event comes once, in random order. After `ends` events the run
    is asked to stop (0: never)."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        seed: int,
        *,
        steps: int = 4,
        prompts_per_step: int = 3,
        group_size: int = 2,
        prompts: int = 1000,
        engines: int = 1,
        faults: int = 0,
        ends: int = 0,
        state: dict | None = None,
        next_draw: int = 0,
        **settings: Any,
    ) -> None:
        self.random = random.Random(seed)
        options = Settings(steps, prompts_per_step, group_size, engines=engines, **settings)
        self.coordinator = Coordinator(options, policy)
        if state is not None:
            held = [entry["draw"] for entry in state["ledger"]["entries"]]
            self.coordinator.load_state_dict(state, {draw: prompt(draw) for draw in held})
        self.prompts, self.next_draw, self.faults, self.ends = prompts, next_draw, faults, ends
        self.version = max(self.coordinator.version, 0)
        self.served = [self.version] * engines
        self.lent: set[int] = set()
        self.now = 0.0  # seconds; policies that care are told
        self.scale = 1.0  # of all lengths
        self.running: dict[str, Running] = {}
        self.owed: list[Event] = []
        self.said: list[Instruction] = []
        self.said_by_stop = 10**9  # instructions that were said when it had been asked to
        self.states: list[tuple[dict, int]] = []
        self.watch: Callable[[Instruction], None] = lambda instruction: None

    def start(self) -> None:
        self.hear(messages.Started(self.version))

    def until(self, holds: Callable[[], object]) -> Self:
        """Starts if need be, and goes on until this holds."""
        if self.coordinator.served < 0:
            self.start()
        for _ in range(100_000):
            if holds():
                return self
            self.step()
        raise AssertionError("no end")

    def go(self) -> Self:
        return self.until(lambda: self.coordinator.finished)

    def step(self) -> None:
        if getattr(self.coordinator.policy, "speculative", None) is not None:
            self.now += self.random.random()
            self.hear(messages.Tick(self.now))
        choices = len(self.owed) + len(self.running)
        assert choices, f"stuck after {self.said[-3:]}"
        if self.faults and self.running and self.random.random() < 0.05:
            self.faults -= 1
            return self.lose(self.random.choice(sorted({r.request.rid for r in self.running.values()})))
        pick = self.random.randrange(choices)
        if pick < len(self.owed):
            return self.hear(self.owed.pop(pick))
        one = self.running[sorted(self.running)[pick - len(self.owed)]]
        one.versions.append(self.served[one.request.engine])
        if len(one.versions) >= one.length:
            del self.running[one.rid]
            self.owed.append(one.ended("stop"))
        return None

    def lose(self, request: str) -> None:
        self.running = {rid: one for rid, one in self.running.items() if one.request.rid != request}
        self.hear(messages.EngineFailed((request,), "gone"))

    def hear(self, event: Event) -> None:
        if isinstance(event, messages.WeightsPublished):
            order = self.coordinator.awaiting[messages.PublishWeights]
            assert isinstance(order, messages.PublishWeights)
            for engine in order.engines or range(len(self.served)):
                assert event.version >= self.served[engine], "versions grow"
                self.served[engine] = event.version
                self.lent.discard(engine)
        for instruction in self.coordinator.handle(event):
            self.watch(instruction)
            self.said.append(instruction)
            self.owed += self.answers(instruction)
        ledger = self.coordinator.ledger
        assert ledger.drawn == ledger.trained + len(ledger.skipped) + ledger.live
        self.ends -= 1
        if not self.ends and not self.coordinator.finished:
            self.hear(messages.StopRequested("enough"))
            self.said_by_stop = len(self.said)

    def answers(self, instruction: Instruction) -> list[Event]:
        match instruction:
            case messages.DrawPrompts(count):
                draws = range(self.next_draw, min(self.next_draw + count, self.prompts))
                self.next_draw = draws.stop
                return [messages.PromptsDrawn(tuple(prompt(d) for d in draws))]
            case messages.Generate(requests):
                for request in requests:
                    self.begin(request)
            case messages.Abort(rid):
                return self.stop(rid)
            case messages.Park():
                return self.stop(instruction.request)
            case messages.Score(scored):
                return [messages.RewardReady(scored.rid, reward(scored.rid))]
            case messages.Lend(engines):
                assert not self.busy() & set(engines), "what ran there was parked"
                self.lent |= set(engines)
                return [messages.Lent(engines)]
            case messages.Accumulate(step):
                assert set(instruction.engines) <= self.lent
                return [messages.Accumulated(step)]
            case messages.Train(step):
                self.version += 1
                lags = [self.coordinator.version - v for v in self.versions(self.steps[step])]
                metrics = {"staleness/lag_mean": sum(lags) / len(lags), "loss": float(step)}
                return [messages.Trained(self.version, metrics)]
            case messages.PublishWeights(version):
                return [messages.WeightsPublished(version)]
            case messages.Evaluate(step):
                return [messages.Evaluated(step)]
            case messages.SaveCheckpoint(step):
                self.states.append((self.coordinator.state_dict(), self.next_draw))
                return [messages.CheckpointSaved(step)]
        return []

    def begin(self, request: Request) -> None:
        assert request.engine not in self.lent
        for sample in range(request.n):
            before = request.begun[sample] if request.begun else None
            if before is not None and before.finish != "abort":
                continue
            # Long tails: the length is a property of draw and sample, whatever the attempt.
            draw = random.Random(f"{request.prompt.draw}/{sample}").lognormvariate(1.0, 1.2)
            length = max(1, int(self.scale * draw))
            versions = list(before.versions) if before is not None else []
            one = Running(request, sample, versions, max(length, len(versions) + 1))
            self.running[one.rid] = one

    def stop(self, rid: str) -> list[Event]:
        """Whatever runs under this id is aborted."""
        hit = [one for name, one in self.running.items() if name == rid or name.partition("/")[0] == rid]
        for one in hit:
            del self.running[one.rid]
        return [one.ended("abort") for one in hit]

    def all(self, kind: type) -> list:
        return [i for i in self.said if isinstance(i, kind)]

    def busy(self) -> set[int]:
        """Engines where something runs."""
        return {one.request.engine for one in self.running.values()}

    @staticmethod
    def versions(groups: Sequence[Group]) -> list[int]:
        return [v for group in groups for sample in group.samples for v in sample.response.versions]

    @property
    def steps(self) -> dict[int, list[Group]]:
        """The groups of each step, those first that were trained on before it was complete."""
        steps: dict[int, list[Group]] = {}
        for order in self.said:
            if isinstance(order, messages.Accumulate | messages.Train):
                steps.setdefault(order.step, []).extend(order.groups)
        return steps

    @property
    def trained(self) -> list[int]:
        return [group.prompt.draw for groups in self.steps.values() for group in groups]
