"""Every message has one handler wherever messages are handled, and the coordinator remembers the last of them."""

import dataclasses

import pytest
from coordinator_cases import World, response, world_at
from promises.books import Books

from fluxjax.base.types import Group
from fluxjax.coordinator import Coordinator, CoordinatorError, EngineLost, messages
from fluxjax.coordinator.messages import Event, Generate, Handlers, Instruction, MessageLog, Tick, Train, Trained
from fluxjax.runtime.runtime import Runtime
from fluxjax.simulation.virtual_cluster import Cluster

HANDLERS = {
    "Coordinator hears": (Coordinator._hear, Event),
    "Coordinator says": (Coordinator._say, Instruction),
    "Runtime": (Runtime._carry_out, Instruction),
    "Cluster": (Cluster._carry_out, Instruction),
    "Books hear": (Books._hear, Event),
    "Books say": (Books._say, Instruction),
}


class TestDispatch:
    @pytest.mark.parametrize("name", HANDLERS)
    def test_every_message_has_a_handler(self, name: str) -> None:
        handlers, family = HANDLERS[name]
        assert handlers.keys() == set(family.__subclasses__())
        assert len(family.__subclasses__()) == 14
        assert all(callable(method) for method in handlers.values())

    def test_answers_are_events_and_what_they_answer_instructions(self) -> None:
        events, instructions = set(Event.__subclasses__()), set(Instruction.__subclasses__())
        assert set(messages.ANSWERS) < events and set(messages.ANSWERS.values()) < instructions
        assert all(dataclasses.is_dataclass(kind) for kind in events | instructions)

    def test_a_class_without_a_handler_can_not_be_made(self) -> None:
        with pytest.raises((TypeError, RuntimeError)) as error:  # Python 3.11 wraps it

            class Half:
                hear = Handlers(Event)

                @hear.of(*(kind for kind in Event.__subclasses__() if kind not in (Tick, Trained)))
                def _anything(self, event: Event) -> None: ...

        assert "Half.hear has no handler of Trained, Tick" in str(error.value.__cause__ or error.value)

    def test_a_message_is_handled_once(self) -> None:
        handlers = Handlers(Event)
        handlers.of(Tick)(lambda self, event: None)
        with pytest.raises(TypeError, match="handles Tick, as another method does"):
            handlers.of(messages.Started, Tick)(lambda self, event: None)


class TestLog:
    def test_story_of_a_prompt(self) -> None:
        """All that was heard and said of one prompt, and nothing else, in order."""
        world = world_at(Generate, steps=2, prompts_per_step=2, group_size=2)
        world.fail(1)
        world.finish()
        assert world.coordinator.story(1) == [
            "step 1 hears PromptsDrawn 1 0 of them skipped",
            "step 1 says Generate 00000001.00 on engines [0]",
            "step 1 hears EngineFailed 00000001.00 gone",
            "step 1 says Abort 00000001.00",
            "step 1 says Generate 00000001.01 on engines [0]",
            "step 1 hears ResponseFinished 00000001.01/0 3 tokens, stop",
            "step 1 says Score 00000001.01/0",
            "step 1 hears ResponseFinished 00000001.01/1 3 tokens, stop",
            "step 1 says Score 00000001.01/1",
            "step 1 hears RewardReady 00000001.01/0 1",
            "step 1 hears RewardReady 00000001.01/1 1.01",
            "step 1 says Train 1 step 1",
        ]
        assert world.coordinator.story(99) == []

    def test_times_are_shown_where_they_are_known(self) -> None:
        world = World()
        world.hear(Tick(2.25))
        world.start()
        assert world.coordinator.log.last(9)[0] == "step 1, 2.2 s hears Started {'version': 0}"

    def test_an_error_shows_the_last_lines(self) -> None:
        world = world_at(Train)
        with pytest.raises(CoordinatorError) as error:
            world.hear(Trained(0))
        first, head, *lines = str(error.value).splitlines()
        assert first == "trained version 0 after version 0" and head == "the last that was heard and said:"
        assert len(lines) == 12 and lines[-1] == "  step 1 hears Trained version 0"
        assert lines[-2] == "  step 1 says Train 0, 1 step 1"

    def test_what_a_user_can_mend_is_one_line(self) -> None:
        world = world_at(Generate, max_attempts=1, prompts_per_step=3)
        with pytest.raises(EngineLost) as error:
            for draw in range(3):
                world.fail(draw)
        assert "prompts in a row failed" in str(error.value) and "\n" not in str(error.value)
        assert error.value.before

    def test_it_is_bounded_and_keeps_no_tokens(self, monkeypatch) -> None:
        """A long run's log stays as small as it was, and what was trained on is not kept alive by it."""
        monkeypatch.setattr(messages, "KEPT", 50)
        log = MessageLog()
        long = dataclasses.replace(response(0, 0), token_ids=(7,) * 9, logprobs=(-1.0,) * 9, versions=(0,) * 9)
        for message in (messages.ResponseFinished(long), messages.Score(long)) * 100:
            log.add(1, 0.0, message)
        assert len(log._kept) == len(log.last(1000)) == 50
        assert all(long not in kept and long.token_ids not in kept for kept in log._kept)

    def test_many_prompts_are_one_short_line(self) -> None:
        world = world_at(Train, prompts_per_step=50, group_size=1)
        line = world.coordinator.log.last(1)[0]
        assert line == "step 1 says Train 0, 1, 2, 3, ... (50) step 1"
        assert world.coordinator.story(40)[-1] == "step 1 says Train 40 step 1"

    def test_every_message_can_be_told(self) -> None:
        """Those of whole runs are; here are the others, with what they carry left out of the log."""
        world = World()
        group: Group = world.until(Train).groups[0]  # pyright: ignore[reportAttributeAccessIssue]
        reward = messages.RewardReady(group.samples[0].response.rid, group.samples[0].reward)
        drawn, early = messages.PromptsDrawn((), ((group.prompt, "bad"),)), messages.Accumulate(3, (group,), (1, 2))
        log = MessageLog()
        for message in (drawn, early, reward):
            log.add(3, 0.0, message)
        assert log.last(3) == [
            "step 3 hears PromptsDrawn 0 1 of them skipped",
            "step 3 says Accumulate 0 for step 3, on engines (1, 2)",
            "step 3 hears RewardReady 00000000.00/0 0",
        ]
