"""Everything the coordinator hears (events) and says (instructions). Plain frozen data, nothing else.

This is where a new message begins: write its class here and, for an instruction that is answered by an event, a line
in `ANSWERS`. `Coordinator`, `Runtime`, `Cluster` and `Books` then refuse to be imported until each handles it
(`dispatch.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..base.types import Group, Prompt, Response, Reward


def request_id(draw: int, attempt: int) -> str:
    """The id of one generation of a prompt. Its length is fixed: SGLang aborts by prefix, so none may begin another."""
    return f"{draw:08d}.{attempt:02d}"


def response_id(draw: int, attempt: int, sample: int) -> str:
    """The id of one response of a request, as `GenerateRequest` names them."""
    return f"{request_id(draw, attempt)}/{sample}"


class Message:
    """What is heard or said."""

    def told(self) -> tuple[Sequence[str | int], str, object]:
        """What the log keeps of the message: the prompts that it concerns (draws, or ids of requests or responses), and
        a %-format with its values. No tokens and no prompts: they would live as long as the log does."""
        return (), "%s", vars(self)


class Event(Message):
    """Something that happened."""


class Instruction(Message):
    """Something to do."""


# --- events: things that happened ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Started(Event):
    """The runtime is up; all engines serve weight `version`."""

    version: int


@dataclasses.dataclass(frozen=True)
class PromptsDrawn(Event):
    """The answer to `DrawPrompts`: usable prompts in draw order, fewer than asked only if the data is exhausted.
    `skipped` are prompts that could not be prepared, as (prompt, reason)."""

    prompts: tuple[Prompt, ...]
    skipped: tuple[tuple[Prompt, str], ...] = ()

    def told(self) -> tuple[Sequence[str | int], str, object]:
        draws = [prompt.draw for prompt in self.prompts]
        return draws + [prompt.draw for prompt, _ in self.skipped], "%d of them skipped", len(self.skipped)


@dataclasses.dataclass(frozen=True)
class ResponseFinished(Event):
    """One sample of a prompt ended (stop, length, or abort with what it had, what it was begun with included)."""

    response: Response

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return (self.response.rid,), "%d tokens, %s", (len(self.response.token_ids), self.response.finish)


@dataclasses.dataclass(frozen=True)
class RewardReady(Event):
    rid: str
    reward: Reward

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return (self.rid,), "%g", self.reward.value


@dataclasses.dataclass(frozen=True)
class Trained(Event):
    """The optimizer step over the groups of `Train` is done; the trainer now holds `version`. `metrics` are the
    step's, for policies that steer by them."""

    version: int
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return (), "version %d", self.version


@dataclasses.dataclass(frozen=True)
class Accumulated(Event):
    """The gradients of `Accumulate` are computed and kept until the `Train` of this step."""

    step: int


@dataclasses.dataclass(frozen=True)
class Lent(Event):
    """Nothing runs on the engines of `Lend` any more: training may use their devices."""

    engines: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ParallelismSet(Event):
    """There are so many engines now, of `degree` devices each, all awake; they serve the oldest weights that any of
    those before did. `kv_tokens` is what the cache of each holds; 0: as much as before."""

    degree: int
    engines: int
    kv_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class WeightsPublished(Event):
    """The engines of `PublishWeights` serve `version` from now on."""

    version: int


@dataclasses.dataclass(frozen=True)
class Evaluated(Event):
    step: int


@dataclasses.dataclass(frozen=True)
class CheckpointSaved(Event):
    step: int


@dataclasses.dataclass(frozen=True)
class EngineFailed(Event):
    """The engine lost everything in flight for these requests; their prompts must be generated again."""

    request_ids: tuple[str, ...]
    reason: str

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return self.request_ids, "%s", self.reason


@dataclasses.dataclass(frozen=True)
class StopRequested(Event):
    """Someone wants the run to end with a checkpoint, so that it can be resumed: at the next step boundary, or within a
    step for which dynamic sampling would have to draw on."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Tick(Event):
    """Time passed. `now` is in seconds on the runtime's clock (virtual in simulation)."""

    now: float


# --- instructions: things to do -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DrawPrompts(Instruction):
    count: int


@dataclasses.dataclass(frozen=True)
class Request:
    """`n` responses to a prompt on one engine. The first `need` of them to end make its group (0: all of them)."""

    prompt: Prompt
    n: int
    attempt: int = 0  # grows when a prompt is generated again; part of the request id
    need: int = 0
    engine: int = 0  # its index
    begun: tuple[Response | None, ...] = ()  # responses to go on with, one a sample (None: from the start), or none
    temperature: float | None = None  # of sampling; None: the run's

    @property
    def rid(self) -> str:
        return request_id(self.prompt.draw, self.attempt)


@dataclasses.dataclass(frozen=True)
class Generate(Instruction):
    """Submit these requests to their engines, in this order."""

    requests: tuple[Request, ...]

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return [r.rid for r in self.requests], "on engines %s", sorted({r.engine for r in self.requests})


@dataclasses.dataclass(frozen=True)
class Abort(Instruction):
    """End a request (all its responses) or one response; ids that have ended already do no harm."""

    rid: str

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return (self.rid,), "", ()


@dataclasses.dataclass(frozen=True)
class Park(Instruction):
    """End the request of a prompt that is not trained on yet, which is its newest `attempt`; the prompt is deferred
    until it is generated again.

    With `keep`, each of its running responses is reported as aborted and goes on later, from where it is, under
    whatever weights are served then; else nothing of it is used.
    """

    prompt: Prompt
    attempt: int
    keep: bool = False

    @property
    def request(self) -> str:
        """The id of the request that ends."""
        return request_id(self.prompt.draw, self.attempt)

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return (self.request,), "keep=%s", self.keep


@dataclasses.dataclass(frozen=True)
class Score(Instruction):
    response: Response

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return (self.response.rid,), "", ()


@dataclasses.dataclass(frozen=True)
class Skip(Instruction):
    """Give this prompt up: it will not be trained on. `reason` goes into the run's summary."""

    prompt: Prompt
    reason: str

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return (self.prompt.draw,), "%s", self.reason


@dataclasses.dataclass(frozen=True)
class Lend(Instruction):
    """Put these engines to sleep as soon as what was parked on them has ended; training may use their devices until
    the next `PublishWeights` to them, which wakes them."""

    engines: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Accumulate(Instruction):
    """Compute the gradients of these groups now, for the `Train` of `step`; nothing is updated. On the devices of
    these lent engines, or on the trainer's own if none are given."""

    step: int
    groups: tuple[Group, ...]
    engines: tuple[int, ...] = ()

    def told(self) -> tuple[Sequence[str | int], str, object]:
        draws = [group.prompt.draw for group in self.groups]
        return draws, "for step %d, on engines %s", (self.step, self.engines)


@dataclasses.dataclass(frozen=True)
class Train(Instruction):
    """One optimizer step over these groups, in this order, and over those of the step's `Accumulate` before it, none of
    which is among these; advantages are not yet filled in. Steps count from 1: after it, `step` steps are done."""

    step: int
    groups: tuple[Group, ...]

    def told(self) -> tuple[Sequence[str | int], str, object]:
        return [group.prompt.draw for group in self.groups], "step %d", self.step


@dataclasses.dataclass(frozen=True)
class PublishWeights(Instruction):
    """Serve the trainer's weights, `version`, on these engines (none given: on all). What runs there goes on under
    them; those that were lent wake up."""

    version: int
    engines: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class SetParallelism(Instruction):
    """Engines of `degree` devices each from now on, on the same devices as before: as many as that makes. Said when
    nothing is generated or trained. What `engine` and `engines` mean elsewhere begins anew with the answer."""

    degree: int


@dataclasses.dataclass(frozen=True)
class Evaluate(Instruction):
    """Measure the published weights on held-out prompts; `full` at the start and the end of the run."""

    step: int
    full: bool = False


@dataclasses.dataclass(frozen=True)
class SaveCheckpoint(Instruction):
    """Save the state as it is now, before any later instruction is carried out."""

    step: int


@dataclasses.dataclass(frozen=True)
class Finish(Instruction):
    """Nothing is left to do, `step` steps are done. `reason` is for people; `complete` is False when the run was
    stopped early and can be resumed."""

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
"""Which instruction an event answers. At most one instruction of each of these types is under way."""
ANSWERED = frozenset(ANSWERS.values())
