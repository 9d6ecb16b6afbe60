"""The messages that the coordinator hears (events) and says (instructions), as frozen data, and their `Handlers`.

To add a message, write its class here and, for an instruction that an event answers, a line in `ANSWERS`.
`Coordinator`, `Runtime`, `Cluster` and the tests' `Books` then refuse to be imported until each handles the message.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..base.types import Group, Prompt, Response, Reward

ABORTED = "abort"  # the value of `rollout.engine.FinishReason.ABORT`
STOPPED = "stop"  # the value of `rollout.engine.FinishReason.STOP`
LENGTH = "length"  # the value of `rollout.engine.FinishReason.LENGTH`


def request_id(draw: int, attempt: int) -> str:
    """Returns the id of one attempt to generate a prompt's responses. All ids have the same length, since SGLang aborts
    all requests whose ids begin with the given id."""
    return f"{draw:08d}.{attempt:02d}"


def response_id(draw: int, attempt: int, sample: int) -> str:
    """Returns the id of one response of a request, as in `GenerateRequest`."""
    return f"{request_id(draw, attempt)}/{sample}"


@typing.dataclass_transform(frozen_default=True)
class Message:
    """The base of events and instructions. Every message is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)


class Event(Message):
    """Something that happened."""


class Instruction(Message):
    """Something to do."""


# --- events: things that happened ---------------------------------------------------------------


class Started(Event):
    """The runtime is up; all engines serve weight `version`."""

    version: int


class PromptsDrawn(Event):
    """The answer to `DrawPrompts`: usable prompts in draw order. `skipped` are prompts that could not be prepared, as
    (prompt, reason). Usable and skipped prompts are fewer than `DrawPrompts.count` only if the data is exhausted."""

    prompts: tuple[Prompt, ...]
    skipped: tuple[tuple[Prompt, str], ...] = ()


class ResponseFinished(Event):
    """One sample of a prompt ended (stop, length, or abort), or one of its turns (stop) if the prompt has an
    environment. The response includes tokens that the request began with."""

    response: Response


class TurnObserved(Event):
    """The environment has answered the turn of an `Act`: the response has the observation behind that turn. With
    `done`, the episode has ended, and the response is the entire sample."""

    response: Response
    done: bool


class EnvironmentFailed(Event):
    """The environment of a response hangs, died, or answers what can't be used. Its prompt must be generated again."""

    rid: str
    reason: str


class RewardReady(Event):
    rid: str
    reward: Reward


class Trained(Event):
    """The training step of `Train` is done, and the trainer holds `version`. Policies may steer by `metrics`."""

    version: int
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Accumulated(Event):
    """The gradients of `Accumulate` are computed; the trainer holds them until the `Train` of this step."""

    step: int


class Lent(Event):
    """The engines of `Lend` are idle: training may use their devices."""

    engines: tuple[int, ...]


class ParallelismSet(Event):
    """The fleet now has `engines` engines of `degree` devices, all awake. The engines serve the oldest weights that any
    engine of the earlier fleet served. `kv_tokens`: tokens that each engine's cache holds; 0: unchanged."""

    degree: int
    engines: int
    kv_tokens: int = 0


class WeightsPublished(Event):
    """The engines of `PublishWeights` serve `version` from now on."""

    version: int


class Evaluated(Event):
    step: int
    given_up: bool = False  # a stop ended the evaluation; the resumed run repeats the evaluation


class CheckpointSaved(Event):
    step: int


class EngineFailed(Event):
    """An engine lost these requests with all their tokens; the prompts must be generated again."""

    request_ids: tuple[str, ...]
    reason: str


class StopRequested(Event):
    """A request to end the run, with a checkpoint, at the next step boundary, or within a step for which dynamic
    sampling would have to draw further prompts. `failed`: the run ends with the error `reason`."""

    reason: str
    failed: bool = False


class Tick(Event):
    """Time passed. `now` is in seconds on the runtime's clock (virtual in simulation)."""

    now: float


# --- instructions: things to do -----------------------------------------------------------------


class DrawPrompts(Instruction):
    count: int


@dataclasses.dataclass(frozen=True)
class Request:
    """`n` responses to a prompt on one engine. The first `need` responses that end make up the group (0: all `n`)."""

    prompt: Prompt
    n: int
    attempt: int = 0  # grows by one when a prompt is generated again; part of the request id
    need: int = 0
    engine: int = 0  # the engine's index
    # the begun response of each sample (None: the sample starts anew); empty: all samples start anew
    begun: tuple[Response | None, ...] = ()
    temperature: float | None = None  # temperature of sampling; None: the run's temperature

    @property
    def rid(self) -> str:
        return request_id(self.prompt.draw, self.attempt)

    def to_come(self) -> dict[int, int]:
        """Returns the samples that the engine is to generate, each with the number of its tokens so far."""
        begun = {i: before for i, before in enumerate(self.begun) if before is not None}
        whole = {i for i, before in begun.items() if before.finish != ABORTED}
        return {i: begun[i].num_tokens if i in begun else 0 for i in range(self.n) if i not in whole}


class Generate(Instruction):
    """Submit these requests to their engines, in this order."""

    requests: tuple[Request, ...]


@dataclasses.dataclass(frozen=True)
class Turn:
    """The next turn of a response, which ends with an observation, on the engine that may have its keys and values."""

    prompt: Prompt
    response: Response
    engine: int


class Continue(Instruction):
    """Submit the next turns of these responses to their engines, in this order."""

    turns: tuple[Turn, ...]


class Act(Instruction):
    """Hand the last turn of this response to its environment."""

    response: Response


class Abort(Instruction):
    """End a request (all its responses) or one response, and their environments, if not ended yet."""

    rid: str


class Park(Instruction):
    """End `attempt`, the newest request of a prompt that is not trained on yet. The prompt is deferred until the next
    `Generate` of this prompt. With `keep`, each running response is reported as aborted, and continues later from its
    last token under the weights that are served then. Without `keep`, all tokens of the request are dropped."""

    prompt: Prompt
    attempt: int
    keep: bool = False

    @property
    def request(self) -> str:
        """The id of the request that ends."""
        return request_id(self.prompt.draw, self.attempt)


class Score(Instruction):
    response: Response


class Skip(Instruction):
    """Give this prompt up: it will not be trained on. The run's summary shows `reason`."""

    prompt: Prompt
    reason: str


class Lend(Instruction):
    """Put these engines to sleep as soon as the requests parked on them have ended. Training may use their devices
    until the next `PublishWeights` to these engines wakes them."""

    engines: tuple[int, ...]


class Accumulate(Instruction):
    """Compute the gradients of these groups now, for the `Train` of `step`, without an update: on the devices of these
    lent engines, or on the trainer's own if `engines` is empty."""

    step: int
    groups: tuple[Group, ...]
    engines: tuple[int, ...] = ()


class Train(Instruction):
    """Train on these groups, in this order, and on the groups of the step's earlier `Accumulate`s. Advantages are not
    yet filled in. Steps count from 1: afterwards, `step` steps are done."""

    step: int
    groups: tuple[Group, ...]


class PublishWeights(Instruction):
    """Serve the trainer's weights, `version`, on these engines (empty: on all). Running responses continue under the
    new weights; lent engines wake up."""

    version: int
    engines: tuple[int, ...] = ()


class SetParallelism(Instruction):
    """Rebuild the fleet on the same devices: as many engines of `degree` devices as fit. No prompt is generated or
    trained on meanwhile. After the answer, engine indices refer to the new fleet."""

    degree: int


class Evaluate(Instruction):
    """Evaluate the published weights on held-out prompts. `full`: the evaluation at the start or the end of the run."""

    step: int
    full: bool = False


class SaveCheckpoint(Instruction):
    """Save the present state, before any later instruction is carried out."""

    step: int


class Finish(Instruction):
    """The run is over after `step` steps. `reason` is for people; `complete` is False if the run can be resumed."""

    step: int
    reason: str
    complete: bool = True


ANSWERS: Mapping[type[Event], type[Instruction]] = {
    PromptsDrawn: DrawPrompts,
    Lent: Lend,
    Accumulated: Accumulate,
    Trained: Train,
    WeightsPublished: PublishWeights,
    ParallelismSet: SetParallelism,
    Evaluated: Evaluate,
    CheckpointSaved: SaveCheckpoint,
}
"""The instruction that each event answers. At most one instruction of each of these types is under way."""
ANSWERED = frozenset(ANSWERS.values())

S = TypeVar("S")
M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Handlers(dict[type[Message], Callable[[Any, Any], Any]]):
    """The methods of a class that handle the messages of `family` (`Event` or `Instruction`), by message type.

    class Cluster:
        _carry_out = Handlers(Instruction)

        @_carry_out.of(Train)
        def _train(self, order: Train) -> None: ...

    self._carry_out[type(instruction)](self, instruction)

    Raises `TypeError` for a type with two handlers, and, as the class is created, for a type without a handler.
    """

    def __init__(self, family: type[Message]) -> None:
        self._family = family

    def of(self, *kinds: type[M]) -> Callable[[Callable[[S, M], R]], Callable[[S, M], R]]:
        """Makes the decorated method the handler of these types."""

        def register(method: Callable[[S, M], R]) -> Callable[[S, M], R]:
            if twice := [kind.__name__ for kind in kinds if kind in self]:
                raise TypeError(f"{method.__qualname__} handles {', '.join(twice)}, but another method does already")
            self.update(dict.fromkeys(kinds, method))
            return method

        return register

    def __set_name__(self, owner: type, name: str) -> None:
        """Python calls this when the class is complete, with all its methods."""
        if missing := [kind.__name__ for kind in self._family.__subclasses__() if kind not in self]:
            raise TypeError(f"{owner.__name__}.{name} has no handler of {', '.join(missing)}")


_SHOWN = 4  # values of a tuple that a line shows


def message_line(step: int, now: float, message: Message) -> str:
    """Returns a line for people about a message: the step under way, the time in seconds (0: unknown), and the values
    of the message, without tokens and texts of prompts and responses."""
    says = "says" if isinstance(message, Instruction) else "hears"
    begin = f"step {step}" + (f", {now:.1f} s" if now else "")
    values = [f"{name}={_told(value)}" for name, value in vars(message).items() if value != ()]
    return " ".join([begin, says, type(message).__name__, *values])


def _told(value: Any) -> str:
    match value:
        case Prompt():
            return str(value.draw)
        case Group():
            return str(value.prompt.draw)
        case Request():
            return f"{value.rid} on engine {value.engine}"
        case Turn():
            return f"{value.response.rid} on engine {value.engine}"
        case Response():
            return f"{value.rid} ({value.num_tokens} tokens, {value.finish})"
        case Reward():
            return f"{value.value:g}"
        case Mapping():
            return f"{len(value)} values"
        case tuple():
            more = f", ... ({len(value)})" if len(value) > _SHOWN else ""
            return f"({', '.join(map(_told, value[:_SHOWN]))}{more})"
        case _:
            return str(value)
