"""Everything the coordinator hears (events) and says (instructions). Plain frozen data, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..base.types import Group, Prompt, Response, Reward


def request_id(draw: int, attempt: int) -> str:
    """The id of one generation of a prompt. Fixed length: SGLang aborts by prefix, so none may begin another."""
    return f"{draw:08d}.{attempt:02d}"


def response_id(draw: int, attempt: int, sample: int) -> str:
    """The id of one response of it, as `GenerateRequest` names them."""
    return f"{request_id(draw, attempt)}/{sample}"


# --- events: things that happened ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Started:
    """The runtime is up; all engines serve weight `version`."""

    version: int


@dataclasses.dataclass(frozen=True)
class PromptsDrawn:
    """The answer to `DrawPrompts`: usable prompts in draw order, fewer than asked only if the data is exhausted.
    `skipped` are prompts that could not be prepared, as (prompt, reason)."""

    prompts: tuple[Prompt, ...]
    skipped: tuple[tuple[Prompt, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class ResponseFinished:
    """One sample of a prompt ended (stop, length, or abort with what it had, what it was begun with included)."""

    response: Response


@dataclasses.dataclass(frozen=True)
class RewardReady:
    rid: str
    reward: Reward


@dataclasses.dataclass(frozen=True)
class Trained:
    """The optimizer step over the groups of `Train` is done; the trainer now holds `version`. `metrics` are the
    step's, for policies that steer by them."""

    version: int
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """The gradients of `Accumulate` are computed and kept until the `Train` of this step."""

    step: int


@dataclasses.dataclass(frozen=True)
class Lent:
    """Nothing runs on the engines of `Lend` any more: training may use their devices."""

    engines: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ParallelismSet:
    """There are so many engines now, of `degree` devices each, all awake; they serve the oldest weights that any of
    those before did. `kv_tokens` is what the cache of each holds; 0: as much as before."""

    degree: int
    engines: int
    kv_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class WeightsPublished:
    """The engines of `PublishWeights` serve `version` from now on."""

    version: int


@dataclasses.dataclass(frozen=True)
class Evaluated:
    step: int


@dataclasses.dataclass(frozen=True)
class CheckpointSaved:
    step: int


@dataclasses.dataclass(frozen=True)
class EngineFailed:
    """The engine lost everything in flight for these requests; their prompts must be generated again."""

    request_ids: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class StopRequested:
    """Someone wants the run to end with a checkpoint, so that it can be resumed: at the next step boundary, or within a
    step for which dynamic sampling would have to draw on."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time passed. `now` is in seconds on the runtime's clock (virtual in simulation)."""

    now: float


Event = (
    Started
    | PromptsDrawn
    | ResponseFinished
    | RewardReady
    | Trained
    | Accumulated
    | Lent
    | ParallelismSet
    | WeightsPublished
    | Evaluated
    | CheckpointSaved
    | EngineFailed
    | StopRequested
    | Tick
)


# --- instructions: things to do -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DrawPrompts:
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
class Generate:
    """Submit these requests to their engines, in this order."""

    requests: tuple[Request, ...]


@dataclasses.dataclass(frozen=True)
class Abort:
    """End a request (all its responses) or one response; ids that have ended already do no harm."""

    rid: str


@dataclasses.dataclass(frozen=True)
class Park:
    """End the request of a prompt that is not trained on yet; the prompt is deferred until it is generated again.

    With `keep`, each of its running responses is reported as aborted and goes on later, from where it is, under
    whatever weights are served then; else nothing of it is used.
    """

    prompt: Prompt
    keep: bool = False


@dataclasses.dataclass(frozen=True)
class Score:
    response: Response


@dataclasses.dataclass(frozen=True)
class Skip:
    """Give this prompt up: it will not be trained on. `reason` goes into the run's summary."""

    prompt: Prompt
    reason: str


@dataclasses.dataclass(frozen=True)
class Lend:
    """Put these engines to sleep as soon as what was parked on them has ended; training may use their devices until
    the next `PublishWeights` to them, which wakes them."""

    engines: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Compute the gradients of these groups now, for the `Train` of `step`; nothing is updated. On the devices of
    these lent engines, or on the trainer's own if none are given."""

    step: int
    groups: tuple[Group, ...]
    engines: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Train:
    """One optimizer step over these groups, in this order, and over those of the step's `Accumulate` before it, none of
    which is among these; advantages are not yet filled in. Steps count from 1: after it, `step` steps are done."""

    step: int
    groups: tuple[Group, ...]


@dataclasses.dataclass(frozen=True)
class PublishWeights:
    """Serve the trainer's weights, `version`, on these engines (none given: on all). What runs there goes on under
    them; those that were lent wake up."""

    version: int
    engines: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class SetParallelism:
    """Engines of `degree` devices each from now on, on the same devices as before: as many as that makes. Said when
    nothing is generated or trained. What `engine` and `engines` mean elsewhere begins anew with the answer."""

    degree: int


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure the published weights on held-out prompts; `full` at the start and the end of the run."""

    step: int
    full: bool = False


@dataclasses.dataclass(frozen=True)
class SaveCheckpoint:
    """Save the state as it is now, before any later instruction is carried out."""

    step: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """Nothing is left to do, `step` steps are done. `reason` is for people; `complete` is False when the run was
    stopped early and can be resumed."""

    step: int
    reason: str
    complete: bool = True


Instruction = (
    DrawPrompts
    | Generate
    | Abort
    | Park
    | Score
    | Skip
    | Lend
    | Accumulate
    | Train
    | PublishWeights
    | SetParallelism
    | Evaluate
    | SaveCheckpoint
    | Finish
)
