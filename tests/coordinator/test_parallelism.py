"""The parallelism planner: what it decides from preemptions, whatever they are, and what becomes of whole runs."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import PolicyWorld

from fluxjax.config import ParallelismConfig
from fluxjax.coordinator import Synchronous
from fluxjax.coordinator.engine_states import ParallelismPlanner
from fluxjax.coordinator.messages import ParallelismSet, SetParallelism, Trained
from fluxjax.coordinator.policies.april import April
from fluxjax.coordinator.policies.early_training import StreamTrainer
from fluxjax.coordinator.policies.tail_batching import TailBatching

POWERS = st.sampled_from([1, 2, 4, 8, 16])
COUNTS = st.lists(st.one_of(st.just(0), st.integers(0, 200)), max_size=40)


@st.composite
def planners(draw):
    most = draw(POWERS)
    degree = draw(POWERS.filter(lambda degree: degree <= most))
    settings = ParallelismConfig(
        degree=degree,
        min_degree=draw(POWERS.filter(lambda least: least <= degree)),
    )
    constants = {"max_degree": most, "rise": draw(st.sampled_from([1.0, 1.05, 2.0])), "calm": draw(st.integers(1, 5))}
    return type("Planner", (ParallelismPlanner,), constants)(settings, devices=draw(st.integers(0, 20)))


def test_a_rise_doubles_and_four_calm_steps_halve():
    planner = ParallelismPlanner(ParallelismConfig(min_degree=1), devices=4)
    assert planner.next(100) == 1, "the first step sets the measure"
    assert planner.next(105) == 1, "1.05 times is no sudden rise"
    assert planner.next(111) == 2
    assert planner.next(60) == 2
    assert planner.next(80) == 4
    assert planner.next(200) == 4, "there are no more devices"
    assert [planner.next(0) for _ in range(9)] == [4, 4, 4, 2, 2, 2, 2, 1, 1]
    assert planner.next(1) == 2, "any preemption is a rise above none"


def test_a_calm_start_counts_and_one_preemption_begins_anew():
    planner = ParallelismPlanner(ParallelismConfig(min_degree=1, degree=4))
    assert [planner.next(count) for count in (0, 0, 0, 0)] == [4, 4, 4, 2]
    assert [planner.next(count) for count in (0, 0, 0, 7, 0, 0, 0, 0)] == [2, 2, 2, 4, 4, 4, 4, 2]


@given(planners(), COUNTS)
def test_degrees_are_powers_of_two_within_the_host_and_change_by_one_step(planner, counts):
    devices_allow = planner.most
    assert devices_allow & (devices_allow - 1) == 0 and devices_allow <= planner.max_degree
    for count in counts:
        before = planner.degree
        after = planner.next(count)
        assert after == planner.degree and planner.least <= after <= devices_allow and after & (after - 1) == 0
        assert after in (before // 2, before, before * 2)
        assert after >= before or count == 0, "preemptions never take devices away"
        assert after <= before or count > 0, "without preemptions none are added"


@given(planners(), st.integers(1, 100), st.integers(2, 12))
def test_equal_preemptions_change_nothing(planner, count, steps):
    planner.next(count)
    degree = planner.degree
    assert {planner.next(count) for _ in range(steps)} == {degree}


@given(planners(), st.integers(0, 60))
def test_without_preemptions_the_degree_halves_every_few_steps(planner, steps):
    degree = planner.degree
    for _ in range(steps):
        planner.next(0)
    assert planner.degree == max(degree >> (steps // planner.calm), planner.least)


@given(planners(), COUNTS, COUNTS)
def test_a_resumed_planner_decides_as_one_that_went_on(planner, before, after):
    for count in before:
        planner.next(count)
    resumed = type(planner)(ParallelismConfig(min_degree=planner.least), devices=planner.most)
    resumed.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    assert [resumed.next(count) for count in after] == [planner.next(count) for count in after]


def test_resumed_on_fewer_devices_it_stays_within_them():
    planner = ParallelismPlanner(ParallelismConfig(min_degree=1, degree=8))
    fewer = ParallelismPlanner(ParallelismConfig(min_degree=1), devices=3)
    fewer.load_state_dict(planner.state_dict())
    assert fewer.degree == fewer.most == 2


class ChangingWorld(PolicyWorld):
    """Four devices; so many preemptions a step as chance has it."""

    def __init__(self, policy, seed, **options):
        super().__init__(policy, seed, engines=4, **options)
        self.coordinator.parallelism = ParallelismPlanner(ParallelismConfig(min_degree=1), devices=4)
        self.coordinator.parallelism.calm = 2

    def answers(self, instruction):
        if isinstance(instruction, SetParallelism):
            assert not self.running, "nothing runs when engines change"
            self.served, self.lent = [min(self.served)] * (4 // instruction.degree), set()
            return [ParallelismSet(instruction.degree, len(self.served), kv_tokens=100 * instruction.degree)]
        told = super().answers(instruction)
        count = {"rollout/preemptions": float(self.random.choice([0, 0, 0, 1, 4]))}
        return [
            dataclasses.replace(one, metrics={**one.metrics, **count}) if isinstance(one, Trained) else one
            for one in told
        ]

    def begin(self, request):
        assert request.engine < len(self.served)
        super().begin(request)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("policy", [Synchronous, lambda **options: TailBatching(1.25, 1.25, 0, **options), April])
def test_engines_change_between_rounds_and_no_prompt_is_lost(policy, streaming):
    degrees = set()
    for seed in range(12):
        stream = StreamTrainer() if streaming else None
        world = ChangingWorld(policy(stream=stream), seed, steps=10, faults=3, checkpoint_every=3, kv_tokens=1000).go()
        assert world.coordinator.finished.complete and set(world.steps) == set(range(1, 11))
        assert all(len(groups) == 3 for groups in world.steps.values())
        assert len(set(world.trained)) == len(world.trained)
        assert min(world.served) == max(world.served) == world.version
        fleet = world.coordinator.fleet
        assert len(fleet) * fleet.degree == 4 and fleet.kv_tokens in (1000, 100 * fleet.degree)
        degrees |= {order.degree for order in world.all(SetParallelism)}
    assert degrees == {1, 2, 4}
