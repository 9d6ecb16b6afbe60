"""Every message has one handler wherever messages are handled, and an error shows the last of them."""

import dataclasses

import pytest
from coordinator_cases import generate, prompt, response, world_at
from promises.books import Books

from fluxjax.base.types import Group, Reward
from fluxjax.coordinator import Coordinator, CoordinatorError, EngineLost, messages
from fluxjax.coordinator.messages import (
    Event,
    Generate,
    Handlers,
    Instruction,
    Message,
    Tick,
    Train,
    Trained,
    message_line,
)
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
GROUPS = tuple(Group(prompt(draw), ()) for draw in range(50))


class TestDispatch:
    @pytest.mark.parametrize("name", HANDLERS)
    def test_every_message_has_a_handler(self, name: str) -> None:
        handlers, family = HANDLERS[name]
        assert handlers.keys() == set(family.__subclasses__())
        assert len(family.__subclasses__()) == 16
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
        with pytest.raises(TypeError, match="handles Tick, but another method"):
            handlers.of(messages.Started, Tick)(lambda self, event: None)


class TestLines:
    @pytest.mark.parametrize(
        ("message", "line"),
        [
            (
                messages.PromptsDrawn((prompt(1),), ((prompt(2), "bad"),)),
                "hears PromptsDrawn prompts=(1) skipped=((2, bad))",
            ),
            (
                messages.EngineFailed(("00000001.00",), "gone"),
                "hears EngineFailed request_ids=(00000001.00) reason=gone",
            ),
            (
                messages.ResponseFinished(response(1, 0)),
                "hears ResponseFinished response=00000001.00/0 (3 tokens, stop)",
            ),
            (
                messages.RewardReady("00000001.00/1", Reward(1.01, correct=False)),
                "hears RewardReady rid=00000001.00/1 reward=1.01",
            ),
            (Trained(4), "hears Trained version=4 metrics=0 values"),
            (generate(prompt(1), n=2), "says Generate requests=(00000001.00 on engine 0)"),
            (messages.Park(prompt(1), 0), "says Park prompt=1 attempt=0 keep=False"),
            (messages.Accumulate(3, GROUPS[:1], (1, 2)), "says Accumulate step=3 groups=(0) engines=(1, 2)"),
            (Train(1, GROUPS), "says Train step=1 groups=(0, 1, 2, 3, ... (50))"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_every_message_can_be_told(self, message: Message, line: str) -> None:
        assert message_line(1, 0.0, message) == f"step 1 {line}"

    def test_times_are_shown_where_they_are_known(self) -> None:
        assert message_line(1, 2.25, messages.Started(0)) == "step 1, 2.2 s hears Started version=0"

    def test_an_error_shows_the_last_lines(self) -> None:
        world = world_at(Train)
        with pytest.raises(CoordinatorError) as error:
            world.hear(Tick(2.25))
            world.hear(Trained(0))
        first, head, *lines = str(error.value).splitlines()
        assert (
            first == "version 0 was trained, but a new version must be above 0"
            and head == "the last that was heard and said:"
        )
        assert len(lines) == 12 and lines[-1] == "  step 1, 2.2 s hears Trained version=0 metrics=0 values"
        assert lines[-2] == "  step 1 says Train step=1 groups=(0, 1)"

    def test_what_a_user_can_mend_is_one_line(self) -> None:
        world = world_at(Generate, max_attempts=1, prompts_per_step=3)
        with pytest.raises(EngineLost) as error:
            for draw in range(3):
                world.fail(draw)
        assert "prompts in a row failed" in str(error.value) and "\n" not in str(error.value)
        assert error.value.before
