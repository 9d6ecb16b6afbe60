"""What each policy promises (`tests/promises/`), on random histories and worked out by hand.

More seeds: `FLUXJAX_SEEDS=1000 python -m pytest tests/coordinator/test_promises.py -k kept`.
"""

import math
import os
from typing import Any

import pytest
from promise_cases import SCHEDULES, PromisedWorld, configuration, history
from promises.adaptive_async_promises import AdaptiveAsyncPromises
from promises.rounds_promises import TailBatchingPromises

from fluxjax.base.types import Prompt
from fluxjax.config import POLICIES, AdaptiveAsyncConfig, Config, DynamicSampling, TailBatchingConfig
from fluxjax.config.schedules import Pid
from fluxjax.coordinator import messages
from fluxjax.coordinator.messages import DrawPrompts, Generate, Park, Skip, Train
from fluxjax.coordinator.policies.adaptive_async import AdaptiveAsync, staleness
from fluxjax.coordinator.policies.rounds import NO_VARIANCE
from fluxjax.coordinator.policies.tail_batching import TailBatching

FREE = {"sync_interval": 1000, "tolerance": 1.0}  # no forced barriers
SEEDS = int(os.environ.get("FLUXJAX_SEEDS", "60"))  # a policy
every_policy = pytest.mark.parametrize("policy", list(POLICIES))


def config(policy: str, *, steps: int = 12, prompts: int = 8, size: int = 4, engines: int = 1) -> Any:
    """A `Config`; its policy has the settings of the class that the name stands for."""
    made = Config()
    made.policy = TailBatchingConfig(1.25, 1.25, 0) if policy == "tail_batching" else POLICIES[policy]()  # as in Flexes
    made.rollout.engines, made.steps = engines, steps
    made.rollout.prompts_per_step, made.rollout.group_size = prompts, size
    return made


@pytest.mark.slow
@every_policy
@pytest.mark.parametrize("part", range(6))
def test_promises_are_kept(policy: str, part: int) -> None:
    for seed in range(part, SEEDS, 6):
        history(seed, policy).kept()


def test_histories_differ() -> None:
    """The random histories have everything in them that there are promises about."""
    made = [configuration(seed, policy)[0] for seed in range(SEEDS) for policy in POLICIES]
    assert {one.rollout.prompts_per_step for one in made} >= {1, 16}
    for switch in ("stream_trainer", "speculative_sync"):
        assert sum(bool(getattr(one, switch)) for one in made) > 20
    assert sum((one.policy.staleness_limit or 0) > 0 for one in made if isinstance(one.policy, TailBatchingConfig)) > 10
    for section, field in SCHEDULES:
        assert sum(isinstance(getattr(getattr(one, section), field, None), str) for one in made) > 5


def barriers_of(world: PromisedWorld) -> tuple[int, int]:
    """Barriers, as the promises count them and as the policy does."""
    policy = world.coordinator.policy
    assert isinstance(world.promises, AdaptiveAsyncPromises) and isinstance(policy, AdaptiveAsync)
    return world.promises.barriers, policy.barriers


class TestTailBatching:
    def test_four_short_rounds_and_a_long_one(self) -> None:
        """At 1.25, a short round leaves a quarter of a step behind: after four of them comes a long round, which trains
        on that, again and again (Flexes, section 3), and not only when the data ends."""
        world = PromisedWorld(config("tail_batching", steps=15), 1).kept()
        policy = world.coordinator.policy
        assert isinstance(world.promises, TailBatchingPromises) and isinstance(policy, TailBatching)
        assert world.promises.kinds == (["short"] * 4 + ["long"]) * 3
        assert policy.rounds == {"short": 12, "long": 3}
        launched = [len(order.requests) for order in world.all(Generate)]
        assert launched == [10, 10, 10, 10, 8] * 3
        put_off = [order.prompt.draw for order in world.all(Park)]
        late = [group.prompt.draw for train in world.all(Train)[4::5] for group in train.groups]
        assert len(put_off) == 24 and sorted(put_off) == sorted(late) and not world.all(Skip)

    def test_by_default_what_was_put_off_is_in_two_of_three_steps(self) -> None:
        """Twice the prompts leave a step's worth behind at once, of which half is trained on in the long round and half
        in the step behind it, one version old. That step leaves half a step's worth, which is there in the next long
        round, and its other own prompts are those."""
        default = config("tail_batching", steps=9)
        default.policy = TailBatchingConfig()
        world = PromisedWorld(default, 1).kept()
        assert isinstance(world.promises, TailBatchingPromises)
        assert world.promises.kinds == ["short", "long", "short"] * 3
        put_off = {order.prompt.draw for order in world.all(Park)}
        trains = world.all(Train)
        shares = [sum(group.prompt.draw in put_off for group in train.groups) for train in trains]
        assert shares == [0, 4, 4, 0, 8, 4, 0, 8, 4]
        newest = [[max(v for s in group.samples for v in s.response.versions) for group in t.groups] for t in trains]
        ages = [{train.step - 1 - version for version in own} for train, own in zip(trains, newest, strict=True)]
        assert ages == [{0}, {0}, {0, 1}] * 3

    def test_a_short_round_launches_what_it_promises(self) -> None:
        tail = config("tail_batching", steps=1)
        tail.policy.prompts, tail.policy.responses = 1.5, 1.75
        world = PromisedWorld(tail, 2).kept()
        requests = world.all(Generate)[0].requests
        assert len(requests) == 12 and {(one.n, one.need) for one in requests} == {(7, 4)}

    def test_surplus_winners_are_put_off(self) -> None:
        """Under dynamic sampling, groups that are complete beyond those needed are kept for a long round."""
        found = 0
        for seed in range(8):
            tail = config("tail_batching", steps=8, prompts=4, size=2)
            tail.rollout.dynamic_sampling, tail.policy.prompts = DynamicSampling.CORRECT, 2.0
            world = PromisedWorld(tail, seed)
            books = world.promises.books

            def watch(what, world=world, books=books) -> None:
                nonlocal found
                if isinstance(what, Park) and books.prompts[what.prompt.draw].ended:
                    found += len(books.prompts[what.prompt.draw].ended) == 2
                world.promises.see(what)

            world.watch = watch
            world.kept()
            assert {order.reason for order in world.all(Skip)} <= {NO_VARIANCE}
        assert found, "a group was complete and not needed"

    def test_the_lowest_draws_win(self) -> None:
        """Groups that are scored while new prompts are drawn may be more than are needed when the round can end: those
        drawn first are trained on, in whichever order they were complete."""
        tail = config("tail_batching", prompts=2, size=2)
        tail.rollout.dynamic_sampling, tail.policy.prompts, tail.policy.responses = DynamicSampling.CORRECT, 2.0, 1.0
        world = PromisedWorld(tail, 0)
        world.start()
        while not world.running:
            world.hear(world.owed.pop())
        assert {one.request.prompt.draw for one in world.running.values()} == {0, 1, 2, 3}
        for draw in (0, 3, 2, 1):  # all rewards of draw 0 are equal
            for rid in [rid for rid, one in world.running.items() if one.request.prompt.draw == draw]:
                world.running[rid].versions.append(0)
                world.hear(world.running.pop(rid).ended("stop"))
            for event in [event for event in world.owed if isinstance(event, messages.RewardReady)]:
                world.owed.remove(event)
                world.hear(event)
        [drawn] = [event for event in world.owed if isinstance(event, messages.PromptsDrawn)]
        world.owed.remove(drawn)
        world.hear(drawn)
        assert [group.prompt.draw for group in world.all(Train)[0].groups] == [1, 2]
        assert [order.prompt.draw for order in world.all(Park)] == [4, 3] and not world.promises.wrong


class TestAdaptiveAsync:
    @pytest.mark.parametrize(("limit", "ratio"), [(1, 1.0), (2, 1.0), (3, 0.5), (4, 0.25), (4, 1.0)])
    def test_exactly_as_far_ahead_as_allowed(self, limit: int, ratio: float, monkeypatch) -> None:
        """Before anything is trained, (1 + ratio x limit) steps of prompts are under way: not one more, not one less;
        and what is trained on gets as old as the limit, where generation is that far ahead."""
        chosen = config("adaptive_async", steps=30)
        chosen.policy = AdaptiveAsyncConfig(limit, ratio=ratio)
        world, most = PromisedWorld(chosen, 1, FREE), 0
        for told in (world.coordinator.policy, world.promises):
            monkeypatch.setattr(
                told, "_pid" if hasattr(told, "_pid") else "pid", Pid(ratio, ratio, ratio, kp=0.0, ki=0.0, kd=0.0)
            )
        world.start()
        while not world.coordinator.finished:
            most = max(most, len(world.promises.books.prompts))
            world.step()
        assert not world.promises.wrong
        assert most == math.floor((1 + ratio * limit) * 8)
        assert world.all(DrawPrompts)[0].count == most
        oldest = max(step - 1 - min(world.versions(groups)) for step, groups in world.steps.items())
        assert oldest == limit if ratio == 1.0 else 0 < oldest <= limit

    def test_a_barrier_empties_the_engines(self) -> None:
        """After `sync_interval` steps without one, nothing new is drawn until everything that ran was trained on."""
        chosen = config("adaptive_async", steps=40)
        world = PromisedWorld(chosen, 1, {"sync_interval": 4, "tolerance": 1.0})
        emptied = 0

        def watch(what) -> None:
            nonlocal emptied
            if isinstance(what, DrawPrompts) and world.coordinator.step:
                emptied += not world.running and not world.promises.books.awaiting
            world.promises.see(what)

        world.watch = watch
        world.kept()
        promised, barriers = barriers_of(world)
        assert promised == barriers >= 4
        assert emptied in (barriers, barriers - 1), "the last one may come with the end of the run"

    def test_too_stale_data_declares_a_barrier(self) -> None:
        chosen = config("adaptive_async", steps=30)
        chosen.policy = AdaptiveAsyncConfig(target_staleness=0.05)
        world = PromisedWorld(chosen, 1, FREE | {"tolerance": 0.0}).kept()
        promised, barriers = barriers_of(world)
        assert promised == barriers >= 2

    def test_what_is_on_policy_declares_none(self) -> None:
        """At a target of 0 and without tolerance, data of the newest weights is not too stale."""
        chosen = config("adaptive_async", steps=6)
        chosen.policy = AdaptiveAsyncConfig(ratio=0.0, target_staleness=0.0)
        assert barriers_of(PromisedWorld(chosen, 1, FREE | {"tolerance": 0.0}).kept())[1] == 0

    @pytest.mark.parametrize(
        ("metrics", "expected"),
        [
            ({"staleness/kl": 0.05}, 0.4 * 0.5),
            ({"staleness/variance": math.expm1(1.0)}, 0.3 * 0.5),
            ({"staleness/lag_mean": 3.0}, 0.3 * 0.75),
            ({"staleness/kl": 9.0}, 1.0),
            ({"staleness/kl": math.nan}, 1.0),
            ({}, 0.0),
        ],
    )
    def test_staleness(self, metrics: dict[str, float], expected: float) -> None:
        """KL, variance and versions over their normalisers, weighted; never beyond 1, and 1 where it is no number."""
        assert staleness(metrics, 4) == pytest.approx(expected)

    def test_engines_count_as_old_as_the_oldest(self) -> None:
        """One of two engines has the new weights: the fleet serves the old ones until the other has them, too."""
        chosen = config("adaptive_async", steps=20, engines=2)
        chosen.policy.interrupt = False
        world, mixed = PromisedWorld(chosen, 1), 0
        inner = world.hear

        def hear(event) -> None:
            nonlocal mixed
            inner(event)
            assert world.coordinator.served == min(world.served)
            mixed += isinstance(event, messages.WeightsPublished) and len(set(world.served)) > 1

        world.hear = hear
        world.kept()
        assert mixed and any(len(order.engines) == 1 for order in world.all(messages.PublishWeights))

    def test_a_lost_prompt_is_as_old_as_the_engine_that_it_goes_to(self) -> None:
        """Its engine had the new weights; the only other one still has the old ones, which is what counts."""
        chosen = config("adaptive_async", steps=20, engines=2)
        chosen.policy.interrupt = False
        world = PromisedWorld(chosen, 1)
        world.start()
        newer: list[str] = []
        while not newer:
            world.step()
            if len(set(world.served)) > 1:
                ahead = world.served.index(max(world.served))
                newer = [one.request.rid for one in world.running.values() if one.request.engine == ahead]
        world.lose(newer[0])
        entry = world.coordinator.ledger.entries[int(newer[0][:8])]
        assert entry.engine != ahead and entry.born == min(world.served) < max(world.served)


class TestDynamicSampling:
    @every_policy
    def test_equal_groups_are_dropped_and_varied_ones_kept(self, policy: str) -> None:
        """In this world every fourth draw has equal rewards: those are skipped, and no others."""
        chosen = config(policy, steps=6)
        chosen.rollout.dynamic_sampling = DynamicSampling.CORRECT
        world = PromisedWorld(chosen, 2).kept()
        dropped = {order.prompt.draw for order in world.all(Skip)}
        assert dropped and all(draw % 4 == 0 for draw in dropped)
        assert world.trained and all(draw % 4 for draw in world.trained)


class TestApril:
    def test_more_prompts_and_what_is_begun_goes_on(self) -> None:
        chosen = config("april", steps=8)
        chosen.policy.oversample = 2.0
        world = PromisedWorld(chosen, 1).kept()
        assert world.all(DrawPrompts)[0].count == 16
        assert all(order.count == 8 for order in world.all(DrawPrompts)[1:]), "each step's place is filled again"
        assert any(request.begun for order in world.all(Generate) for request in order.requests)
        assert all(order.keep for order in world.all(Park))
        samples = [sample for groups in world.steps.values() for group in groups for sample in group.samples]
        assert any(len(set(sample.response.versions)) > 1 for sample in samples)

    def test_what_is_predicted_to_end_first_is_launched_first(self) -> None:
        """`long` and `short` are sources of which the lengths are known; draws come in the other order."""
        chosen = config("april", steps=1, prompts=4)
        world = PromisedWorld(chosen, 1)
        for draw in range(200):
            for source, tokens in (("long", 2000), ("short", 20)):
                world.coordinator.lengths.observe(Prompt(f"{source}{draw}", source, "?", "!"), tokens + draw)
        for event in (messages.Started(0), messages.Evaluated(0)):
            world.coordinator.handle(event)
        sources = ["long", "short", "long", "short", "long", "short"]
        prompts = tuple(Prompt(f"p{draw}", source, "?", "!", draw=draw) for draw, source in enumerate(sources))
        (order,) = world.coordinator.handle(messages.PromptsDrawn(prompts))
        assert isinstance(order, Generate)
        assert [request.prompt.draw for request in order.requests] == [1, 3, 5, 0, 2, 4]
