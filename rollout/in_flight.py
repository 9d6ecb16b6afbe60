"""Requests, samples and turns in flight, as the scheduler keeps them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from .engine import GenerateRequest

if TYPE_CHECKING:
    from models.inputs import ModelInput

    from .prompt_pixels import PromptFeatures
    from .sessions import Identity


@dataclasses.dataclass(eq=False)
class RunningSample:
    """One response in the making. `slot` is -1 while the sample waits, and after it ended. Until the sample is started,
    `rollout.turns` sets `place` to the sample's prefill batch and its `Place` in that batch."""

    job: Job
    index: int
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)  # the pages of its cache entries, in order
    # The number of cache entries, in full pages, that chunks have written. The slot has the state after these entries.
    filled: int = 0
    from_kept: bool = False  # the next prefill goes on from the job's kept state, not from the state of the slot
    place: Any = None
    aborted: bool = False
    ended: bool = False
    preemptions: int = 0

    @property
    def waiting(self) -> bool:
        """Says whether the sample has no pages, and is neither ended nor aborted."""
        return not (self.pages or self.ended or self.aborted)

    @property
    def age(self) -> tuple[bool, int, int]:
        """The sort key of the order in which samples get pages; the last sample loses pages first."""
        return not self.job.suspect, self.job.number, self.index

    @property
    def written(self) -> int:
        """The number of cache entries, from the first on and in full pages, that are written before the start."""
        return max(self.filled, self.job.filled) if self.pages else 0


@dataclasses.dataclass(eq=False)
class Job:
    """A request in flight. `sink` gets the chunks."""

    request: GenerateRequest
    # The request's prompt. While kept pages are the beginning of its pages, the media shown only there are left out.
    prompt: ModelInput
    sink: Any = None
    samples: list[RunningSample] = dataclasses.field(default_factory=list)
    number: int = 0  # grows in the order of submission, or of seeds (`by_seed`)
    suspect: bool = False  # a turn that this job shared with other jobs failed
    pages: list[int] = dataclasses.field(default_factory=list)  # the prompt's full pages, while any sample has them
    holders: int = 0  # the number of samples that have these pages
    filled: int = 0  # written entries of these pages; a multiple of a page
    features: PromptFeatures | None = None  # features of its images and videos, kept between the chunks of its prompt
    session: str = ""  # empty when the session has ended
    identity_5T: Identity | None = None  # of the prompt, if samples of the request keep their pages
    state: int = -1  # the number of the kept state that the job holds; -1: none
    state_tokens: int = 0  # tokens of the prompt behind which this state is

    @property
    def open(self) -> bool:
        return any(not sample.ended for sample in self.samples)

    def end_surplus(self) -> None:
        """If as many samples as the request needs have ended, marks all other samples as aborted, for `reap`."""
        need = self.request.need
        if need and sum(sample.ended and not sample.aborted for sample in self.samples) >= need:
            for sample in self.samples:
                sample.aborted = sample.aborted or not sample.ended

    def prefix(self, index: int) -> tuple[int, ...]:
        return self.request.prefix_ids[index] if self.request.prefix_ids else ()


@dataclasses.dataclass(frozen=True, eq=False)
class Flight:
    """A turn that was dispatched, and the samples that get its tokens when the tokens are read."""

    jobs: list[Job]  # jobs that the turn served
    samples: dict[int, RunningSample]  # by slot
    decodes: bool  # the turn is a round
    version: int  # of the weights
    tokens: Any = None  # `rollout.device.Unread`
