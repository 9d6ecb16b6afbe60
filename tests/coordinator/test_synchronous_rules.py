"""The rules of synchronous training, each one by a scripted sequence of events. They are the semantics of a run:
do not change what they say without an explicit decision."""

import json
from typing import Any

import pytest
from coordinator_cases import World, changed, generate, names, prompt, response, reward, world_at

from fluxjax.base.types import Group
from fluxjax.coordinator import Coordinator, CoordinatorError, EngineLost, Ledger, PromptStage, Settings, Synchronous
from fluxjax.coordinator.messages import (
    Abort,
    Accumulate,
    CheckpointSaved,
    DrawPrompts,
    EngineFailed,
    Evaluate,
    Finish,
    Generate,
    Lend,
    PromptsDrawn,
    PublishWeights,
    Request,
    ResponseFinished,
    RewardReady,
    SaveCheckpoint,
    Score,
    Skip,
    Started,
    StopRequested,
    Tick,
    Train,
    Trained,
    WeightsPublished,
)


class TestOneStep:
    def test_evaluation_comes_first(self) -> None:
        """Rule 1: a run begins with a full evaluation of the untouched weights; before the start nothing is said."""
        world = World()
        assert world.hear(Tick(1.0)) == []
        assert world.start() == [Evaluate(0, full=True)]
        assert world.deliver() == [DrawPrompts(2)]

    def test_all_prompts_are_generated_together(self) -> None:
        """Rule 2: one `Generate` has all P prompts of the step, in draw order, G responses each."""
        world = World(prompts_per_step=3, group_size=4)
        assert world.until(Generate) == generate(prompt(0), prompt(1), prompt(2), n=4)

    def test_responses_are_scored_as_they_end(self) -> None:
        """Rule 3: a response is scored when it ends, while the others still run; ticks change nothing."""
        world = world_at(Generate)
        assert world.deliver(last=True) == [Score(response(1, 1))]
        assert world.hear(Tick(5.0)) == []
        assert world.deliver(ResponseFinished) == [Score(response(0, 0))]

    def test_training_waits_for_every_reward(self) -> None:
        """Rule 4: training begins with the last reward; groups stand in draw order, samples in theirs, whatever
        order everything arrived in."""
        world = world_at(Generate)
        for _ in range(4):
            world.deliver(ResponseFinished, last=True)
        for _ in range(3):
            assert world.deliver(RewardReady, last=True) == []
        [train] = world.deliver(RewardReady)
        assert isinstance(train, Train) and train.step == 1
        assert [g.prompt.draw for g in train.groups] == [0, 1]
        for group in train.groups:
            expected = [response(group.prompt.draw, i) for i in (0, 1)]
            assert [s.response for s in group.samples] == expected
            assert [s.reward for s in group.samples] == [reward(r.rid) for r in expected]

    def test_weights_are_published_before_anything_else(self) -> None:
        """Rule 5: after training, the new weights go out; nothing is drawn until the engines serve them."""
        world = world_at(Train)
        assert world.deliver(Trained) == [PublishWeights(1)]
        assert world.deliver(WeightsPublished) == [DrawPrompts(2)]
        assert world.coordinator.step == 1


class TestBoundary:
    def test_cadence(self) -> None:
        """Rule 6: evaluations every n steps and in full at both ends; checkpoints every n steps and at the end, after
        the evaluation of the same step."""
        world = World(steps=7, evaluate_every=3, checkpoint_every=2).finish()
        assert world.all(Evaluate) == [
            Evaluate(0, full=True),
            Evaluate(3, full=False),
            Evaluate(6, full=False),
            Evaluate(7, full=True),
        ]
        assert [c.step for c in world.all(SaveCheckpoint)] == [2, 4, 6, 7]
        assert names(world.said[-3:]) == ["Evaluate", "SaveCheckpoint", "Finish"]
        assert world.all(Finish) == [Finish(7, "all 7 steps are done")]

    def test_cadence_of_zero(self) -> None:
        """Rule 6: with 0 as cadence there are evaluations at both ends, and the last checkpoint."""
        world = World(steps=3).finish()
        assert [e.step for e in world.all(Evaluate)] == [0, 3]
        assert [c.step for c in world.all(SaveCheckpoint)] == [3]

    def test_no_steps(self) -> None:
        """Rule 6: a run of no steps evaluates once, saves and ends."""
        assert names(World(steps=0).finish().said) == ["Evaluate", "SaveCheckpoint", "Finish"]

    def test_state_is_of_the_boundary(self) -> None:
        """Rule 7: at a checkpoint nothing is in flight, the next step's prompts are not drawn, and the state is plain
        JSON; while a step is trained there is no state to take."""
        world = world_at(SaveCheckpoint, steps=4, checkpoint_every=2)
        state, next_draw = world.states[0]
        assert json.loads(json.dumps(state)) == state
        assert (state["step"], state["version"], next_draw) == (2, 2, 4)
        assert state["ledger"]["drawn"] == state["ledger"]["trained"] == 4
        assert state["ledger"]["epochs"] == {"0": 4}
        world.until(Train)
        with pytest.raises(CoordinatorError, match="between steps"):
            world.coordinator.state_dict()

    @pytest.mark.parametrize("served", [2, 7])
    def test_resume(self, served: int) -> None:
        """Rule 8: a resumed run says what the uninterrupted one said; it repeats neither the evaluation nor the
        checkpoint of its step, and publishes its weights first if the engines serve other ones."""
        whole = world_at(SaveCheckpoint, steps=5, evaluate_every=2, checkpoint_every=2)
        before = len(whole.said)
        whole.finish()
        state, next_draw = whole.states[0]
        resumed = World(steps=5, evaluate_every=2, checkpoint_every=2, state=state, next_draw=next_draw, served=served)
        resumed.version = 2
        resumed.finish()
        publish = [] if served == 2 else [PublishWeights(2)]
        assert resumed.said == publish + whole.said[before:]

    def test_resume_of_a_finished_run(self) -> None:
        """Rule 8: a finished run that is resumed ends at once; with more steps it goes on."""
        whole = World(steps=2).finish()
        state, next_draw = whole.states[0]
        assert names(World(steps=2, state=state, next_draw=next_draw, served=2).finish().said) == ["Finish"]
        longer = World(steps=3, state=state, next_draw=next_draw, served=2).finish()
        assert names(longer.said[:2]) == ["DrawPrompts", "Generate"] and longer.trained == [4, 5]


class TestData:
    def test_replacements(self) -> None:
        """Rule 9: prompts that cannot be prepared are listed with the reason and replaced, so that the step has P."""
        world = World(steps=1, prompts_per_step=4, bad={1, 2, 4}).finish()
        assert [d.count for d in world.all(DrawPrompts)] == [4, 2, 1]
        assert world.trained == [0, 3, 5, 6]
        assert [(s.draw, s.id, s.source, s.reason) for s in world.coordinator.ledger.skipped] == [
            (d, f"p{d}", "scripted", "bad file") for d in (1, 2, 4)
        ]

    def test_source_that_replaces_by_itself(self) -> None:
        """Rule 9: a source may also replace what it skips before it answers."""
        world = world_at(DrawPrompts, prompts_per_step=2)
        said = world.hear(PromptsDrawn((prompt(0), prompt(2)), ((prompt(1), "bad"),)))
        assert said == [generate(prompt(0), prompt(2), n=2)]

    @pytest.mark.parametrize(("prompts", "trained"), [(5, [[0, 1], [2, 3], [4]]), (4, [[0, 1], [2, 3]])])
    def test_exhaustion(self, prompts: int, trained: list[list[int]]) -> None:
        """Rule 10: when the data ends, what is there is trained on, and the run ends as usual."""
        world = World(steps=10, prompts=prompts, evaluate_every=1, checkpoint_every=1).finish()
        assert [[g.prompt.draw for g in t.groups] for t in world.all(Train)] == trained
        assert world.all(Finish) == [Finish(len(trained), "the data is exhausted")]
        assert world.all(Evaluate)[-1] == Evaluate(len(trained), full=True)
        assert world.all(SaveCheckpoint)[-1].step == len(trained)

    def test_unusable_data(self) -> None:
        """Rule 11: data of which nothing can be prepared ends the run with the reason, not in an endless search."""
        world = World(bad=range(1000), max_skipped_in_a_row=10)
        with pytest.raises(CoordinatorError, match=r"10 prompts in a row could not be prepared.*bad file"):
            world.finish()
        world = World(bad=set(range(0, 60, 2)), steps=20, max_skipped_in_a_row=10).finish()
        assert len(world.coordinator.ledger.skipped) > 10  # but never ten in a row


class TestFailures:
    def test_lost_request(self) -> None:
        """Rule 12: a lost request is aborted and its whole group generated again; the others go on undisturbed."""
        world = world_at(Generate, steps=1, group_size=3)
        world.deliver(ResponseFinished)
        assert world.fail(0) == [Abort("00000000.00"), generate(prompt(0), n=3, attempt=1)]
        world.finish()
        groups = world.all(Train)[0].groups
        assert [[s.response.token_ids[1] for s in g.samples] for g in groups] == [[1, 1, 1], [0, 0, 0]]

    def test_late_replies(self) -> None:
        """Rule 13: replies and rewards of an attempt that was given up, or of a prompt that is done, change nothing."""
        world = world_at(Generate, steps=2)
        world.deliver(ResponseFinished)
        world.fail(0, keep_late=True)
        assert world.deliver(ResponseFinished) == []  # sample 1 of attempt 0
        assert world.deliver(RewardReady) == []  # of sample 0, which was scored before the failure
        assert world.fail(0, attempt=0) == []  # told twice
        world.until(Train)
        world.until(Generate)
        assert world.hear(ResponseFinished(response(1, 0))) == []
        assert world.hear(RewardReady("00000001.00/0", reward("00000001.00/0"))) == []
        assert world.hear(EngineFailed(("00000001.00",), "gone")) == []
        counts = {"late response": 2, "late reward": 2, "late failure": 2}
        assert world.coordinator.ledger.ignored == counts
        assert world.finish().trained == [0, 1, 2, 3]

    def test_repeated_replies(self) -> None:
        """Rule 14: of repeated replies and rewards the first one counts; the others change nothing."""
        world = world_at(Generate, steps=1)
        first = response(0, 0)
        world.hear(ResponseFinished(first))
        assert world.hear(ResponseFinished(changed(first, token_ids=(7, 7, 7)))) == []
        world.hear(RewardReady(first.rid, reward(first.rid)))
        assert world.hear(RewardReady(first.rid, reward("00000099.00/0"))) == []
        world.owed = [e for e in world.owed if e != ResponseFinished(first) and getattr(e, "rid", "") != first.rid]
        world.finish()
        sample = world.all(Train)[0].groups[0].samples[0]
        assert (sample.response, sample.reward) == (first, reward(first.rid))

    def test_aborted_response(self) -> None:
        """Rule 15: a response that someone aborted is never trained on: its group is generated again."""
        world = world_at(Generate, steps=1)
        said = world.hear(ResponseFinished(response(1, 0, finish="abort")))
        assert said == [Abort("00000001.00"), generate(prompt(1), n=2, attempt=1)]
        world.finish()
        assert {s.response.finish for g in world.all(Train)[0].groups for s in g.samples} == {"stop"}

    def test_given_up(self) -> None:
        """Rule 16: a prompt that fails `max_attempts` times is skipped with the reason, and replaced in its step."""
        world = world_at(Generate, steps=1, max_attempts=2)
        world.fail(1, 0)
        reason = "failed 2 times, last: gone"
        assert world.fail(1, 1) == [Abort("00000001.01"), Skip(prompt(1), reason), DrawPrompts(1)]
        assert world.finish().trained == [0, 2]
        assert [(s.draw, s.reason) for s in world.coordinator.ledger.skipped] == [(1, reason)]

    def test_engine_lost(self) -> None:
        """Rule 17: when prompt after prompt is given up and not one response comes, the run ends with the reason; a
        response in between shows that the engine lives."""
        dead = world_at(Generate, prompts_per_step=4, max_attempts=1)
        dead.fail(0), dead.fail(1)
        with pytest.raises(EngineLost, match="gone"):
            dead.fail(2)
        alive = world_at(Generate, prompts_per_step=4, max_attempts=1)
        alive.fail(0), alive.fail(1)
        alive.deliver(ResponseFinished)
        alive.fail(2)
        assert alive.finish().coordinator.finished

    def test_nothing_lost(self) -> None:
        """Rule 18: a failure after the last response of a request loses nothing, its rewards may still be due."""
        world = world_at(Generate)
        world.deliver(ResponseFinished), world.deliver(ResponseFinished)
        assert world.fail(0) == []
        assert world.finish().coordinator.ledger.accepted == 8


class TestRefusals:
    @pytest.mark.parametrize(
        ("rid", "message"),
        [
            ("00000009.00/0", "never drawn"),
            ("00000000.01/0", "no such request"),
            ("00000000.00/2", "no such request"),
            ("0.0/0", "no response id"),
            ("00000000.00", "no response id"),
            ("held-out-000001/0", "no response id"),
        ],
    )
    def test_unknown_ids(self, rid: str, message: str) -> None:
        """Rule 19: ids that were never given out are refused, naming them."""
        world = world_at(Generate)
        for event in (ResponseFinished(changed(response(0, 0), rid=rid)), RewardReady(rid, reward("00000000.00/0"))):
            with pytest.raises(CoordinatorError, match=message) as error:
                world.hear(event)
            assert rid in str(error.value)

    def test_contradictions(self) -> None:
        """Rule 19: so are a response that belongs elsewhere, and a reward that nobody asked for."""
        world = world_at(Generate)
        with pytest.raises(CoordinatorError, match="sample 1 of draw 0"):
            world.hear(ResponseFinished(changed(response(0, 0), sample=1)))
        with pytest.raises(CoordinatorError, match="no reward of it was asked for"):
            world.hear(RewardReady("00000000.00/0", reward("00000000.00/0")))

    @pytest.mark.parametrize("event", [PromptsDrawn(()), Trained(1), WeightsPublished(0), CheckpointSaved(0)])
    def test_answers_to_no_question(self, event: object) -> None:
        """Rule 20: an answer to an instruction that is not under way is refused."""
        world = World()
        world.start()
        with pytest.raises(CoordinatorError, match="that it could answer is under way"):
            world.hear(event)  # pyright: ignore[reportArgumentType]

    def test_wrong_answers(self) -> None:
        """Rule 20: versions only grow, answers name what was asked for, draws are new, and starts happen once."""
        world = world_at(Train)
        with pytest.raises(CoordinatorError, match="must be above 0"):
            world.hear(Trained(0))
        world.until(PublishWeights)
        with pytest.raises(CoordinatorError, match="version 5 was reported"):
            world.hear(WeightsPublished(5))
        with pytest.raises(CoordinatorError, match="a second time"):
            world.hear(Started(0))
        again = world_at(DrawPrompts)
        with pytest.raises(CoordinatorError, match="3 prompts were drawn, but only 2"):
            again.hear(PromptsDrawn((prompt(0), prompt(1), prompt(2))))
        twice = world_at(DrawPrompts, bad={0})
        twice.deliver(PromptsDrawn)
        with pytest.raises(CoordinatorError, match="must all differ"):
            twice.hear(PromptsDrawn((prompt(1),)))

    @pytest.mark.parametrize(("version", "message"), [(2, "newest one published"), (0, "needs version 1 or newer")])
    def test_foreign_versions(self, version: int, message: str) -> None:
        """Rule 21: on-policy means that every token trained on is of the version served; others are refused."""
        world = world_at(Train)
        world.until(Generate)
        world.owed = [ResponseFinished(response(d, i, version=version)) for d in (2, 3) for i in (0, 1)]
        with pytest.raises(CoordinatorError, match=message):
            world.finish()


class TestStop:
    def test_in_a_step(self) -> None:
        """Rule 22: a stop lets the step end, saves, and finishes as incomplete, without an evaluation."""
        world = world_at(Generate, steps=9, evaluate_every=1)
        assert world.hear(StopRequested("SIGTERM")) == []
        world.finish()
        assert names(world.said[-4:]) == ["Train", "PublishWeights", "SaveCheckpoint", "Finish"]
        assert world.all(Finish) == [Finish(1, "SIGTERM", complete=False)]
        resumed = World(steps=2, evaluate_every=1, state=world.states[0][0], next_draw=2, served=1)
        assert resumed.start() == [Evaluate(1, full=False)]  # it makes up for what the stop left out

    def test_between_steps(self) -> None:
        """Rule 22: a stop before the start begins nothing; one at the boundary ends there."""
        early = World()
        early.hear(StopRequested("no"))
        assert names(early.start()) == ["SaveCheckpoint"]
        assert early.deliver() == [Finish(0, "no", complete=False)]
        boundary = World()
        boundary.start()
        assert boundary.hear(StopRequested("no")) == []
        assert names(boundary.deliver()) == ["SaveCheckpoint"]

    def test_in_the_last_step(self) -> None:
        """Rule 22: a stop in the last step leaves the last evaluation to the run that resumes."""
        world = world_at(Train, steps=1)
        world.hear(StopRequested("no"))
        assert world.finish().all(Finish) == [Finish(1, "no", complete=False)]
        resumed = World(steps=1, state=world.states[0][0], next_draw=2, served=1).finish()
        assert resumed.said == [Evaluate(1, full=True), Finish(1, "all 1 steps are done")]

    def test_after_the_end(self) -> None:
        """Rule 23: after `Finish` nothing matters any more."""
        world = World(steps=1).finish()
        for event in (ResponseFinished(response(0, 0)), Trained(9), EngineFailed(("junk",), ""), StopRequested("")):
            assert world.hear(event) == []


class Rogue(Synchronous):
    """A policy that says one thing more, once, at a given moment."""

    def __init__(self, when: type, what) -> None:
        super().__init__()
        self.when, self.what = when, what

    def decide(self, coordinator: Coordinator):
        said = list(super().decide(coordinator))
        hits = [i for i in said if isinstance(i, self.when)]
        return said + self.what(hits[0]) if hits else said


class TestBooks:
    @pytest.mark.parametrize(
        ("when", "what", "message"),
        [
            (Train, lambda t: [t], "is training; it must be scored"),
            (Train, lambda t: [Train(2, ())], "while another Train|step 2"),
            (Train, lambda t: [Finish(1, "")], "2 prompts and 1 instructions under way"),
            (Train, lambda t: [Skip(t.groups[0].prompt, "")], "is training"),
            (Generate, lambda g: [g], "is running; it must be waiting or deferred or lost"),
            (Generate, lambda g: [Train(1, ())], "step 1 has nothing to train on"),
            (Generate, lambda g: [Accumulate(1, ())], "0 groups can't be trained on engines"),
            (Generate, lambda g: [Lend((0,))], r"draws \[0, 1\] run on them, and 0 engines would be left"),
            (DrawPrompts, lambda d: [d], "while another DrawPrompts"),
            (Score, lambda s: [s], "given out for scoring before"),
        ],
    )
    def test_policy_against_the_books(self, when: type, what, message: str) -> None:
        """Rule 24: a policy cannot train, generate, score or drop anything twice or too early."""
        world = World()
        world.coordinator.policy = Rogue(when, what)
        with pytest.raises(CoordinatorError, match=message):
            world.finish()

    def test_forged_group(self) -> None:
        """Rule 24: nor can it train on anything but what was generated and scored."""

        class Forger(Synchronous):
            def decide(self, coordinator: Coordinator):
                said = list(super().decide(coordinator))
                if said and isinstance(said[0], Train):
                    return [Train(1, tuple(Group(g.prompt, g.samples[::-1]) for g in said[0].groups))]
                return said

        world = World()
        world.coordinator.policy = Forger()
        with pytest.raises(CoordinatorError, match="differs from the group that was scored"):
            world.finish()

    def test_lost_stage(self) -> None:
        """Rule 24: while a policy lets a lost prompt lie, its late replies change nothing and nobody waits for it."""
        ledger = Ledger()
        ledger.draw([prompt(0)], [])
        ledger.generate(Request(prompt(0), n=3), served=0)
        for sample in (0, 1):
            ledger.finish(response(0, sample), newest_version=0)
        ledger.score(response(0, 0))
        ledger.fail(["00000000.00"], "gone")
        ledger.finish(response(0, 2), newest_version=0)
        ledger.reward("00000000.00/0", reward("00000000.00/0"))
        [entry] = ledger.at(PromptStage.LOST)
        assert not (entry.responses or entry.rewards or ledger.unscored or ledger.awaits_something)
        ledger.skip(prompt(0), "gone")
        assert ledger.live == 0 and ledger.drawn == len(ledger.skipped) == 1

    def test_waiting_for_nothing(self) -> None:
        """Rule 25: a policy that waits while nothing is under way is found out at once: no deadlock goes unnoticed."""

        class Idle(Synchronous):
            def decide(self, coordinator: Coordinator):
                return []

        coordinator = Coordinator(Settings(1, 1, 1), Idle())
        with pytest.raises(CoordinatorError, match=r"Idle waits although nothing is under way\n.*\n  step 1 h"):
            coordinator.handle(Started(0))

    def test_settings(self) -> None:
        """Rule 26: settings with which no run is possible are refused."""
        for wrong in ({"prompts_per_step": 0}, {"group_size": 0}, {"steps": -1}, {"max_attempts": 0}):
            with pytest.raises(ValueError, match="steps at least 0"):
                Settings(**{**dict[str, Any](steps=1, prompts_per_step=1, group_size=1), **wrong})
