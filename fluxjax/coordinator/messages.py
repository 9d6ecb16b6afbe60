"""Everything the coordinator hears (events) and says (instructions). Plain frozen data, nothing else."""

from __future__ import annotations

import dataclasses

from ..types import Group, Prompt, Response, Reward

# --- events: things that happened ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Started:
    """The runtime is up; engines serve weight `version`."""

    version: int


@dataclasses.dataclass(frozen=True)
class PromptsDrawn:
    """The answer to `DrawPrompts`: usable prompts in draw order, fewer than asked only if the data is exhausted.
    `skipped` are prompts that could not be prepared, as (prompt, reason)."""

    prompts: tuple[Prompt, ...]
    skipped: tuple[tuple[Prompt, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class ResponseFinished:
    """One sample of a prompt ended (stop, length, or abort with what it had)."""

    response: Response


@dataclasses.dataclass(frozen=True)
class RewardReady:
    rid: str
    reward: Reward


@dataclasses.dataclass(frozen=True)
class Trained:
    """The optimizer step over the groups of `Train` is done; the trainer now holds `version`."""

    version: int


@dataclasses.dataclass(frozen=True)
class WeightsPublished:
    version: int


@dataclasses.dataclass(frozen=True)
class Evaluated:
    step: int


@dataclasses.dataclass(frozen=True)
class CheckpointSaved:
    step: int


@dataclasses.dataclass(frozen=True)
class EngineFailed:
    """The engine lost everything in flight for these requests (prompt draws); they must be generated again."""

    draws: tuple[int, ...]
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
    | WeightsPublished
    | Evaluated
    | CheckpointSaved
    | EngineFailed
    | Tick
)


# --- instructions: things to do -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DrawPrompts:
    count: int


@dataclasses.dataclass(frozen=True)
class Generate:
    """Generate `n` responses to each prompt; submit them to the engines in this order."""

    prompts: tuple[Prompt, ...]
    n: int
    attempt: int = 0  # grows when a prompt is generated again; part of the request id


@dataclasses.dataclass(frozen=True)
class Abort:
    rid: str


@dataclasses.dataclass(frozen=True)
class Score:
    response: Response


@dataclasses.dataclass(frozen=True)
class Train:
    """One optimizer step over these groups, in this order; advantages are not yet filled in."""

    step: int
    groups: tuple[Group, ...]


@dataclasses.dataclass(frozen=True)
class PublishWeights:
    version: int


@dataclasses.dataclass(frozen=True)
class Evaluate:
    step: int


@dataclasses.dataclass(frozen=True)
class SaveCheckpoint:
    step: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """The run is complete after `step` steps. `reason` is for people."""

    step: int
    reason: str


Instruction = DrawPrompts | Generate | Abort | Score | Train | PublishWeights | Evaluate | SaveCheckpoint | Finish
