"""What a checkpoint keeps beside prompts: counts, controllers, barriers, the planner. Each was once lost by a mutant
that nothing else noticed."""

import json
from typing import Any

import pytest
from coordinator_cases import World, changed, names, prompt, response, reward, world_at
from policy_cases import PolicyWorld

from fluxjax.config import AdaptiveAsyncConfig, ParallelismConfig
from fluxjax.coordinator import Coordinator, CoordinatorError, Ledger, PromptStage, Settings, Synchronous
from fluxjax.coordinator.engine_states import ParallelismPlanner
from fluxjax.coordinator.ledger_state import ledger_state, load_ledger_state
from fluxjax.coordinator.messages import Evaluate, Evaluated, Generate, Park, Request, Started, StopRequested
from fluxjax.coordinator.policies.adaptive_async import AdaptiveAsync
from fluxjax.coordinator.policies.april import April
from fluxjax.coordinator.policies.tail_batching import TailBatching


def ledger_with_one(stage: PromptStage) -> Ledger:
    ledger = Ledger()
    ledger.draw([prompt(0)], [])
    if stage is PromptStage.WAITING:
        return ledger
    ledger.generate(Request(prompt(0), n=1), served=0)
    if stage is PromptStage.LOST:
        ledger.fail(["00000000.00"], "gone")
    elif stage is PromptStage.DEFERRED:
        ledger.park(Park(prompt(0), 0))
    else:
        ledger.finish(response(0, 0), newest_version=0)
        ledger.score(response(0, 0))
        ledger.reward("00000000.00/0", reward("00000000.00/0"))
    return ledger


@pytest.mark.parametrize("stage", [PromptStage.WAITING, PromptStage.DEFERRED, PromptStage.LOST, PromptStage.SCORED])
def test_what_nothing_is_awaited_of_can_be_given_up(stage: PromptStage) -> None:
    ledger = ledger_with_one(stage)
    assert ledger.count(stage) == 1
    ledger.skip(prompt(0), "enough")
    assert ledger.live == 0 and [one.reason for one in ledger.skipped] == ["enough"]


def test_counts_of_late_facts_go_on() -> None:
    ledger = ledger_with_one(PromptStage.LOST)
    ledger.finish(changed(response(0, 0)), newest_version=0)
    state = json.loads(json.dumps(ledger_state(ledger)))
    resumed = Ledger()
    load_ledger_state(resumed, state, {0: prompt(0)})
    assert resumed.ignored == ledger.ignored == {"late response": 1}
    assert ledger_state(resumed) == state


def test_the_planner_goes_on() -> None:
    def planned() -> Coordinator:
        planner = ParallelismPlanner(ParallelismConfig(min_degree=1), devices=8)
        return Coordinator(Settings(1, 1, 1), Synchronous(), parallelism=planner)

    before, after = planned(), planned()
    assert before.parallelism is not None and after.parallelism is not None
    for count in (0, 5, 50):
        before.parallelism.next(count)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.parallelism.degree == before.parallelism.degree == 4
    assert after.parallelism.state_dict() == before.parallelism.state_dict()


@pytest.mark.parametrize("step", [3, 7])
def test_a_resumed_policy_knows_what_it_knew(step: int) -> None:
    """Ratio, staleness and barrier of adaptive async, and the rounds of tail batching."""
    chosen = AdaptiveAsyncConfig(max_staleness=2, target_staleness=0.05)
    for make in (lambda: AdaptiveAsync(chosen, sync_interval=2), TailBatching):
        world = PolicyWorld(make(), 1, steps=8, prompts_per_step=4, checkpoint_every=1).go()
        state = next(state for state, _ in world.states if state["step"] == step)
        known = json.loads(json.dumps(state["policy"]))
        policy = make()
        assert policy.state_dict() != known
        policy.load_state_dict(known)
        assert json.loads(json.dumps(policy.state_dict())) == known


def test_what_became_too_old_begins_anew() -> None:
    """Resumed with a smaller limit, APRIL goes on with what the limit still allows, and with nothing older."""
    options: dict[str, Any] = {"steps": 8, "prompts_per_step": 4, "checkpoint_every": 1}
    whole = PolicyWorld(April(2.0, 4), 2, **options).go()
    anew = 0
    for state, next_draw in whole.states[:-1]:
        resumed = PolicyWorld(April(2.0, 1), 3, state=state, next_draw=next_draw, **options)
        begun = {entry["draw"]: entry["born"] for entry in state["ledger"]["entries"] if entry["begun"]}
        for request in resumed.until(lambda: resumed.all(Generate)).all(Generate)[0].requests:  # noqa: B023
            if request.prompt.draw in begun:
                old = begun[request.prompt.draw] < state["version"] - 1
                assert bool(request.begun) == (not old)
                anew += old
    assert anew, "something was too old"


def test_a_coordinator_that_runs_takes_no_state() -> None:
    coordinator = Coordinator(Settings(1, 1, 2), Synchronous())
    state = json.loads(json.dumps(coordinator.state_dict()))
    coordinator.load_state_dict(state)
    coordinator.handle(Started(0))
    with pytest.raises(CoordinatorError, match="state can only be loaded before the start"):
        coordinator.load_state_dict(state)


def test_an_evaluation_given_up_for_a_stop_is_made_by_whoever_resumes() -> None:
    world = world_at(Evaluate, steps=5, evaluate_every=2)
    world.deliver(Evaluated)
    world.until(Evaluate)
    world.hear(StopRequested("enough"))
    world.owed = [Evaluated(2, given_up=True)]
    assert names(world.finish().said[-2:]) == ["SaveCheckpoint", "Finish"] and world.coordinator.step == 2
    state, next_draw = world.states[0]
    assert state["evaluated"] == [0, True]
    resumed = World(steps=5, evaluate_every=2, state=state, next_draw=next_draw, served=2)
    assert resumed.until(Evaluate) == Evaluate(2)
