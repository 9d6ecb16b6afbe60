"""The rules of the runtime, with the real coordinator and scripted collaborators. Every run has a time limit."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from runtime_cases import SECONDS, Boom, Run, Scorer, clean, limited, on_attempt
from scripted_engine import ScriptedEngine

from fluxjax.base.timeline import Span, Timeline
from fluxjax.base.types import Group, Prompt, Response, Reward, TrainedStep
from fluxjax.coordinator import Coordinator, CoordinatorError, EngineLost, Synchronous
from fluxjax.coordinator.messages import Finish, Instruction, PublishWeights, Tick, Train
from rollout.engine import EngineError, EngineStats


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
        ]
        assert run.runtime._prepared == {} and run.runtime._streams == {}

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
        """Rule 46: a prompt goes to the engine with the least to do, a retry to another one; every engine gets the
        weights."""
        first, second = ScriptedEngine(), ScriptedEngine(on_attempt({(1, 0): "error"}))
        run = Run(first, second, steps=2)
        run.go()
        submitted = [[line[7:] for line in e.log if line.startswith("submit")] for e in (first, second)]
        assert submitted[0][:3] == ["00000000.00", "00000002.00", "00000001.01"]
        assert submitted[1][0] == "00000001.00"
        second_step = sorted(submitted[0][3:] + submitted[1][1:])
        assert second_step == ["00000003.00", "00000004.00", "00000005.00"]
        assert len(submitted[0]) > 3 and len(submitted[1]) > 1
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
            assert report.metrics == {"loss": float(report.step), "rollout/preemptions": 0.0}
            assert report.version == report.step
            assert len(report.groups) == 3


_COLLABORATORS = [
    "source.draw",
    "checkpointer.state",
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


class PublishesOnceMore(Synchronous):
    """Says `PublishWeights` when it hears a `Tick` while a step is trained."""

    asked = False

    def decide(self, coordinator: Coordinator) -> Sequence[Instruction]:
        if coordinator.now and not self.asked:
            assert Train in coordinator.awaiting and coordinator.version == 1
            self.asked = True
            return [PublishWeights(coordinator.version)]
        return super().decide(coordinator)


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

        def late_train(step: int, groups: Any, prepared: Any) -> TrainedStep:
            run.trainer.version += 2 if step == 2 else 1
            return TrainedStep((), {})

        run.trainer.train, run.trainer.weights = late_train, weights
        run.go()
        assert run.engines[0].version == 4
        other = Run()
        other.trainer.version = 5
        other.coordinator.load_state_dict(run.coordinator.state_dict())
        other.coordinator.settings = dataclasses.replace(other.coordinator.settings, steps=9)
        with pytest.raises(CoordinatorError, match="version 4 are needed, but the trainer holds version 5"):
            other.go()

    def test_weights_are_those_that_the_coordinator_knows(self) -> None:
        """Rule 52: a version asked for while the trainer has just finished the next one is the one that is served."""
        run = Run(policy=(policy := PublishesOnceMore()), steps=3)
        [engine] = run.engines
        stats, update, served = engine.stats, engine.update_weights, []

        def stats_after_training() -> EngineStats:
            if run.trainer.version == 2 and not policy.asked:
                run.runtime._post(Tick(1.0))  # an event that the coordinator hears before `Trained`
            return stats()

        async def watched(version: int, params: Any) -> None:
            served.append((version, params))
            await update(version, params)

        engine.stats, engine.update_weights = stats_after_training, watched
        assert run.go().step == 3 and policy.asked
        assert served == [(version, {"w": version}) for version in (1, 1, 2, 3)]

    def test_old_weights_take_no_memory(self) -> None:
        """Beside those of the trainer itself, none are kept while a step is trained or generated."""
        run = Run()
        [engine] = run.engines
        train, generate = run.trainer.train, engine.generate
        held: list[set[int]] = []

        def watched(step: int, groups: Any, prepared: Any) -> TrainedStep:
            held.append(set(run.runtime._weights) - {run.trainer.version})
            return train(step, groups, prepared)

        def watched_generate(*args: Any, **kwargs: Any) -> Any:
            held.append(set(run.runtime._weights) - {run.trainer.version})
            return generate(*args, **kwargs)

        run.trainer.train, engine.generate = watched, watched_generate
        assert run.go().step == 3
        assert len(held) >= 6 and not any(held)

    def test_inner_cancellation(self) -> None:
        """Rule 53: a cancellation that leaks out of a collaborator is an error, not a silent hang."""
        run = Run(ScriptedEngine(on_attempt({(1, 0): "cancel"})))
        with pytest.raises(RuntimeError, match=r"_stream cancelled itself"):
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

        def train(step: int, groups: Any, prepared: Any) -> TrainedStep:
            begun.set()
            assert go_on.wait(SECONDS)
            ended.set()
            return TrainedStep((), {})

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

        def stop_in_second(step: int, groups: Any, prepared: Any) -> TrainedStep:
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
