"""A scripted world around a coordinator: it keeps what is owed for each instruction, a test decides what comes when."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Self

from fluxjax.base.types import Prompt, Response, Reward
from fluxjax.coordinator import Coordinator, Settings, Synchronous, messages
from fluxjax.coordinator.messages import Event, Instruction, Request, ResponseFinished, request_id, response_id


def prompt(draw: int) -> Prompt:
    return Prompt(id=f"p{draw}", source="scripted", text="?", answer="!", draw=draw, epoch=draw // 10)


def response(draw: int, sample: int, *, attempt: int = 0, version: int = 0, finish: str = "stop") -> Response:
    """Its tokens tell where it comes from, and versions of a response are all the same."""
    tokens = (draw, attempt, sample)
    return Response(response_id(draw, attempt, sample), draw, sample, tokens, (-1.0,) * 3, (version,) * 3, finish)


def reward(rid: str) -> Reward:
    """Different for every draw and sample, the same for every attempt."""
    draw, sample = int(rid[:8]), int(rid.rpartition("/")[2])
    return Reward(draw + sample / 100, correct=sample == 0)


class World:
    """`owed` holds one event for everything that was asked for and has not happened yet; `said` all instructions.

    `prompts` is how many the data has, `bad` the draws that cannot be prepared.
    """

    def __init__(
        self,
        *,
        steps: int = 2,
        prompts_per_step: int = 2,
        group_size: int = 2,
        prompts: int = 1000,
        bad: Iterable[int] = (),
        state: dict | None = None,
        next_draw: int = 0,
        served: int = 0,
        **settings: Any,
    ) -> None:
        self.coordinator = Coordinator(Settings(steps, prompts_per_step, group_size, **settings), Synchronous())
        if state is not None:
            self.coordinator.load_state_dict(state)
        self.prompts, self.bad = prompts, frozenset(bad)
        self.next_draw = next_draw
        self.version = max(self.coordinator.version, served)  # the trainer's
        self.served = served
        self.said: list[Instruction] = []
        self.owed: list[Event] = []
        self.states: list[tuple[dict, int]] = []  # the coordinator's at each checkpoint, and the next draw then

    # --- events ---------------------------------------------------------------------------------

    def start(self) -> list[Instruction]:
        return self.hear(messages.Started(self.served))

    def hear(self, event: Event) -> list[Instruction]:
        """Hands the event over and takes note of what is owed for the answer."""
        said = self.coordinator.handle(event)
        self.said += said
        for instruction in said:
            if isinstance(instruction, messages.SaveCheckpoint):
                self.states.append((self.coordinator.state_dict(), self.next_draw))
            self.owed += self.answers(instruction)
        ledger = self.coordinator.ledger
        assert ledger.drawn == ledger.trained + len(ledger.skipped) + ledger.live
        assert ledger.trained_responses == ledger.trained * self.coordinator.settings.group_size
        return said

    def answers(self, instruction: Instruction) -> list[Event]:
        match instruction:
            case messages.DrawPrompts(count):
                draws = range(self.next_draw, min(self.next_draw + count, self.prompts))
                self.next_draw = draws.stop
                good = tuple(prompt(d) for d in draws if d not in self.bad)
                return [messages.PromptsDrawn(good, tuple((prompt(d), "bad file") for d in draws if d in self.bad))]
            case messages.Generate(requests):
                return [
                    ResponseFinished(response(r.prompt.draw, i, attempt=r.attempt, version=self.served))
                    for r in requests
                    for i in range(r.n)
                ]
            case messages.Score(scored):
                return [messages.RewardReady(scored.rid, reward(scored.rid))]
            case messages.Train():
                self.version += 1
                return [messages.Trained(self.version)]
            case messages.PublishWeights(version):
                self.served = version
                return [messages.WeightsPublished(version)]
            case messages.Evaluate(step):
                return [messages.Evaluated(step)]
            case messages.SaveCheckpoint(step):
                return [messages.CheckpointSaved(step)]
        return []

    def deliver(self, wanted: type | Callable[[Event], bool] = object, last: bool = False) -> list[Instruction]:
        """The first (or last) owed event of a kind happens."""
        hit = (lambda e: isinstance(e, wanted)) if isinstance(wanted, type) else wanted
        event = [e for e in self.owed if hit(e)][-1 if last else 0]
        self.owed.remove(event)
        return self.hear(event)

    def fail(self, draw: int, attempt: int = 0, *, keep_late: bool = False) -> list[Instruction]:
        """The engine loses a request; its replies never come, unless they are kept to come late."""
        lost = request_id(draw, attempt)
        if not keep_late:
            self.owed = [
                e for e in self.owed if not (isinstance(e, ResponseFinished) and e.response.rid.startswith(lost))
            ]
        return self.hear(messages.EngineFailed((lost,), "gone"))

    # --- running --------------------------------------------------------------------------------

    def until(self, kind: type[Instruction]) -> Instruction:
        """Starts if need be and lets everything happen in the order asked, until this is said (anew)."""
        before = len(self.said)
        if self.coordinator.served < 0:
            self.start()
        while not (hits := [i for i in self.said[before:] if isinstance(i, kind)]):
            assert self.owed, f"stuck before {kind.__name__}: {self.said[before:]}"
            self.deliver()
        return hits[0]

    def finish(self) -> Self:
        if not self.coordinator.finished:
            self.until(messages.Finish)
        return self

    def all(self, kind: type) -> list:
        return [i for i in self.said if isinstance(i, kind)]

    @property
    def trained(self) -> list[int]:
        return [group.prompt.draw for train in self.all(messages.Train) for group in train.groups]


def world_at(kind: type[Instruction], **options: Any) -> World:
    """A world in which everything has happened, in the order asked, until this was said."""
    world = World(**options)
    world.until(kind)
    return world


def names(instructions: Iterable[Instruction]) -> list[str]:
    return [type(i).__name__ for i in instructions]


def generate(*prompts: Prompt, n: int, attempt: int = 0) -> messages.Generate:
    """What a policy says that needs all `n` responses, with one engine."""
    return messages.Generate(tuple(Request(prompt, n, attempt, n) for prompt in prompts))


def changed(value: Response, **fields: object) -> Response:
    return dataclasses.replace(value, **fields)  # pyright: ignore[reportArgumentType]
