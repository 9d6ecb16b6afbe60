"""The stream trainer's instructions carried out: scripted engines are lent, sleep, and come back."""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any

import pytest
from runtime_cases import Boom, Run
from scripted_engine import ScriptedEngine

from fluxjax.base.types import Group, TrainedStep
from fluxjax.coordinator import Synchronous
from fluxjax.coordinator.messages import Tick
from fluxjax.coordinator.policies.early_training import SpeculativeSync, StreamTrainer
from fluxjax.runtime.runtime import Runtime

SETTINGS = {"first": 0.1, "last": 0.8, "every": 0.01, "chunk": 1}


def stream(make: Any = Synchronous, *, engines: int = 2, seed: int = 0, script: Any = None, **options: Any) -> Run:
    fleet = [ScriptedEngine(script or (lambda request: "ok"), random.Random(seed + i)) for i in range(engines)]
    sizes: dict[str, Any] = {"steps": 4, "prompts_per_step": 6, "group_size": 4} | options
    return Run(*fleet, policy=make(stream=StreamTrainer(**SETTINGS)), **sizes)


def content(groups: list[Group]) -> list[tuple]:
    return [(s.response.draw, s.response.sample, s.response.token_ids, s.reward) for g in groups for s in g.samples]


def steps(run: Run) -> list[list[tuple]]:
    """What each step was trained on, as it was reported."""
    return [content(list(report.groups)) for report in run.diary.reports]


def plain(count: int = 4) -> list[list[tuple]]:
    """The data that `count` steps are trained on without a stream trainer."""
    run = Run(steps=count, prompts_per_step=6, group_size=4)
    run.go()
    return steps(run)


@pytest.mark.parametrize("seed", range(2))
def test_same_data_as_without(seed: int) -> None:
    """Rule 60: what is moved to another engine ends as if it had not been; every group is trained on once; each engine
    sleeps while it is lent and serves the next weights."""
    run = stream(seed=seed)
    run.go()
    assert steps(run) == plain()
    early = run.trainer.early
    assert len(early) > 4 and all(len(engines) == 1 for _, _, engines in early)
    for step, rest in enumerate(run.trainer.trained, 1):
        before = [group for at, groups, _ in early if at == step for group in groups]
        assert sorted(g.prompt.draw for g in [*before, *rest]) == list(range(6 * step - 6, 6 * step))
    slept = [engine.log.count("sleep") for engine in run.engines]
    assert sum(slept) == run.coordinator.policy.stream.lent > 0  # pyright: ignore[reportAttributeAccessIssue]
    assert slept == [engine.log.count("wake") for engine in run.engines]
    assert all(engine.version == 4 and not engine.asleep for engine in run.engines)
    assert len(run.trainer.threads) == 1, "one after the other with the updates"
    moved = [line for engine in run.engines for line in engine.log if line.startswith("submit") and line[-2:] != "00"]
    assert moved
    lanes = {(span.name, span.lane) for span in run.runtime.timeline.spans()}
    assert lanes & {("train", "engine 0"), ("train", "engine 1")} and ("train", "trainer") in lanes


def test_lost_after_migration() -> None:
    """Rule 61: requests that are lost after they were moved are generated anew, with the same result."""
    lost: list[str] = []

    def script(request: Any) -> str:
        if request.prefix_ids and len(lost) < 6:
            lost.append(request.rid)
            return "abort"
        return "ok"

    run = stream(script=script)
    run.go()
    assert len(lost) == 6 and steps(run) == plain()


def test_error_in_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 62: an error of the trainer in the middle of a round ends the run with that very error."""
    run, boom = stream(), Boom("accumulate")

    def fail(*_: Any) -> None:
        raise boom

    monkeypatch.setattr(run.trainer, "accumulate", fail)
    with pytest.raises(Boom) as error:
        run.go()
    assert error.value is boom


def test_stop_and_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 63: a stop while gradients are being added up ends after the step, and the resumed run goes on as if there
    had been none."""
    run = stream(steps=4, checkpoint_every=1)
    accumulate = run.trainer.accumulate

    def stop_in_second(step: int, *rest: Any) -> None:
        if step == 2:
            run.runtime.request_stop("enough")
        accumulate(step, *rest)

    monkeypatch.setattr(run.trainer, "accumulate", stop_in_second)
    finish = run.go()
    assert finish.step == 2 and not finish.complete
    resumed = stream(steps=4, state=run.checkpointer.saved[2])
    resumed.go()
    assert steps(run) + steps(resumed) == plain()


def test_speculative_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 64: with a clock, training begins before the batch is complete, on the trainer's own devices; the run is
    that without it. This clock counts: an event takes a second, a step of training a hundred."""
    clock = itertools.count()
    monkeypatch.setattr(Runtime, "_time", lambda _: Tick(float(next(clock))))
    fleet = [ScriptedEngine(pace=random.Random(i)) for i in range(2)]
    policy = Synchronous(speculative=SpeculativeSync(1e-6))
    run = Run(*fleet, policy=policy, steps=6, prompts_per_step=6, group_size=4)
    run.tick = 3600.0  # never: events are told of with the time
    train = run.trainer.train

    def slow(*order: Any) -> TrainedStep:
        collections.deque(itertools.islice(clock, 100), maxlen=0)
        return train(*order)

    monkeypatch.setattr(run.trainer, "train", slow)
    run.go()
    assert steps(run) == plain(6)
    assert run.trainer.early and all(step > 1 and not engines for step, _, engines in run.trainer.early)
    assert run.coordinator.pace.growth > 0 and run.coordinator.pace.training > 0
