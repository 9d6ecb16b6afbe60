"""What every policy holds to when it is stopped and resumed; and what is special about each. `test_promises.py` has
random histories of all of them."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import policy_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import PolicyWorld
from turns import third_of

from fluxjax.base.types import Reward
from fluxjax.config import AdaptiveAsyncConfig, Config, ConfigError, DynamicSampling
from fluxjax.config.schedules import parse
from fluxjax.coordinator import SchedulingPolicy, Synchronous, messages
from fluxjax.coordinator.factory import make_coordinator
from fluxjax.coordinator.messages import Finish, Generate, Park, SaveCheckpoint, Train
from fluxjax.coordinator.policies.adaptive_async import GAINS, AdaptiveAsync
from fluxjax.coordinator.policies.april import April
from fluxjax.coordinator.policies.early_training import SpeculativeSync, StreamTrainer
from fluxjax.coordinator.policies.tail_batching import TailBatching

ASYNC = AdaptiveAsyncConfig(max_staleness=3)
DRAINED = AdaptiveAsyncConfig(max_staleness=3, interrupt=False, ratio=0.9)
EAGER = AdaptiveAsyncConfig(max_staleness=2, ratio=1.0)
STREAM: dict[str, Any] = {"first": 0.1, "last": 0.9, "every": 0.01, "chunk": 1}
POLICIES: dict[str, tuple[Callable[..., SchedulingPolicy], int]] = {  # name: (made how, versions that data may be old)
    "synchronous": (Synchronous, 0),
    "tail_batching": (lambda **options: TailBatching(1.25, 1.25, 0, **options), 0),
    "tail_batching_spread": (lambda **options: TailBatching(1.25, 1.0, 2, **options), 2),
    "tail_batching_much_spread": (lambda **options: TailBatching(2.0, 2.0, 1, **options), 1),
    "april": (lambda **options: April(1.7, 2, **options), 2),
    "synchronous_stream": (lambda **options: Synchronous(stream=StreamTrainer(**STREAM), **options), 0),
    "tail_batching_stream": (lambda **options: TailBatching(1.5, 1.5, 0, stream=StreamTrainer(**STREAM), **options), 0),
    "april_stream": (lambda **options: April(1.7, 2, stream=StreamTrainer(**STREAM), **options), 2),
    "synchronous_early": (
        lambda **options: Synchronous(stream=StreamTrainer(**STREAM), speculative=SpeculativeSync(0.1), **options),
        0,
    ),
    "tail_batching_early": (
        lambda **options: TailBatching(1.25, 1.25, 0, speculative=SpeculativeSync(0.1), **options),
        0,
    ),
    "april_early": (lambda **options: April(1.7, 2, speculative=SpeculativeSync(0.1), **options), 2),
    "april_many": (lambda **options: April(4.0, 1, **options), 1),
    "adaptive_async": (lambda **options: AdaptiveAsync(ASYNC, sync_interval=3, **options), 3),
    "adaptive_async_drained": (lambda **options: AdaptiveAsync(DRAINED, **options), 3),
    "adaptive_async_eager": (lambda **options: AdaptiveAsync(EAGER, sync_interval=1000, **options), 2),
}
every_policy = pytest.mark.parametrize("name", POLICIES)
shapes = st.fixed_dictionaries(
    {"steps": st.integers(1, 6), "prompts_per_step": st.integers(1, 4), "group_size": st.integers(1, 3)}
)


@every_policy
@pytest.mark.parametrize("media", [False, True])
def test_engines_get_equal_work_of_prompts(name: str, media: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second prompt is long, or has many patches; by number alone one engine would get all of these."""
    sizes = ({"tokens": 60, "patches": 120_000} if media else {"tokens": 30_000}, {"tokens": 60})
    plain = policy_cases.prompt
    monkeypatch.setattr(policy_cases, "prompt", lambda draw: dataclasses.replace(plain(draw), **sizes[draw % 2]))
    world = PolicyWorld(
        POLICIES[name][0](),
        3,
        engines=2,
        prompts_per_step=16,
        group_size=4,
        prompt_work=0.3,
        patch_tokens=0.3,
        max_new_tokens=99,
    )
    world.until(lambda: world.all(messages.Generate))
    work = [0.0, 0.0]
    for request in world.all(messages.Generate)[0].requests:
        said = request.n * world.coordinator.lengths.predict(request.prompt)
        work[request.engine] += said + world.coordinator.work_of(request.prompt)
    assert min(work) > 0.8 * max(work) > 0


@every_policy
class TestEveryPolicy:
    def test_same_seed_same_history(self, name: str) -> None:
        make, _ = POLICIES[name]
        one, other = (PolicyWorld(make(), 5, engines=2, faults=2).go() for _ in range(2))
        assert one.said == other.said

    @pytest.mark.long
    @settings(deadline=None, max_examples=4)
    @given(seed=st.integers(0, 10**6), prompts=st.integers(5, 40))
    def test_resume_anywhere(self, name: str, seed: int, prompts: int) -> None:
        """A run goes on from any of its checkpoints, which is plain JSON: what it had not trained on, it trains on."""
        make, max_staleness = POLICIES[name]
        options: dict[str, Any] = {"steps": 6, "prompts": prompts, "checkpoint_every": 1, "engines": 2}
        whole = PolicyWorld(make(), seed, **options).go()
        for state, next_draw in whole.states:
            state = json.loads(json.dumps(state))
            resumed = PolicyWorld(make(), seed + 1, state=state, next_draw=next_draw, **options).go()
            done = whole.trained[: state["ledger"]["trained"]]
            assert not set(done) & set(resumed.trained)
            left = set(range(resumed.next_draw)) - set(done) - set(resumed.trained)
            assert left == set(resumed.coordinator.ledger.entries)
            for step, groups in resumed.steps.items():
                assert step - 1 - min(resumed.versions(groups)) <= max_staleness

    @pytest.mark.slow
    @settings(deadline=None, max_examples=8)
    @given(seed=st.integers(0, 10**6), after=st.integers(0, 60))
    def test_stop(self, name: str, seed: int, after: int) -> None:
        """A stop at any moment ends in a checkpoint from which nothing is missing."""
        make, _ = POLICIES[name]
        world = PolicyWorld(make(), seed, steps=20, engines=2, ends=after).go()
        finish = world.said[-1]
        assert isinstance(finish, Finish)
        if not finish.complete:
            assert isinstance([i for i in world.said if isinstance(i, SaveCheckpoint | Train)][-1], SaveCheckpoint)
            assert finish.reason == "enough"


def test_temperature_by_prompt(monkeypatch) -> None:
    """A prompt that was solved in one epoch is sampled colder in the next."""
    plain = policy_cases.prompt
    monkeypatch.setattr(policy_cases, "prompt", lambda draw: dataclasses.replace(plain(draw), id=f"p{draw % 3}"))
    monkeypatch.setattr(policy_cases, "reward", lambda rid: Reward(1.0, correct=int(rid[:8]) % 3 == 0))
    world = PolicyWorld(Synchronous(), 1)
    world.coordinator.schedules["temperature"] = parse("success(1.2, 0.8)", "schedules.temperature")
    world.go()
    asked = [request for order in world.all(Generate) for request in order.requests]
    temperatures = [request.temperature for request in sorted(asked, key=lambda request: request.prompt.draw)]
    assert temperatures == pytest.approx([1.0] * 3 + [0.8, 1.2, 1.2] * 3)


class TestTailBatching:
    def test_nothing_speculative_is_synchronous(self) -> None:
        """With nothing launched in excess, nothing is deferred: the synchronous policy, instruction for instruction."""
        tail, plain = PolicyWorld(TailBatching(1.0, 1.0, 0), 4).go(), PolicyWorld(Synchronous(), 4).go()
        assert tail.said == plain.said

    def test_long_prompts_are_spread(self) -> None:
        """A long round trains on the first share of what was deferred beside new prompts; each of the next steps on
        another, and no step on more than its share."""
        world = PolicyWorld(TailBatching(1.25, 1.0, 5), 3, steps=30, prompts_per_step=12, group_size=2).go()
        deferred = {order.prompt.draw for order in world.all(Park)}
        shares = [sum(group.prompt.draw in deferred for group in groups) for groups in world.steps.values()]
        assert shares[:4] == [0] * 4, "three prompts are deferred a short round"
        assert shares[4:9] == [2] * 5
        assert set(shares[9:]) <= {2, 3}, "the next long round comes a step before the last share of the one before"

    def test_too_old_to_be_held(self) -> None:
        """Groups that a run held with a larger bound are generated again."""
        world = PolicyWorld(TailBatching(1.25, 1.0, 5), 3, steps=6, prompts_per_step=12, checkpoint_every=1).go()
        state, next_draw = world.states[-1]
        held = set(state["policy"]["held"])
        later: dict[str, Any] = {"steps": 12, "prompts_per_step": 12, "state": state, "next_draw": next_draw}
        resumed = PolicyWorld(TailBatching(1.25, 1.0, 0), 4, **later).go()
        assert held and held <= {order.prompt.draw for order in resumed.all(Park)}
        check_lags = [step - 1 - min(resumed.versions(groups)) for step, groups in resumed.steps.items()]
        assert set(check_lags) == {0}


class TestApril:
    def test_parked_and_lost_in_the_last_step(self) -> None:
        """A request that is lost while what it had was awaited does not keep a run from ending after its steps."""
        world = PolicyWorld(April(2.0, 4), 2, steps=1, prompts_per_step=4)
        stop, lost = world.stop, []

        def lose_once(rid: str) -> list[messages.Event]:
            draw, ended = rid.partition(".")[0], stop(rid)
            if draw in lost:
                return ended
            lost.append(draw)
            return [messages.EngineFailed((rid,), "gone")]

        world.stop = lose_once
        world.go()
        assert len(world.trained) == 4
        left = world.coordinator.ledger.entries
        assert lost and {int(draw) for draw in lost} <= left.keys(), "and it is still there"


class TestAdaptiveAsync:
    @settings(deadline=None, max_examples=third_of(20))
    @given(shape=shapes, seed=st.integers(0, 10**6), prompts=st.integers(0, 30), faults=st.integers(0, 3))
    def test_ratio_zero_is_synchronous(self, shape, seed: int, prompts: int, faults: int) -> None:
        """At ratio 0 it says what the synchronous policy says, instruction for instruction."""
        zero = AdaptiveAsyncConfig(ratio=0.0)
        options: dict[str, Any] = dict(
            shape, prompts=prompts, faults=faults, evaluate_every=2, checkpoint_every=2, max_attempts=20
        )
        ahead = PolicyWorld(AdaptiveAsync(zero, sync_interval=10**6), seed, **options).go()
        plain = PolicyWorld(Synchronous(), seed, **options).go()
        assert ahead.said == plain.said

    def test_ratio_follows_staleness(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Above the target the ratio falls, below it rises, within its bounds."""
        monkeypatch.setitem(GAINS, "kp", 0.5)
        low, high = AdaptiveAsyncConfig(target_staleness=0.0), AdaptiveAsyncConfig(target_staleness=1.0)
        free: dict[str, Any] = {"tolerance": 1.0, "sync_interval": 1000}
        falling, rising = AdaptiveAsync(low, **free), AdaptiveAsync(high, **free)
        for policy in (falling, rising):
            PolicyWorld(policy, 3, steps=30).go()
        assert falling.ratio < 0.4 and rising.ratio == pytest.approx(0.9)


def test_settings_that_an_own_policy_would_not_read_are_refused() -> None:
    config = Config()
    assert isinstance(make_coordinator(config, Synchronous).policy, Synchronous)
    config.rollout.dynamic_sampling, config.stream_trainer = DynamicSampling.CORRECT, True
    with pytest.raises(ConfigError, match=r"rollout\.dynamic_sampling and stream_trainer would do nothing"):
        make_coordinator(config, Synchronous)
