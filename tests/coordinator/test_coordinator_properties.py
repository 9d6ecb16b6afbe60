"""What holds for every order of events, with replies lost, late and repeated: checked on random histories."""

import ast
import dataclasses
import pathlib
import random
import zlib
from typing import Any

import pytest
from coordinator_cases import World, changed, reward
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

import fluxjax.coordinator
from fluxjax.config.schedules import Success
from fluxjax.coordinator import messages
from fluxjax.coordinator.ledger import PromptStage
from fluxjax.coordinator.ledger_state import ledger_state
from fluxjax.coordinator.messages import Event, Generate, ResponseFinished, RewardReady, Train, request_id, response_id


class Varied(World):
    """Responses have many lengths, and prompts a temperature by how many of their responses were right."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.coordinator.schedules["temperature"] = Success(none=1.2, all=0.8)

    def answers(self, instruction: messages.Instruction) -> list[Event]:
        return [self._varied(event) for event in super().answers(instruction)]

    def _varied(self, event: Event) -> Event:
        if isinstance(event, ResponseFinished):
            count = 3 + 37 * (event.response.draw + 5 * event.response.sample) % 101
            tokens = {"token_ids": (7,) * count, "logprobs": (-1.0,) * count, "versions": (self.served,) * count}
            return ResponseFinished(changed(event.response, **tokens))
        if isinstance(event, RewardReady):
            right = zlib.crc32(event.rid.encode()) % 3 == 0
            return RewardReady(event.rid, dataclasses.replace(event.reward, correct=right))
        return event


def _history(world: World, choose: random.Random, *, faults: bool) -> None:
    """Lets owed events happen in random order until the end, with up to eight faults on the way."""
    delivered: list = []
    budget = 8 if faults else 0
    world.start()
    while not world.coordinator.finished:
        assert world.owed, f"Rule 30: nothing is under way, and the run is not finished: {world.said[-3:]}"
        fault = choose.randrange(12) if budget else 11
        running = world.coordinator.ledger.at(PromptStage.RUNNING)
        if fault == 0 and running:
            entry = choose.choice(running)
            if len(entry.responses) == entry.n:
                continue
            world.fail(entry.prompt.draw, entry.attempt, keep_late=choose.random() < 0.5)
        elif fault == 1 and delivered:
            world.hear(choose.choice(delivered))  # once more, maybe long after its prompt is done
        elif fault == 2 and any(isinstance(e, ResponseFinished) for e in world.owed):
            index = choose.choice([i for i, e in enumerate(world.owed) if isinstance(e, ResponseFinished)])
            lost = world.owed.pop(index)
            assert isinstance(lost, ResponseFinished)
            world.hear(ResponseFinished(changed(lost.response, finish="abort")))
        elif fault == 3 and delivered:
            ended = [e.response.rid.partition("/")[0] for e in delivered if isinstance(e, ResponseFinished)]
            if ended and (request := choose.choice(ended)) not in _running_requests(world):
                world.hear(messages.EngineFailed((request,), "told late"))
        else:
            event = world.owed.pop(choose.randrange(len(world.owed)))
            world.hear(event)
            if isinstance(event, ResponseFinished | RewardReady):
                delivered.append(event)
            continue
        budget -= 1


def _running_requests(world: World) -> set[str]:
    return {request_id(e.prompt.draw, e.attempt) for e in world.coordinator.ledger.at(PromptStage.RUNNING)}


def _check(world: World, *, steps: int, prompts_per_step: int, group_size: int) -> None:
    ledger = world.coordinator.ledger
    trained, skipped = world.trained, [s.draw for s in ledger.skipped]
    assert sorted(trained + skipped) == list(range(world.next_draw)), "Rule 27: each trained once or skipped once"
    assert ledger.live == 0 and ledger.drawn == world.next_draw
    assert all(s.reason for s in ledger.skipped)
    trains = world.all(Train)
    for step, train in enumerate(trains, start=1):
        assert train.step == step
        draws = [g.prompt.draw for g in train.groups]
        assert draws == sorted(draws)
        last = step == len(trains)
        assert len(draws) == prompts_per_step or (last and len(draws) > 0 and world.coordinator.exhausted), "Rule 9"
        for group in train.groups:
            assert [s.response.sample for s in group.samples] == list(range(group_size)), "Rule 28: groups are complete"
            assert len({s.response.token_ids[1] for s in group.samples}) == 1, "Rule 28: and of one attempt"
            for sample in group.samples:
                assert sample.response.draw == group.prompt.draw
                assert sample.reward == reward(sample.response.rid)
                assert set(sample.response.versions) == {step - 1}, "Rule 21: all of the version served"
                assert sample.response.finish != "abort", "Rule 15"
    if not world.coordinator.exhausted:
        assert len(trains) == steps
    attempts = [(r.prompt.draw, r.attempt) for g in world.all(Generate) for r in g.requests]
    assert len(set(attempts)) == len(attempts), "Rule 29: no request id is used twice"
    assert isinstance(world.said[-1], messages.Finish) and world.said[-1].step == len(trains)
    for kind in (messages.Evaluate, messages.SaveCheckpoint):
        done = [(i.step, getattr(i, "full", True)) for i in world.all(kind)]
        assert len(set(done)) == len(done) and done[-1] == (len(trains), True), "Rule 6"


shapes = st.fixed_dictionaries(
    {"steps": st.integers(1, 3), "prompts_per_step": st.integers(1, 3), "group_size": st.integers(1, 3)}
)


class TestRandomHistories:
    @pytest.mark.medium
    @settings(deadline=None, max_examples=third_of(150))
    @given(
        shapes,
        st.randoms(use_true_random=False),
        st.sets(st.integers(0, 12), max_size=5),
        st.integers(0, 14),
        st.integers(0, 2),
        st.integers(0, 2),
    )
    def test_faults(self, shape, choose, bad, prompts, evaluate_every, checkpoint_every) -> None:
        """Rules 27 to 30: whatever order replies come in, and whichever are lost, late, repeated or aborted, every
        prompt drawn is trained on exactly once or skipped once with a reason, groups are complete and of one
        attempt, request ids are unique, and until the end something is always under way."""
        world = World(
            **shape,
            prompts=prompts,
            bad=bad,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            max_attempts=12,  # more than there are faults: giving up is another rule's
        )
        _history(world, choose, faults=True)
        _check(world, **shape)

    @settings(deadline=None, max_examples=third_of(60))
    @given(shapes, st.randoms(use_true_random=False))
    def test_giving_up(self, shape, choose) -> None:
        """Rules 27 to 30 hold when prompts are given up, too."""
        world = World(**shape, prompts=30, max_attempts=2)
        try:
            _history(world, choose, faults=True)
        except fluxjax.coordinator.EngineLost:
            return  # Rule 17
        _check(world, **shape)

    @settings(deadline=None, max_examples=third_of(60))
    @given(shapes, st.randoms(use_true_random=False), st.sets(st.integers(0, 12), max_size=5), st.integers(1, 4))
    def test_order_does_not_matter(self, shape, choose, bad, engines) -> None:
        """Rule 31: without faults, what is trained on does not depend on the order in which replies come; nor does
        which engine gets which prompts, whose log-probs differ in their last bits by who is computed with whom."""
        shuffled, straight = (Varied(**shape, bad=bad, engines=engines) for _ in range(2))
        _history(shuffled, choose, faults=False)
        straight.finish()
        assert shuffled.all(Train) == straight.all(Train)
        assert shuffled.all(Generate) == straight.all(Generate)
        assert shuffled.coordinator.state_dict() == straight.coordinator.state_dict()

    @settings(deadline=None, max_examples=third_of(60))
    @given(shapes, st.randoms(use_true_random=False), st.sets(st.integers(0, 12), max_size=5), st.integers(1, 12))
    def test_resume_anywhere(self, shape, choose, bad, prompts) -> None:
        """Rule 8: from whichever checkpoint a run is resumed, it trains on what the whole run trained on."""
        options: dict[str, Any] = dict(shape, bad=bad, prompts=prompts, checkpoint_every=1)
        whole = World(**options).finish()
        state, next_draw = choose.choice(whole.states)
        resumed = World(**options, state=state, next_draw=next_draw, served=state["version"]).finish()
        assert resumed.all(Train) == whole.all(Train)[state["step"] :]
        assert ledger_state(resumed.coordinator.ledger) == ledger_state(whole.coordinator.ledger)


def test_versions_grow() -> None:
    """Rule 32: versions only grow, and the engines serve the trainer's newest when a step begins."""
    world = World(steps=5)
    seen = []
    original = world.hear

    def hear(event):
        said = original(event)
        seen.append((world.coordinator.version, world.coordinator.served))
        for instruction in said:
            if isinstance(instruction, Generate):
                assert world.coordinator.version == world.coordinator.served
        return said

    world.hear = hear
    world.finish()
    assert seen == sorted(seen) and seen[-1] == (5, 5)
    assert not any(isinstance(e, messages.Trained) for e in world.owed)


def test_ids_are_no_prefixes() -> None:
    """Rule 33: no request id begins another one, since SGLang aborts by prefix."""
    ids = [request_id(draw, attempt) for draw in (0, 1, 10, 100, 99_999_999) for attempt in (0, 1, 10, 99)]
    assert len({len(i) for i in ids}) == 1 and len(set(ids)) == len(ids)
    assert response_id(12, 3, 4) == "00000012.03/4"


COORDINATOR = pathlib.Path(fluxjax.coordinator.__file__).parent
_FILES = sorted(set(COORDINATOR.rglob("*.py")) - {COORDINATOR / "factory.py"})  # it reads a measured profile from disk


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.name)
def test_purity(file: pathlib.Path) -> None:
    """Rule 34: the coordinator imports nothing that can touch a clock, a thread, the network, randomness or JAX."""
    allowed = {"__future__", "abc", "collections", "collections.abc", "dataclasses", "enum", "itertools", "math"}
    allowed |= {"numpy", "re", "scipy.special", "sharding.door", "statistics", "typing", "zlib"}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module in allowed
        elif isinstance(node, ast.ImportFrom) and node.level == len(file.relative_to(COORDINATOR).parts) + 1:
            assert node.module is not None and node.module.partition(".")[0] in {"base", "config"}
            assert node.module.startswith("config") or node.module in {"base.types", "base.errors"}
