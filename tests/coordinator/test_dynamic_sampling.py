"""Dynamic sampling ends: by its bounds where nothing can be learnt, and at once when somebody wants it to."""

import dataclasses
import json
import re
from collections import Counter

import policy_cases
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_cases import PolicyWorld
from test_policies import POLICIES

from fluxjax.base.types import Reward
from fluxjax.config import DynamicSampling
from fluxjax.coordinator import CoordinatorError, PromptStage, Settings
from fluxjax.coordinator.ledger import Ledger
from fluxjax.coordinator.ledger_state import load_ledger_state
from fluxjax.coordinator.messages import Accumulate, DrawPrompts, Finish, SaveCheckpoint, Skip, StopRequested, Train
from fluxjax.coordinator.policies.rounds import NO_VARIANCE

# One policy a way of drawing prompts; `test_promises.py` has random histories of every policy with dynamic sampling.
NAMES = ["synchronous", "tail_batching_spread", "tail_batching_stream", "april", "april_early", "adaptive_async"]
every_way = pytest.mark.parametrize("name", NAMES)
BOUNDS = [(1, 3), (4, 2), (10, 4), (4, 2), (1, 3), (10, 4)]  # batches, and groups in a batch


@pytest.fixture
def broken(monkeypatch) -> None:
    """Every response of every prompt has the same reward."""
    monkeypatch.setattr(policy_cases, "reward", lambda rid: Reward(0.0, correct=False))


def world_of(name: str, seed: int, **options) -> PolicyWorld:
    make, _ = POLICIES[name]
    return PolicyWorld(make(dynamic_sampling=True), seed, engines=2, group_size=2, **options)


def dropped(world: PolicyWorld) -> int:
    """Groups that were dropped since the last step when the last checkpoint was saved, as the instructions tell."""
    count, last = 0, max((at for at, i in enumerate(world.said) if isinstance(i, SaveCheckpoint)), default=None)
    for instruction in world.said[:last]:
        count = 0 if isinstance(instruction, Train) else count + isinstance(instruction, Skip)
    return count


@pytest.mark.usefixtures("broken")
class TestNothingToLearn:
    @pytest.mark.parametrize(("name", "bound"), zip(NAMES, BOUNDS, strict=True))
    def test_the_bound_on_batches_ends_the_run(self, name: str, bound: tuple[int, int]) -> None:
        """As soon as so many batches can't hold a step's worth of groups; with a checkpoint, and in one line."""
        batches, size = bound
        world = world_of(name, 1, prompts_per_step=size, max_num_gen_batches=batches, rewards={"scripted": "my:rule"})
        with pytest.raises(CoordinatorError) as caught:
            world.go()
        line = str(caught.value)
        assert f"dropped {(batches - 1) * size + 1} groups" in line and "\n" not in line
        assert f"source 'scripted', reward my:rule, has 0 ({(batches - 1) * size + 1})" in line
        assert "step 1," in line and f"rollout.max_num_gen_batches is {batches}" in line
        assert [type(i) for i in world.said if isinstance(i, SaveCheckpoint | Train)] == [SaveCheckpoint]

    @every_way
    def test_skips_in_a_row_count_them_too(self, name: str) -> None:
        world = world_of(name, 1, max_skipped_in_a_row=25)
        with pytest.raises(CoordinatorError, match=r"dropped 25 groups .* \(25 dropped in a row\)"):
            world.go()

    @every_way
    @pytest.mark.long
    @settings(deadline=None, max_examples=6)
    @given(seed=st.integers(0, 10**6), after=st.integers(1, 150))
    def test_a_stop_stops(self, name: str, seed: int, after: int) -> None:
        """Nothing more is drawn; a resumed run counts on from where this one was."""
        bound = {"prompts_per_step": 3, "max_num_gen_batches": 30}
        world = world_of(name, seed, ends=after, **bound).go()
        assert world.all(Finish) == [Finish(0, "enough", complete=False)]
        assert not [i for i in world.said[world.said_by_stop :] if isinstance(i, DrawPrompts)]
        ((state, next_draw),) = world.states
        state = json.loads(json.dumps(state))
        before = sum(count for _, _, count in state["ledger"]["dropped"]["groups"])
        assert before == dropped(world) == state["ledger"]["dropped"]["in_a_row"]
        resumed = world_of(name, seed + 1, state=state, next_draw=next_draw, **bound)
        with pytest.raises(CoordinatorError, match=r"dropped 88 groups"):
            resumed.go()
        assert before + dropped(resumed) in range(88, 88 + 12), "those under way end before the run does"


@every_way
class TestSomethingToLearn:
    @pytest.mark.long
    @settings(deadline=None, max_examples=2)
    @given(seed=st.integers(0, 10**6))
    def test_bounds_are_of_a_step_and_of_a_row(self, name: str, seed: int) -> None:
        """A group in four is dropped at least: many in the whole run, few in a step, fewer in a row."""
        world = world_of(name, seed, steps=60, max_num_gen_batches=9, max_skipped_in_a_row=26).go()
        assert len(world.all(Train)) == 60 and len(world.all(Skip)) > 40

    @pytest.mark.long
    @settings(deadline=None, max_examples=8)
    @given(seed=st.integers(0, 10**6), after=st.integers(1, 120))
    @example(seed=597, after=102)  # the reward that the step lacked comes when its held prompts are parked
    def test_stop_and_resume(self, name: str, seed: int, after: int) -> None:
        """After a stop nothing is drawn in the place of what is dropped, and at most the step under way is trained. A
        resumed run has whole steps, without a group too many or too few."""
        options = {"steps": 8, "prompts_per_step": 4}
        world = world_of(name, seed, ends=after, **options).go()
        late = world.said[world.said_by_stop :]
        assert not [i for i in late if isinstance(i, DrawPrompts)]
        assert len([i for i in late if isinstance(i, Train)]) <= 1
        if world.coordinator.finished == Finish(8, "all 8 steps are done"):
            return
        state, next_draw = world.states[-1]
        assert sum(count for _, _, count in state["ledger"]["dropped"]["groups"]) == dropped(world)
        resumed = world_of(name, seed + 1, state=json.loads(json.dumps(state)), next_draw=next_draw, **options).go()
        done = [group.prompt.draw for step in world.all(Train) for group in world.steps[step.step]]
        steps = {step: world.steps[step] for step in range(1, state["step"] + 1)} | resumed.steps
        assert sorted(steps) == list(range(1, 9)) and all(len(groups) == 4 for groups in steps.values())
        assert not set(done) & set(resumed.trained)
        skipped = [s.draw for s in resumed.coordinator.ledger.skipped]
        everything = [*done, *resumed.trained, *skipped, *resumed.coordinator.ledger.entries]
        assert sorted(everything) == list(range(resumed.next_draw))


@pytest.mark.slow
def test_a_stopped_step_is_resumed_as_if_there_had_been_no_stop() -> None:
    """Synchronous: the same groups make each step, wherever the run was stopped."""
    whole = [[g.prompt.draw for g in groups] for groups in world_of("synchronous", 1, steps=4).go().steps.values()]
    stopped_in_a_step = 0
    for after in range(1, 60):
        world = world_of("synchronous", after, steps=4, ends=after).go()
        state, next_draw = world.states[-1]
        stopped_in_a_step += bool(state["ledger"]["entries"])
        steps = world.steps
        if state["step"] < 4:
            resumed = world_of("synchronous", after + 1, steps=4, state=state, next_draw=next_draw).go()
            steps = {step: steps[step] for step in range(1, state["step"] + 1)} | resumed.steps
        assert [[g.prompt.draw for g in groups] for groups in steps.values()] == whole
    assert stopped_in_a_step > 10


def _in_a_streamed_step(seed: int) -> PolicyWorld | None:
    """Gradients of some groups are computed, other groups were dropped, and the step is far from complete."""
    world = world_of("synchronous_stream", seed, prompts_per_step=6)
    world.until(lambda: world.all(Train) or (world.all(Accumulate) and dropped(world)))
    return world if not world.all(Train) and len(world.trained) < 5 else None


def test_gradients_computed_early_are_given_up_by_a_stop() -> None:
    """Their groups are saved as scored: the resumed run computes them again, once."""
    world = next(filter(None, (_in_a_streamed_step(seed) for seed in range(200))))
    early = [group.prompt.draw for order in world.all(Accumulate) for group in order.groups]
    world.hear(StopRequested("enough"))
    assert not world.go().all(Train)
    state, next_draw = world.states[-1]
    saved = {entry["draw"]: entry["stage"] for entry in state["ledger"]["entries"]}
    assert all(saved[draw] == "scored" for draw in early)
    resumed = world_of("synchronous_stream", 1, prompts_per_step=6, state=state, next_draw=next_draw, steps=1).go()
    assert set(early) <= set(resumed.trained) and len(resumed.trained) == 6


@every_way
@pytest.mark.parametrize("by", [DynamicSampling.CORRECT, DynamicSampling.VALUE])
def test_shaping_alone_tells_no_responses_apart(name: str, by: DynamicSampling, monkeypatch) -> None:
    """By default only groups with right and wrong answers are trained on, as in DAPO and verl, whatever a length or a
    format is worth; where rewards are compared, all but those that are equal but for rounding."""

    def shaped(rid: str) -> Reward:
        kind, odd = int(rid[:8]) % 4, int(rid.rpartition("/")[2]) % 2
        values = ((0.3, 0.1 + 0.2), (1.0, 0.9), (0.0, 1.0), (0.0, 0.1))[kind]
        return Reward(values[odd], correct=kind == 1 or (kind == 2 and odd == 1))

    monkeypatch.setattr(policy_cases, "reward", shaped)
    world = world_of(name, 1, steps=3, dynamic_sampling_by=by).go()
    told_apart = {2} if by is DynamicSampling.CORRECT else {1, 2, 3}
    assert {draw % 4 for draw in world.trained} == told_apart
    assert {skip.prompt.draw % 4 for skip in world.all(Skip)} >= {0, 1, 2, 3} - told_apart


def test_a_run_that_compares_right_and_wrong_says_how_to_compare_rewards(monkeypatch) -> None:
    """A reward without a right answer, such as a grade, has `correct` False throughout."""
    monkeypatch.setattr(policy_cases, "reward", lambda rid: Reward(int(rid[-1]) / 4, correct=False))
    with pytest.raises(CoordinatorError, match=r"dynamic_sampling is correct.*another rollout\.dynamic_sampling"):
        world_of("synchronous", 1, max_num_gen_batches=2).go()
    assert world_of("synchronous", 1, steps=1, dynamic_sampling_by=DynamicSampling.VALUE).go().trained


def test_sources_and_their_rewards_are_told_apart(monkeypatch) -> None:
    """The most frequent come first, and a source with many different rewards has not all of them told."""
    plain = policy_cases.prompt
    prompt = lambda draw: dataclasses.replace(plain(draw), source="ab"[draw % 3 == 0])  # noqa: E731
    monkeypatch.setattr(policy_cases, "prompt", prompt)
    monkeypatch.setattr(policy_cases, "reward", lambda rid: Reward(float(int(rid[:8]) % 4 == 1), correct=False))
    with pytest.raises(CoordinatorError) as caught:
        world_of("synchronous", 1, max_num_gen_batches=9).go()
    found = re.search(r"source 'a' has 0 \((\d+)\), 1 \((\d+)\)", str(caught.value))
    assert found and int(found[1]) > int(found[2]) > 1
    assert "source 'b' has 0" in str(caught.value)


@pytest.mark.usefixtures("broken")
def test_whoever_mends_the_reward_begins_to_count_anew() -> None:
    world = world_of("synchronous", 1, max_num_gen_batches=9)
    with pytest.raises(CoordinatorError, match="max_num_gen_batches"):
        world.go()
    assert world.coordinator.ledger.dropped
    resumed, prompts = Ledger(), {d: e.prompt for d, e in world.coordinator.ledger.entries.items()}
    load_ledger_state(resumed, world.coordinator.state_dict()["ledger"], prompts)
    assert resumed.dropped.total() == resumed.dropped_in_a_row == 0, "else the next group that is dropped would end it"


def test_a_trained_step_begins_the_count_anew() -> None:
    world = world_of("synchronous", 3, prompts_per_step=4)
    world.start()
    before = 0
    while not world.all(Train):
        before = world.coordinator.ledger.dropped.total()
        world.step()
    assert before == len(world.all(Skip)) > 0
    assert all(i.reason == NO_VARIANCE for i in world.all(Skip))
    assert not world.coordinator.ledger.dropped


def test_a_step_that_has_its_groups_is_not_given_up() -> None:
    """However many were dropped for it: neither by the bound, nor by a stop."""
    bound, five = Settings(1, 2, 2, max_num_gen_batches=2), Counter({("scripted", 0.0): 5})
    assert bound.complaint(1, 1, five, 5) and not bound.complaint(1, 2, five, 5)

    for world in (world_of("tail_batching", seed) for seed in range(300)):
        ledger = world.coordinator.ledger
        world.until(lambda: world.all(Train) or (ledger.count(PromptStage.SCORED) >= 3 and ledger.dropped))  # noqa: B023
        if not world.all(Train):
            break
    else:
        raise AssertionError("no such moment")
    world.hear(StopRequested("enough"))
    assert len(world.go().all(Train)) == 1
