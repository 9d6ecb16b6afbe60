"""The reward stage of a simulated cluster: how long sandboxes may run, and how many judges work side by side."""

from typing import Any

import pytest

from fluxjax.base.timeline import Timeline
from fluxjax.base.types import Prompt, Response
from fluxjax.coordinator.messages import Event, Request, RewardReady
from fluxjax.simulation.clock import Clock
from fluxjax.simulation.faults import FaultPlan
from fluxjax.simulation.options import Rewards, SimulationConfig
from fluxjax.simulation.reward_stage import Scoring
from fluxjax.simulation.workload import Samples


class Stage:
    """A reward stage, and the times and reasons of the rewards that it has given."""

    def __init__(self, **settings: Any) -> None:
        self.clock, self.given = Clock(), list[tuple[float, str]]()
        config = SimulationConfig(**settings)
        self.scoring = Scoring(self.clock, config, FaultPlan(config.faults, 0), self._hear, Timeline(1))

    def _hear(self, event: Event) -> None:
        assert isinstance(event, RewardReady)
        self.given.append((self.clock.now, event.reward.reason))

    def score(self, source: str, id: str, seconds: float = 0.0, *, correct: bool = True) -> None:
        prompt = Prompt(id, source, "?", "!", draw=len(self.given))
        response = Response(f"{id}/0", prompt.draw, 0, (7,), (-1.0,), (0,), "stop")
        samples = Samples([1], [correct], [seconds], [(1,)])
        self.scoring.score(Request(prompt, 1), response, samples, tokens=1000, step=1)


@pytest.mark.parametrize(("seconds", "expected"), [(14.0, (24.0, "")), (16.0, (25.0, "timed out"))])
def test_a_sandbox_may_run_for_one_and_a_half_times_the_anchor(seconds: float, expected: tuple[float, str]) -> None:
    stage = Stage(rewards=Rewards.SCHEDULED)
    stage.score("code", "p", 10.0)
    stage.clock.run()
    stage.score("code", "p", seconds)
    stage.clock.run()
    assert stage.given == [(10.0, ""), expected]


def test_a_wrong_response_is_no_anchor_and_without_the_scheduler_there_is_none() -> None:
    for stage, correct in ((Stage(rewards=Rewards.SCHEDULED), False), (Stage(rewards=Rewards.ASYNCHRONOUS), True)):
        stage.score("code", "p", 10.0, correct=correct)
        stage.clock.run()
        stage.score("code", "p", 29.0)
        stage.clock.run()
        assert stage.given[1] == (39.0, "")


def test_scheduled_judges_are_on_every_gpu() -> None:
    """Four jobs: side by side with the scheduler, one after the other on the one judge without it."""
    side_by_side, in_a_row = (
        Stage(rewards=kind, gpus=4, judges=1) for kind in (Rewards.SCHEDULED, Rewards.ASYNCHRONOUS)
    )
    for stage in (side_by_side, in_a_row):
        for number in range(4):
            stage.score("judge", f"p{number}")
        stage.clock.run()
    [seconds] = {time for time, _ in side_by_side.given}
    assert [time for time, _ in in_a_row.given] == pytest.approx([seconds * (k + 1) for k in range(4)])
