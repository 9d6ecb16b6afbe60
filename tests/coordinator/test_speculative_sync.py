"""When training begins before a batch is complete: on virtual time, with responses of one token a second."""

import dataclasses
import itertools
import math
import random
import types
from typing import Any

import numpy as np
import pytest
from policy_cases import PolicyWorld, prompt

from fluxjax.base.types import Group, Prompt, Response, Reward, Sample
from fluxjax.coordinator import Coordinator, Ledger, PromptStage, Synchronous
from fluxjax.coordinator.engine_states import Pace, trained_tokens
from fluxjax.coordinator.lengths import LengthPredictor, ends_by
from fluxjax.coordinator.messages import Accumulate, Event, Instruction, Request, Tick, Train
from fluxjax.coordinator.policies.early_training import SpeculativeSync, probability
from fluxjax.coordinator.policies.tail_batching import TailBatching


class TimedWorld(PolicyWorld):
    """A token of each running response a second; `train` tokens of training a second; the rest takes no time."""

    def __init__(self, policy, seed: int = 1, *, train: float = 2.0, tell: bool = True, **options) -> None:
        shape: dict[str, Any] = {"steps": 20, "prompts_per_step": 4, "group_size": 4}
        super().__init__(policy, seed, **(shape | options))
        self.train, self.tell, self.scale = train, tell, 8.0
        self.due: list[tuple[float, Event]] = []

    def answers(self, instruction: Instruction) -> list[Event]:
        said = super().answers(instruction)
        if not isinstance(instruction, Accumulate | Train):
            return said
        begin = max([self.now, *(time for time, _ in self.due)])
        self.due.append((begin + trained_tokens(instruction.groups) / self.train, said[0]))
        return []

    def step(self) -> None:
        if self.tell:
            self.hear(Tick(self.now))
        while self.owed:
            self.hear(self.owed.pop(0))
        if self.coordinator.finished:
            return
        self.now += 1.0
        for rid, one in sorted(self.running.items()):
            one.versions.append(self.served[one.request.engine])
            if len(one.versions) >= one.length:
                del self.running[rid]
                self.owed.append(one.ended("stop"))
        self.owed += [event for time, event in self.due if time <= self.now]
        self.due = [(time, event) for time, event in self.due if time > self.now]


def early(confidence: float = 0.5) -> SpeculativeSync:
    return SpeculativeSync(confidence)


def test_training_begins_early() -> None:
    """What is complete is trained on while the last responses are generated; steps are the same."""
    plain = TimedWorld(Synchronous())
    speculative = early()
    run = TimedWorld(Synchronous(speculative=speculative))
    plain.go(), run.go()
    orders = run.all(Accumulate)
    assert len(orders) > 10 and speculative.begun == len(orders)
    assert all(order.step > 1 for order in orders), "in the first step nothing is known of the trainer's pace"
    draws = [[sorted(g.prompt.draw for g in groups) for groups in one.steps.values()] for one in (run, plain)]
    assert draws[0] == draws[1]
    for step, groups in run.steps.items():
        assert set(run.versions(groups)) == {step - 1}
    assert run.now < 0.95 * plain.now


def test_without_time() -> None:
    """Nothing is predicted, and nothing else is said than without it."""
    plain, run = TimedWorld(Synchronous()), TimedWorld(Synchronous(speculative=early()), tell=False)
    assert run.go().said == plain.go().said


def test_fast_trainer() -> None:
    """Where gradients take no time, nothing is predicted to end within it."""
    run = TimedWorld(Synchronous(speculative=early()), train=10_000.0).go()
    assert len(run.all(Accumulate)) < 5


@pytest.mark.slow
def test_confidence() -> None:
    """The more confidence is wanted, the later training begins, and predictions are right as often as they say."""
    left, ends = [], []
    for confidence in (0.2, 0.5):
        run = TimedWorld(Synchronous(speculative=early(confidence)), steps=40)
        missing: list[int] = []
        right: list[bool] = []
        until: list[float] = []

        def watch(instruction: Instruction, run=run, missing=missing, until=until) -> None:
            if isinstance(instruction, Accumulate) and not until and run.running:
                missing.append(len(run.running))
                until.append(run.now + trained_tokens(instruction.groups) / run.train)

        run.watch = watch
        run.start()
        while not run.coordinator.finished:
            run.step()
            if until and not run.running:
                right.append(run.now <= until.pop() + 1.0)  # time comes in whole seconds
        assert len(right) > 30 and np.mean(right) > confidence
        left.append(float(np.mean(missing)))
        ends.append(run.now)
    assert left[0] > left[1] >= 1.0
    assert ends[0] < ends[1] < TimedWorld(Synchronous(), steps=40).go().now


def test_tail_batching() -> None:
    """In a short round only as many prompts as it still needs have to be in time."""
    run = TimedWorld(TailBatching(1.5, 1.25, 0, speculative=early())).go()
    assert run.all(Accumulate) and {len(groups) for groups in run.steps.values()} == {4}
    assert len(set(run.trained)) == 80


def likeliest(coordinator: Coordinator, seconds: float) -> float:
    """The same by trying every choice of prompts and, for each, of responses."""
    ledger, pace, lengths, now = coordinator.ledger, coordinator.pace, coordinator.lengths, coordinator.now
    chances = []
    for entry in ledger.at(PromptStage.RUNNING):
        has = [pace.tokens(f"{entry.prompt.draw:08d}.00/{i}", now) for i in range(entry.n) if i not in entry.responses]
        longest = max((len(one.token_ids) for one in entry.responses.values()), default=0)
        has = [max(tokens, longest) for tokens in has]
        each = [lengths.ends_by(entry.prompt, tokens + int(pace.growth * seconds), tokens) for tokens in has]
        wanted = entry.need - len(entry.responses)
        chances.append(max(math.prod(some) for some in itertools.combinations(each, wanted)))
    missing = coordinator.settings.prompts_per_step - ledger.count(
        PromptStage.COMPLETE, PromptStage.SCORED, PromptStage.TRAINING
    )
    return max(math.prod(some) for some in itertools.combinations(chances, missing))


def test_probability_is_that_of_the_likeliest_choice() -> None:
    run = TimedWorld(TailBatching(2.0, 1.5, 0), prompts_per_step=3)
    run.start()
    between = 0
    for _ in range(60):
        run.step()
        if run.coordinator.pace.growth and run.coordinator.ledger.count(PromptStage.RUNNING) >= 3:
            for seconds in (3.0, 10.0, 30.0, 100.0):
                expected = likeliest(run.coordinator, seconds)
                assert probability(run.coordinator, seconds) == pytest.approx(expected)
                between += 0.01 < expected < 0.99
    assert between > 20


def test_the_likeliest_responses_of_a_group_count() -> None:
    """Of two responses, one of which has far more tokens, the group needs one."""
    pace, ledger = Pace(), Ledger()
    pace.begin(Request(prompt(1), 1), 0.0)
    pace.end("00000001.00/0", 50, 5.0)
    ledger.draw([prompt(0)], [])
    ledger.generate(Request(prompt(0), n=2, need=1), served=0)
    long = Response("00000000.00/0", 0, 0, (7,) * 400, (0.0,) * 400, (0,) * 400, "abort")
    pace.begin(Request(prompt(0), n=2, need=1, begun=(long, None)), 5.0)
    settings = types.SimpleNamespace(prompts_per_step=1)
    coordinator: Any = types.SimpleNamespace(
        ledger=ledger, pace=pace, lengths=LengthPredictor(), now=6.0, settings=settings, exhausted=False
    )
    chances = [coordinator.lengths.ends_by(prompt(0), tokens + 100, tokens) for tokens in (410, 10)]
    assert abs(chances[0] - chances[1]) > 0.05
    assert probability(coordinator, 10.0) == pytest.approx(likeliest(coordinator, 10.0)) == pytest.approx(max(chances))


class TestPace:
    def test_old_measurements_fade(self) -> None:
        pace = Pace()
        for second in range(400):
            speed = 10 if second < 200 else 30
            pace.begin(Request(prompt(second), 1), float(second))
            pace.end(f"{second:08d}.00/0", speed, second + 1.0)
        assert pace.growth == pytest.approx(30.0, rel=0.05)

    def test_a_prompt_is_work_for_the_trainer_once(self) -> None:
        response = Response("00000000.00/0", 0, 0, (7,) * 5, (0.0,) * 5, (0,) * 5, "stop")
        sample = Sample(response, Reward(1.0, True))
        group = Group(dataclasses.replace(prompt(0), tokens=100), (sample, sample))
        assert trained_tokens([group, group]) == 2 * (100 + 5 + 5)

    def test_growth_and_training(self) -> None:
        run = TimedWorld(Synchronous(), train=3.0).go()
        assert run.coordinator.pace.growth == pytest.approx(1.0, rel=0.05)
        assert run.coordinator.pace.training == pytest.approx(3.0, rel=0.05)

    def test_unknown(self) -> None:
        pace = Pace()
        assert pace.growth == pace.training == 0.0 and pace.tokens("00000000.00/0", 5.0) == 0

    def test_what_goes_on_counts_its_new_tokens(self) -> None:
        """A response that was begun elsewhere grows from what it had."""
        pace, one = Pace(), Prompt("p", "s", "?", "!")
        begun = Response("00000000.00/0", 0, 0, (7,) * 100, (0.0,) * 100, (0,) * 100, "abort")
        pace.begin(Request(one, 1, attempt=1, begun=(begun,)), 10.0)
        pace.end("00000000.01/0", 150, 20.0)
        assert pace.growth == pytest.approx(5.0)

    def test_lost_and_repeated(self) -> None:
        """What was lost, or ends twice, measures nothing; nothing is kept of it."""
        run = TimedWorld(Synchronous(), steps=3)
        run.start()
        for _ in range(4):
            run.step()
        run.lose(next(iter(run.running.values())).request.rid)
        pace = run.go().coordinator.pace
        assert pace._open == {} and pace.growth == pytest.approx(1.0, rel=0.05)
        before = pace.growth
        pace.end("00000000.00/0", 50, run.now + 1000.0)
        assert pace.growth == before


class TestEndsBy:
    @pytest.mark.parametrize("running", [0, 100, 3000])
    def test_it_grows_from_nothing_to_certainty(self, running: int) -> None:
        mu, sigma = 5.0, 0.8
        assert ends_by(mu, sigma, running, running) == 0.0
        steps = [ends_by(mu, sigma, running + tokens, running) for tokens in (1, 50, 500, 50_000)]
        assert steps == sorted(steps) and steps[0] >= 0 and steps[-1] > 0.9

    def test_learnt(self) -> None:
        rng, lengths = random.Random(0), LengthPredictor(limit=10_000)
        for draw in range(400):
            for _ in range(4):
                lengths.observe(Prompt(f"p{draw}", "s", "?", "!", draw=draw), int(rng.lognormvariate(5.0, 0.5)) + 1)
        one = Prompt("other", "s", "?", "!", draw=1000)
        assert lengths.ends_by(one, 148) == pytest.approx(0.5, abs=0.05)
        assert lengths.ends_by(one, 10_000) == 1.0 and lengths.ends_by(one, 100, running=100) == 0.0
