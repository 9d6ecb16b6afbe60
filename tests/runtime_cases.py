"""A runtime with the real coordinator and scripted collaborators, for its tests. Every run has a time limit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
from scripted_engine import ScriptedEngine

from fluxjax.base.types import Group, PreparedPrompt, Prompt, Response, Reward, TrainedStep
from fluxjax.coordinator import Coordinator, SchedulingPolicy, Settings, Synchronous
from fluxjax.coordinator.messages import Finish
from fluxjax.runtime.ports import Observer, StepReport
from fluxjax.runtime.runtime import Runtime
from models.inputs import ModelInput
from rollout.engine import GenerateRequest, SamplingParams

SECONDS = 300.0  # nothing here takes more than a fraction of one; only a hang comes this far


class Boom(Exception):
    """What a collaborator raises; the run must end with this very object."""


@dataclasses.dataclass
class Source:
    bad: frozenset[int] = frozenset()
    size: int = 1000
    position: int = 0

    async def draw(self, count: int) -> tuple[list[PreparedPrompt], list[tuple[Prompt, str]]]:
        draws = range(self.position, min(self.position + count, self.size))
        self.position = draws.stop
        await asyncio.sleep(0)
        prompts = [Prompt(f"p{d}", "scripted", "?", "!", draw=d) for d in draws]
        ids = np.array([1, 2], np.int32)
        inputs = ModelInput(ids, np.tile(np.arange(2, dtype=np.int32), (3, 1)), np.full(2, -1, np.int32), 2)
        good = [PreparedPrompt(p, inputs) for p in prompts if p.draw not in self.bad]
        return good, [(p, "bad file") for p in prompts if p.draw in self.bad]


@dataclasses.dataclass
class Scorer:
    pace: random.Random | None = None
    scored: list[str] = dataclasses.field(default_factory=list)

    async def score(self, prompt: Prompt, response: Response) -> Reward:
        assert prompt.draw == response.draw
        for _ in range(1 if self.pace is None else self.pace.randint(1, 9)):
            await asyncio.sleep(0)
        self.scored.append(response.rid)
        return Reward(float(sum(response.token_ids) % 7), correct=False)


@dataclasses.dataclass
class Trainer:
    version: int = 0
    trained: list[tuple[Group, ...]] = dataclasses.field(default_factory=list)
    early: list[tuple[int, tuple[Group, ...], tuple[int, ...]]] = dataclasses.field(default_factory=list)
    threads: set[str] = dataclasses.field(default_factory=set)

    def train(self, step: int, groups: Any, prepared: Any) -> TrainedStep:
        assert [g.prompt.draw for g in groups] == list(prepared)
        self.threads.add(threading.current_thread().name)
        self.trained.append(tuple(groups))
        self.version += 1
        early = [group for number, some, _ in self.early if number == step for group in some]
        whole = tuple(sorted([*early, *groups], key=lambda group: group.prompt.draw))
        return TrainedStep(whole, {"loss": float(step)})

    def accumulate(self, step: int, groups: Any, prepared: Any, engines: Any = ()) -> None:
        assert [g.prompt.draw for g in groups] == list(prepared)
        self.threads.add(threading.current_thread().name)
        self.early.append((step, tuple(groups), tuple(engines)))

    def weights(self) -> dict[str, Any]:
        return {"w": self.version}


class Evaluator:
    async def evaluate(self, step: int, full: bool) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"accuracy": step / 10}


@dataclasses.dataclass
class Checkpointer:
    run: Any
    saved: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        return {"coordinator": self.run.coordinator.state_dict(), "source": {"position": self.run.source.position}}

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.saved[step] = json.loads(json.dumps(state))


class Diary(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.reports: list[StepReport] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        self.lines.append(f"step {report.step}")

    def on_evaluation(self, step: int, full: bool, result: Any) -> None:
        self.lines.append(f"evaluation {step}{' full' if full else ''} {result['accuracy']}")

    def on_checkpoint(self, step: int) -> None:
        self.lines.append(f"checkpoint {step}")

    def on_skip(self, prompt: Prompt, reason: str) -> None:
        self.lines.append(f"skip {prompt.draw} {reason}")


class Run:
    """A runtime with scripted collaborators, each of which a test may replace before `go`."""

    def __init__(
        self,
        *engines: ScriptedEngine,
        state: dict[str, Any] | None = None,
        policy: SchedulingPolicy | None = None,
        **settings: Any,
    ) -> None:
        options: dict[str, Any] = {"steps": 3, "prompts_per_step": 3, "group_size": 3} | settings
        self.engines = engines or (ScriptedEngine(),)
        self.coordinator = Coordinator(Settings(**options, engines=len(self.engines)), policy or Synchronous())
        self.source, self.scorer, self.trainer = Source(), Scorer(), Trainer()
        self.tick, self.pool, self.colocated = 0.0, None, False
        self.evaluator, self.checkpointer, self.diary = Evaluator(), Checkpointer(self), Diary()
        if state is not None:
            self.coordinator.load_state_dict(state["coordinator"])
            self.source.position = state["source"]["position"]
            self.trainer.version = state["coordinator"]["version"]

    def build(self) -> Runtime:
        self.runtime = Runtime(
            self.coordinator,
            engines=self.engines,
            draw=self.source.draw,
            score=self.scorer.score,
            trainer=self.trainer,
            evaluate=lambda full: self.evaluator.evaluate(self.coordinator.step, full),
            checkpointer=self.checkpointer,
            sampling=SamplingParams(),
            seed=7,
            observers=[self.diary],
            tick=self.tick,
            set_parallelism=self.pool and self.pool.set_parallelism,
            colocated=self.colocated,
        )
        return self.runtime

    def go(self) -> Finish:
        return limited(self._go())

    async def _go(self) -> Finish:
        try:
            return await clean(self.build().run())
        finally:
            assert not any(engine.open_streams for engine in self.engines), "a stream was left open"


async def clean(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs it to the end, and finds no task and no trainer's thread afterwards, however it ends."""
    before = asyncio.all_tasks()
    try:
        return await work
    finally:
        others = asyncio.all_tasks() - before
        assert not others, f"orphan tasks: {others}"
        threads = [t.name for t in threading.enumerate() if t.name.startswith("trainer")]
        assert not threads, f"orphan threads: {threads}"


def limited(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, SECONDS))


def on_attempt(fates: dict[tuple[int, int], str]):
    """A script from (draw, attempt) to fate."""

    def script(request: GenerateRequest) -> str:
        draw, attempt = request.rid.split(".")
        return fates.get((int(draw), int(attempt)), fates.get((-1, -1), "ok"))

    return script
