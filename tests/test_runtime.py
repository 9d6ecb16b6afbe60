"""The rules of the runtime, with the real coordinator and scripted collaborators. Every run has a time limit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from scripted_engine import ScriptedEngine

from fluxjax.collaborators import Observer, StepReport
from fluxjax.coordinator import Coordinator, CoordinatorError, EngineLost, Settings, Synchronous
from fluxjax.coordinator.messages import Finish
from fluxjax.runtime import Runtime
from fluxjax.timeline import Span, Timeline
from fluxjax.types import Group, PreparedPrompt, Prompt, Response, Reward
from models.inputs import ModelInput
from rollout.engine import EngineError, GenerateRequest, SamplingParams

SECONDS = 20.0  # nothing here takes more than a fraction of one; only a hang comes this far


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

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}


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
    threads: set[str] = dataclasses.field(default_factory=set)

    def train(self, step: int, groups: Any, prepared: Any) -> dict[str, float]:
        assert [g.prompt.draw for g in groups] == list(prepared)
        self.threads.add(threading.current_thread().name)
        self.trained.append(tuple(groups))
        self.version += 1
        return {"loss": float(step)}

    def weights(self) -> dict[str, Any]:
        return {"w": self.version}


class Evaluator:
    async def evaluate(self, step: int, full: bool) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"accuracy": step / 10}


@dataclasses.dataclass
class Checkpointer:
    saved: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

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

    def on_finish(self, finish: Finish) -> None:
        self.lines.append(f"finish {finish.step}")


class Run:
    """A runtime with scripted collaborators, each of which a test may replace before `go`."""

    def __init__(self, *engines: ScriptedEngine, state: dict[str, Any] | None = None, **settings: int) -> None:
        options = {"steps": 3, "prompts_per_step": 3, "group_size": 3} | settings
        self.coordinator = Coordinator(Settings(**options), Synchronous())
        self.engines = engines or (ScriptedEngine(),)
        self.source, self.scorer, self.trainer = Source(), Scorer(), Trainer()
        self.evaluator, self.checkpointer, self.diary = Evaluator(), Checkpointer(), Diary()
        if state is not None:
            self.coordinator.load_state_dict(state["coordinator"])
            self.source.position = state["source"]["position"]
            self.trainer.version = state["coordinator"]["version"]

    def build(self) -> Runtime:
        self.runtime = Runtime(
            self.coordinator,
            engines=self.engines,
            source=self.source,
            scorer=self.scorer,
            trainer=self.trainer,
            evaluator=self.evaluator,
            checkpointer=self.checkpointer,
            sampling=SamplingParams(),
            seed=7,
            observers=[self.diary],
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


class TestRun:
    def test_whole_run(self) -> None:
        """Rule 40: a run trains its steps, each on tokens of the version then served, and reports in order."""
        run = Run(evaluate_every=2, checkpoint_every=2)
        assert run.go() == Finish(3, "all 3 steps are done")
        assert [[g.prompt.draw for g in groups] for groups in run.trainer.trained] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        for version, groups in enumerate(run.trainer.trained):
            for sample in (s for g in groups for s in g.samples):
                assert set(sample.response.versions) == {version}
                assert {token % 1000 for token in sample.response.token_ids} == {version}
                assert len(sample.response.logprobs) == len(sample.response.token_ids) > 0
        assert run.engines[0].params == {"w": 3} and run.engines[0].version == 3
        assert run.diary.lines == [
            "evaluation 0 full 0.0",
            "step 1",
            "step 2",
            "evaluation 2 0.2",
            "checkpoint 2",
            "step 3",
            "evaluation 3 full 0.3",
            "checkpoint 3",
            "finish 3",
        ]
        assert run.runtime._prepared == {} and run.runtime._routes == {}

    def test_submission(self) -> None:
        """Rule 41: engines stand still while the requests of a step are queued, in draw order."""
        run = Run(steps=1)
        run.go()
        queued = [f"submit {d:08d}.00" for d in range(3)]
        log = run.engines[0].log
        assert log[:5] == ["pause", *queued, "resume"] and all(line.startswith("token") for line in log[5:])

    def test_timing_does_not_matter(self) -> None:
        """Rule 42: however engines and scorer interleave, the same groups are trained on, bit for bit."""
        straight = Run()
        straight.go()
        for seed in range(5):
            shuffled = Run(ScriptedEngine(pace=random.Random(seed)))
            shuffled.scorer.pace = random.Random(seed)
            shuffled.go()
            assert shuffled.trainer.trained == straight.trainer.trained
        assert len({s.response.token_ids for g in straight.trainer.trained[0] for s in g.samples}) > 5

    def test_scoring_overlaps(self) -> None:
        """Rule 43: responses are scored while others are generated."""
        run = Run(steps=1)
        progress = []

        class Watching(Scorer):
            async def score(self, prompt: Prompt, response: Response) -> Reward:
                progress.append(run.engines[0].open_streams)
                return await super().score(prompt, response)

        run.scorer = Watching()
        run.go()
        assert len(progress) == 9 and sum(p > 0 for p in progress) >= 6

    def test_one_thread(self) -> None:
        """Rule 44: training happens in one thread, not on the event loop."""
        run = Run()
        run.go()
        [name] = run.trainer.threads
        assert name.startswith("trainer")

    def test_skips(self) -> None:
        """Rule 45: what cannot be prepared is told, replaced and forgotten."""
        run = Run(steps=1)
        run.source.bad = frozenset({1})
        run.go()
        assert [g.prompt.draw for g in run.trainer.trained[0]] == [0, 2, 3]
        assert "skip 1 bad file" in run.diary.lines

    def test_several_engines(self) -> None:
        """Rule 46: prompts are dealt to engines by draw; every engine gets the weights; a retry goes to the next."""
        first, second = ScriptedEngine(), ScriptedEngine(on_attempt({(1, 0): "error"}))
        run = Run(first, second, steps=2)
        run.go()
        submitted = [[line[7:] for line in e.log if line.startswith("submit")] for e in (first, second)]
        assert submitted[0] == ["00000000.00", "00000002.00", "00000001.01", "00000004.00"]
        assert submitted[1] == ["00000001.00", "00000003.00", "00000005.00"]
        assert first.version == second.version == 2

    def test_times(self) -> None:
        """Rule 47: each stage is a span, and a step's report has the seconds of its stages."""
        run = Run(steps=2, checkpoint_every=1, evaluate_every=1)
        run.go()
        bars = run.runtime.timeline.spans()
        assert {(b.name, b.lane) for b in bars} == {
            ("data", "data"),
            ("rollout", "engine 0"),
            ("reward", "reward"),
            ("train", "trainer"),
            ("sync", "trainer"),
            ("eval", "eval"),
            ("checkpoint", "trainer"),
        }
        for report in run.diary.reports:
            assert set(report.seconds) == {"data", "rollout", "reward", "train", "sync"}
            assert all(seconds > 0 for seconds in report.seconds.values())
            assert report.metrics == {"loss": float(report.step)} and report.version == report.step
            assert len(report.groups) == 3


_COLLABORATORS = [
    "source.draw",
    "source.state_dict",
    "scorer.score",
    "trainer.train",
    "trainer.weights",
    "evaluator.evaluate",
    "checkpointer.save",
    "diary.on_step",
    "diary.on_checkpoint",
    "engine.update_weights",
    "engine.pause",
]


class TestFailures:
    @pytest.mark.parametrize("fate", ["error", "refuse", "short", "stray", "abort"])
    def test_retry(self, fate: str) -> None:
        """Rule 48: a request that the engine loses, refuses, cuts short, garbles or aborts is generated again, with
        the same result as if nothing had happened."""
        run, calm = Run(ScriptedEngine(on_attempt({(1, 0): fate, (5, 0): fate, (5, 1): fate}))), Run()
        run.go(), calm.go()

        def content(trained: list[tuple[Group, ...]]) -> list:
            return [(s.response.draw, s.response.token_ids) for t in trained for g in t for s in g.samples]

        assert content(run.trainer.trained) == content(calm.trainer.trained)
        assert run.trainer.trained[1][2].samples[0].response.rid == "00000005.02/0"

    @pytest.mark.parametrize("deaf", [False, True])
    def test_abort(self, deaf: bool) -> None:
        """Rule 48: of a group that is generated again, the engine is told to stop what still runs; if it cannot, its
        late replies change nothing."""
        run = Run(ScriptedEngine(on_attempt({(1, 0): "abort"})), steps=1, group_size=8)

        async def refuse(rid: str) -> None:
            raise EngineError(f"{rid}: too late")

        if deaf:
            run.engines[0].abort = refuse
        run.go()
        stopped = [line for line in run.engines[0].log if line.startswith("abort")]
        assert bool(stopped) != deaf and all(line.startswith("abort 00000001.00/") for line in stopped)
        assert run.trainer.trained[0][1].samples[0].response.rid == "00000001.01/0"

    def test_giving_up(self) -> None:
        """Rule 49: a prompt that no engine can serve is skipped with the engine's words, and replaced."""
        run = Run(ScriptedEngine(lambda request: "refuse" if request.rid.startswith("00000001") else "ok"), steps=1)
        run.go()
        assert [g.prompt.draw for g in run.trainer.trained[0]] == [0, 2, 3]
        assert "skip 1 failed 3 times, last: 00000001.02 does not fit" in run.diary.lines
        assert run.runtime._prepared == {}

    def test_dead_engine(self) -> None:
        """Rule 50: an engine that serves nothing ends the run, with the engine's own error as the cause."""
        run = Run(ScriptedEngine(lambda request: "refuse"))
        with pytest.raises(EngineLost, match="does not fit") as error:
            run.go()
        assert isinstance(error.value.__cause__, EngineError)

    @pytest.mark.parametrize("where", _COLLABORATORS)
    def test_collaborator_raises(self, where: str) -> None:
        """Rule 51: whatever a collaborator raises ends the run with that very error; nothing is left running."""
        run = Run(steps=4, checkpoint_every=1)
        boom = Boom(where)

        async def raise_later(*_: Any) -> None:
            await asyncio.sleep(0)
            raise boom

        def raise_now(*_: Any) -> None:
            raise boom

        name, method = where.split(".")
        target = run.engines[0] if name == "engine" else getattr(run, name)
        later = asyncio.iscoroutinefunction(getattr(target, method))
        setattr(target, method, raise_later if later else raise_now)
        with pytest.raises(Boom) as error:
            run.go()
        assert error.value is boom

    def test_engine_crash(self) -> None:
        """Rule 51: an engine's error that is no `EngineError` is a bug: no retry, the run ends with it, although
        other requests hang."""
        run = Run(ScriptedEngine(on_attempt({(0, 0): "hang", (2, 0): "hang", (1, 0): "crash"})))
        with pytest.raises(ZeroDivisionError, match=r"in 00000001\.00"):
            run.go()

    def test_foreign_weights(self) -> None:
        """Rule 52: weights are published under the version they have, or not at all."""
        run = Run()
        weights = run.trainer.weights

        def late_train(step: int, groups: Any, prepared: Any) -> dict[str, float]:
            run.trainer.version += 2 if step == 2 else 1
            return {}

        run.trainer.train, run.trainer.weights = late_train, weights
        run.go()
        assert run.engines[0].version == 4
        other = Run()
        other.trainer.version = 5
        other.coordinator.load_state_dict(run.coordinator.state_dict())
        other.coordinator.settings = dataclasses.replace(other.coordinator.settings, steps=9)
        with pytest.raises(CoordinatorError, match="trainer holds version 5, not 4"):
            other.go()

    def test_inner_cancellation(self) -> None:
        """Rule 53: a cancellation that leaks out of a collaborator is an error, not a silent hang."""
        run = Run(ScriptedEngine(on_attempt({(1, 0): "cancel"})))
        with pytest.raises(RuntimeError, match=r"_stream was cancelled from inside"):
            run.go()


class TestCancellation:
    def test_in_rollout(self) -> None:
        """Rule 54: cancelling the run closes every stream and leaves nothing behind."""
        run = Run(ScriptedEngine(on_attempt({(-1, -1): "hang"})))

        async def scenario() -> None:
            task = asyncio.ensure_future(run.build().run())
            while run.engines[0].open_streams < 3:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await clean(task)  # pyright: ignore[reportArgumentType]

        limited(scenario())
        assert run.engines[0].open_streams == 0

    def test_in_training(self) -> None:
        """Rule 55: a cancelled run waits for the step that its thread is in the middle of."""
        run = Run()
        begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def train(step: int, groups: Any, prepared: Any) -> dict[str, float]:
            begun.set()
            assert go_on.wait(SECONDS)
            ended.set()
            return {}

        run.trainer.train = train

        async def scenario() -> None:
            task = asyncio.ensure_future(run.build().run())
            while not begun.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await clean(task)  # pyright: ignore[reportArgumentType]
            assert ended.is_set()

        limited(scenario())


class TestStopAndResume:
    def test_stop(self) -> None:
        """Rule 56: `request_stop`, from any thread, ends the run at the next boundary with a checkpoint."""
        run = Run(steps=50)
        train = run.trainer.train

        def stop_in_second(step: int, groups: Any, prepared: Any) -> dict[str, float]:
            if step == 2:
                run.runtime.request_stop("enough")  # this is the trainer's thread
            return train(step, groups, prepared)

        run.trainer.train = stop_in_second
        assert run.go() == Finish(2, "enough", complete=False)
        assert list(run.checkpointer.saved) == [2] and run.engines[0].version == 2

    def test_stop_before_the_start(self) -> None:
        """Rule 56: also before the run begins."""
        run = Run()

        async def scenario() -> Finish:
            runtime = run.build()
            runtime.request_stop("early")
            return await clean(runtime.run())

        assert limited(scenario()) == Finish(0, "early", complete=False)
        assert run.trainer.trained == [] and list(run.checkpointer.saved) == [0]

    @pytest.mark.parametrize("at", [1, 2, 3])
    def test_resume(self, at: int) -> None:
        """Rule 57: a checkpoint holds the source's position of its own step, and a run resumed from it trains on what
        the uninterrupted run trained on, bit for bit, skipped prompts included."""
        whole = Run(steps=5, checkpoint_every=1)
        whole.source.bad = frozenset({2, 5, 9})
        whole.go()
        state = whole.checkpointer.saved[at]
        drawn = state["coordinator"]["ledger"]["drawn"]
        assert state["source"] == {"position": drawn}
        resumed = Run(steps=5, checkpoint_every=1, state=state)  # a fresh engine, at version 0
        resumed.source.bad = whole.source.bad
        resumed.go()
        assert resumed.trainer.trained == whole.trainer.trained[at:]
        assert resumed.checkpointer.saved == {k: v for k, v in whole.checkpointer.saved.items() if k > at}


class TestTimeline:
    def test_overlaps_count_once(self) -> None:
        """Rule 58: what one stage does at the same time counts once in its seconds and is one bar of its lane."""
        timeline = Timeline()
        for lane, start, end in [("a", 0.0, 2.0), ("a", 1.0, 3.0), ("b", 2.5, 4.0), ("a", 5.0, 6.0)]:
            timeline.add(Span("rollout", lane, start, end, step=1))
        timeline.add(Span("train", "t", 6.0, 8.5, step=1))
        assert timeline.seconds(1) == {"rollout": 5.0, "train": 2.5} and timeline.seconds(2) == {}
        bars = [(b.lane, b.start, b.end) for b in timeline.spans()]
        assert bars == [("a", 0.0, 3.0), ("b", 2.5, 4.0), ("a", 5.0, 6.0), ("t", 6.0, 8.5)]

    def test_only_the_last_steps_are_kept(self) -> None:
        """Rule 59: memory is bounded by the number of steps kept; a body that fails is recorded, too."""
        clock = iter(range(100))
        timeline = Timeline(keep_steps=2, clock=lambda: float(next(clock)))
        for step in range(1, 6):
            with timeline.span("train", "t", step):
                pass
        with pytest.raises(Boom), timeline.span("train", "t", 5):
            raise Boom
        assert [(b.step, b.end - b.start) for b in timeline.spans()] == [(4, 1.0), (5, 1.0), (5, 1.0)]
