"""When engines are lent and what is trained on early: the stream trainer, without engines or a trainer. The promises of
rounds (`promises/`) have the rest, on random histories."""

import dataclasses
from typing import Any

import pytest
from policy_cases import PolicyWorld

from fluxjax.config import Config
from fluxjax.coordinator import CoordinatorError, PromptStage, SchedulingPolicy, Settings, Synchronous, messages
from fluxjax.coordinator.messages import Accumulate, Generate, Instruction, Lend, Park, PublishWeights, Train
from fluxjax.coordinator.policies.early_training import StreamTrainer, projected_tokens
from fluxjax.coordinator.policies.rounds import Rounds
from fluxjax.coordinator.policies.tail_batching import TailBatching

SETTINGS = {"chunk": 1}


def stream_of(world: PolicyWorld) -> StreamTrainer:
    policy = world.coordinator.policy
    assert isinstance(policy, Rounds) and policy.stream is not None
    return policy.stream


def world(policy: SchedulingPolicy, seed: int = 3, **options: Any) -> PolicyWorld:
    shape: dict[str, Any] = {"steps": 6, "prompts_per_step": 8, "group_size": 4, "engines": 4}
    return PolicyWorld(policy, seed, **(shape | options))


def streaming(**changes) -> Synchronous:
    return Synchronous(stream=StreamTrainer(**SETTINGS | changes))


def watched(run: PolicyWorld, kind: type[Instruction]) -> list:
    """(instruction, running responses then, those that had ended, engines busy then) for each of a kind."""
    seen = []

    def watch(instruction: Instruction) -> None:
        if isinstance(instruction, kind):
            seen.append((instruction, len(run.running), run.coordinator.ledger.accepted, run.busy()))

    run.watch = watch
    run.go()
    return seen


class TestScaleDown:
    def test_a_milestone_counts_when_it_is_reached(self) -> None:
        """A quarter is 8 of 32 responses, not 9; every round lends half of the engines, once."""
        assert (StreamTrainer().first, StreamTrainer().last) == (0.2, 0.5)
        lends = watched(world(streaming(every=0.25)), Lend)
        assert [accepted - 32 * step for step, (_, _, accepted, _) in enumerate(lends)] == [8] * 6
        assert all(len(order.engines) == 2 for order, *_ in lends)

    def test_least_busy_engines(self) -> None:
        """Those with the least left to do, as it is predicted."""
        run = world(streaming())
        loads = []

        def watch(instruction: Instruction) -> None:
            if isinstance(instruction, Lend):
                loads.append((instruction.engines, before))

        run.watch = watch
        run.start()
        while not run.coordinator.finished:
            before = list(run.coordinator.fleet.load)
            run.step()
        for engines, load in loads:
            left = [load[e] for e in range(4) if e not in engines]
            assert max(load[e] for e in engines) <= min(left) + 300, "up to what ended in the same moment"

    def test_one_engine(self) -> None:
        """None is lent where there is no other, and nothing is trained on early."""
        run = world(streaming(), engines=1).go()
        assert not run.all(Lend) and not run.all(Accumulate)
        assert run.said == world(Synchronous(), engines=1).go().said

    def test_projection_refuses(self) -> None:
        """Not while the caches of the others could not hold what runs; asked again at every milestone."""
        run = world(streaming(), kv_tokens=1)
        run.go()
        stream = stream_of(run)
        assert not run.all(Lend) and stream.lent == 0
        assert 6 * 4 <= stream.refused <= 6 * 7, "at 20, 25, ..., 50 %"

    def test_projection(self) -> None:
        """Prompt and predicted length of each running response, or what a slot reserves."""
        run = world(Synchronous())
        coordinator = run.coordinator
        run.until(lambda: coordinator.ledger.accepted)
        running = coordinator.ledger.at(PromptStage.RUNNING)
        left = sum(entry.n - len(entry.responses) for entry in running)
        predicted = projected_tokens(coordinator)
        for entry in running:
            entry.prompt = dataclasses.replace(entry.prompt, tokens=100)
        assert projected_tokens(coordinator) == pytest.approx(predicted + 100 * left)
        coordinator.settings = dataclasses.replace(coordinator.settings, kv_reserved=10**6)
        assert projected_tokens(coordinator) == left * 10**6

    def test_capacity_is_that_of_the_cache_and_of_the_slots(self) -> None:
        config = Config()
        config.rollout.slots, config.rollout.max_sequence_tokens = 10, 100
        assert (Settings.of(config).kv_tokens, Settings.of(config).kv_reserved) == (1000, 100)
        config.rollout.kv_tokens = 400
        assert (Settings.of(config).kv_tokens, Settings.of(config).kv_reserved) == (400, 40)

    def test_capacity_decides_when(self) -> None:
        """The smaller the caches, the later engines are lent."""
        moments = []
        for slots in (100, 12, 10):
            run = world(streaming(), kv_tokens=slots * 10**6, kv_reserved=10**6)
            lends = watched(run, Lend)
            assert all(running <= 2 * slots for _, running, _, _ in lends)
            moments.append(sum(accepted % 32 for _, _, accepted, _ in lends) / max(len(lends), 1))
        assert moments[0] < moments[1] < moments[2]


class TestMigration:
    def test_tokens_and_versions_are_kept(self) -> None:
        """What ran on lent engines goes on on the others with the tokens it has, under the weights it has."""
        run = world(streaming()).go()
        parked = {order.prompt.draw: order for order in run.all(Park)}
        assert parked and all(order.keep for order in parked.values())
        continued = [r for order in run.all(Generate) for r in order.requests if r.begun]
        assert 20 < len(continued) <= len(run.all(Park)), "some ended in the same moment"
        tokens = 0
        lent = {order.engines for order in run.all(Lend)}
        for request in continued:
            assert all(request.engine not in engines for engines in lent) or len(lent) > 1
            assert len(request.begun) == request.n == 4
            tokens += sum(len(one.token_ids) for one in request.begun if one is not None)
        assert tokens > 0
        for step, groups in run.steps.items():
            assert set(run.versions(groups)) == {step - 1}, "strictly on-policy"

    def test_tail_batching_long_prompt_queue(self) -> None:
        """Migrated prompts don't get into the long-prompt queue, and those in the queue are not taken for migrated."""
        plain = TailBatching(1.5, 1.5, 0)
        streamed = TailBatching(1.5, 1.5, 0, stream=StreamTrainer(**SETTINGS))
        one, other = world(plain, steps=12).go(), world(streamed, steps=12).go()
        assert other.all(Lend) and plain.rounds == streamed.rounds
        assert len(one.trained) == len(other.trained) == 12 * 8

    def test_lost_after_migration(self) -> None:
        """A request that is lost on its way is generated anew, on an engine that is not lent."""
        run = world(streaming(first=0.1, last=0.9), steps=3)
        lost = []
        heard = run.hear

        def hear(event) -> None:
            heard(event)
            moved = [one for one in run.running.values() if one.request.begun]
            if moved and len(lost) < 5:
                lost.append(moved[0].request)
                run.lose(moved[0].request.rid)

        run.hear = hear
        run.go()
        assert len(lost) == 5
        assert sorted(run.trained) == list(range(24))
        for request in lost:
            again = [r for g in run.all(Generate) for r in g.requests if r.prompt == request.prompt]
            assert again[-1].attempt == request.attempt + 1 and not again[-1].begun


class TestTraining:
    def test_same_groups_as_without(self) -> None:
        """A round's set of groups does not depend on what is trained on early."""
        for make in (Synchronous, lambda **options: TailBatching(1.0, 1.0, 0, **options)):
            one, other = world(make()).go(), world(make(stream=StreamTrainer(**SETTINGS))).go()
            draws = [
                [sorted(group.prompt.draw for group in groups) for groups in w.steps.values()] for w in (one, other)
            ]
            assert draws[0] == draws[1]

    def test_train_waits_for_gradients_under_way(self) -> None:
        run = world(streaming())
        run.until(lambda: Accumulate in run.coordinator.awaiting)
        answer = [event for event in run.owed if isinstance(event, messages.Accumulated)]
        run.owed = [event for event in run.owed if not isinstance(event, messages.Accumulated)]
        while run.owed or run.running:
            run.step()
        assert not run.all(Train) and len(run.all(Accumulate)) == 1
        run.hear(answer[0])
        assert len(run.all(Train)) == 1 and len(run.all(Train)[0].groups) == 7

    def test_engines_come_back(self) -> None:
        """With the new weights; and if nothing was left to train, with those that they had."""
        run = world(streaming()).go()
        assert len(run.all(PublishWeights)) == 6 and not any(order.engines for order in run.all(PublishWeights))
        assert not run.coordinator.fleet.lent
        stream = StreamTrainer(**SETTINGS, first=0.0, last=0.9)
        policy = Synchronous(stream=stream, dynamic_sampling=True)  # and draw 0 has no variance
        skipping = world(policy, 1, steps=2, prompts_per_step=1, engines=2, prompts=1).go()
        assert skipping.all(Lend) and not skipping.all(Train)
        assert [order.engines for order in skipping.all(PublishWeights)] == [skipping.all(Lend)[0].engines]

    def test_stop(self) -> None:
        """The round under way is trained on, then the run ends with a checkpoint."""
        run = world(streaming())
        run.until(lambda: run.all(Accumulate))
        run.hear(messages.StopRequested("enough"))
        run.go()
        assert len(run.all(Train)) == 1 and sorted(run.trained) == list(range(8))
        assert len(run.states) == 1

    def test_answers_are_checked(self) -> None:
        run = world(streaming())
        run.until(lambda: Lend in run.coordinator.awaiting)
        with pytest.raises(CoordinatorError, match=r"engines .* was reported done"):
            run.coordinator.handle(messages.Lent((9,)))
        with pytest.raises(CoordinatorError, match="no Accumulate that it could answer"):
            run.coordinator.handle(messages.Accumulated(1))
