"""The engine's bookkeeping of requests, samples and slots: pure host code without device, clock or event loop.

Samples wait in the order of submission and take the lowest free slots in that order, so that equal submissions
give equal batches. A slot whose sample has nothing in the cache (new, or the weights changed) is to be *started*
from prefilled rows; all others are decoded.

A turn that failed is done again. If it served one request, that one is lost; if it served several, these are
*suspects*: each has its turns to itself until it gets through a round, so that only those are lost that fail alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from typing import Any

import numpy as np

from .engine import EngineError, FinishReason, GenerateRequest, TokenChunk
from .requests import EngineLimits, checked
from .slots import SlotTable


@dataclasses.dataclass(eq=False)
class RunningSample:
    """One response in the making. `slot` is -1 while it waits and after it ended. `place` is for `rollout.turns`: the
    batch in which its prompt was prefilled and its place there, until it is started."""

    job: Job
    index: int
    slot: int = -1
    place: Any = None
    aborted: bool = False
    ended: bool = False

    @property
    def waiting(self) -> bool:
        return self.slot < 0 and not self.ended and not self.aborted


@dataclasses.dataclass(eq=False)
class Job:
    """A request in flight. `sink` gets the chunks."""

    request: GenerateRequest
    sink: Any = None
    samples: list[RunningSample] = dataclasses.field(default_factory=list)
    suspect: bool = False  # a turn that it shared with others failed

    @property
    def open(self) -> bool:
        return any(not sample.ended for sample in self.samples)

    def prefix(self, index: int) -> tuple[int, ...]:
        return self.request.prefix_ids[index] if self.request.prefix_ids else ()


Delivery = tuple[Job, TokenChunk]


class Scheduler:
    """Requests, samples and slots. Methods that end or advance samples return the chunks to deliver."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.table = SlotTable(limits.slots, limits.max_sequence_tokens)
        self.jobs: dict[str, Job] = {}
        self.occupant: list[RunningSample | None] = [None] * limits.slots
        self.cached_N = np.zeros(limits.slots, bool)  # the slot's cache holds its sample
        self.waiting: deque[RunningSample] = deque()
        self.tokens_generated = 0

    @property
    def running(self) -> int:
        return sum(sample is not None for sample in self.occupant)

    def submit(self, request: GenerateRequest, sink: Any = None) -> tuple[Job, list[Delivery]]:
        """Queues a request. Raises EngineError for one that can never be served, which then leaves no trace; chunks
        are of samples whose prefix is already a whole response."""
        request = checked(request, self.limits)
        if request.rid in self.jobs:
            raise EngineError(f"request {request.rid!r}: a request of this id is already in flight")
        job = self.jobs[request.rid] = Job(request, sink)
        job.samples = [RunningSample(job, index) for index in range(request.n)]
        done: list[Delivery] = []
        for sample in job.samples:
            prefix = job.prefix(sample.index)
            if prefix and prefix[-1] in request.sampling.stop_ids:
                done.append(self._end(sample, FinishReason.STOP))
            elif len(prefix) >= request.sampling.max_new_tokens:
                done.append(self._end(sample, FinishReason.LENGTH))
            else:
                self.waiting.append(sample)
        return job, done

    def admit(self) -> None:
        """Gives free slots to waiting samples."""
        free = [slot for slot, occupant in enumerate(self.occupant) if occupant is None]
        for slot in free[: len(self.waiting)]:
            sample = self.waiting.popleft()
            sample.slot = slot
            self.occupant[slot] = sample
            self.cached_N[slot] = False
            job = sample.job
            self.table.assign(slot, job.request, sample.index, job.prefix(sample.index))

    def to_start(self) -> dict[Job, list[RunningSample]]:
        """Samples that hold a slot and have nothing in its cache, by job, in the order of their slots."""
        alone = self._alone()
        jobs: dict[Job, list[RunningSample]] = {}
        for sample, cached in zip(self.occupant, self.cached_N, strict=True):
            if sample is not None and not cached and alone in (None, sample.job):
                jobs.setdefault(sample.job, []).append(sample)
        return jobs

    def to_decode(self) -> np.ndarray:
        """Slots with a sample in the cache, ascending."""
        slots_B = np.flatnonzero(self.cached_N)
        if (alone := self._alone()) is not None:
            slots_B = np.intersect1d(slots_B, [sample.slot for sample in alone.samples])
        return slots_B.astype(np.int32)

    def _alone(self) -> Job | None:
        """The first suspect that has a slot: the next turn serves nobody else."""
        return next((sample.job for sample in self.occupant if sample is not None and sample.job.suspect), None)

    def at_turn(self) -> list[Job]:
        """The jobs that the next turn serves, or the one in flight: those to start if there are any."""
        return list(self.to_start()) or self.holders(self.to_decode())

    def holders(self, slots_B: np.ndarray) -> list[Job]:
        """The jobs whose samples run in some slots."""
        samples = (self.occupant[slot] for slot in slots_B.tolist())
        return list(dict.fromkeys(sample.job for sample in samples if sample is not None))

    def blame(self, jobs: list[Job]) -> list[Job]:
        """Takes in that a turn failed for these jobs: a single job is lost and returned, several become suspects.

        The cache can't be relied on after that: all running samples are to be started again.
        """
        self.invalidate()
        if len(jobs) == 1:
            return self._drop(jobs)
        for job in jobs:
            job.suspect = True
        return []

    def response(self, sample: RunningSample) -> np.ndarray:
        """The tokens that a sample has so far, its prefix included."""
        if sample.slot < 0:
            return np.asarray(sample.job.prefix(sample.index), np.int32)
        return self.table.response_NT[sample.slot, : self.table.produced_N[sample.slot]].copy()

    def record(
        self, slots_B: np.ndarray, tokens_BR: np.ndarray, logprobs_BR: np.ndarray, count_B: np.ndarray, version: int
    ) -> list[Delivery]:
        """Takes in the first `count_B` new tokens of each slot; ends what is complete and what was aborted."""
        stop_B, full_B = self.table.extend(slots_B, tokens_BR, count_B)
        decoded = bool(self.cached_N[slots_B].all())
        self.cached_N[slots_B] = True
        self.tokens_generated += int(count_B.sum())
        deliveries: list[Delivery] = []
        arrays = (slots_B, tokens_BR, logprobs_BR, count_B, stop_B, full_B)
        for slot, tokens, logprobs, count, stop, full in zip(*(array.tolist() for array in arrays), strict=True):
            sample = self.occupant[slot]
            assert sample is not None, "slots are freed between turns only"
            finish = FinishReason.STOP if stop else FinishReason.LENGTH if full else None
            if finish is None and sample.aborted:
                finish = FinishReason.ABORT
            job, index = sample.job, sample.index
            job.suspect = job.suspect and not decoded
            chunk = TokenChunk(
                job.request.rid, index, tuple(tokens[:count]), tuple(logprobs[:count]), (version,) * count, finish
            )
            deliveries.append((job, chunk))
            if finish is not None:
                self._end(sample, finish)
        return deliveries

    def _end(self, sample: RunningSample, finish: FinishReason) -> Delivery:
        """Frees the slot; returns the chunk for an end without new tokens."""
        self._free(sample)
        job = sample.job
        if not job.open:
            del self.jobs[job.request.rid]
        return job, TokenChunk(job.request.rid, sample.index, (), (), (), finish)

    def _free(self, sample: RunningSample) -> None:
        if sample.slot >= 0:
            self.occupant[sample.slot] = None
            self.cached_N[sample.slot] = False
            sample.slot = -1
        sample.ended, sample.place = True, None

    def mark_aborted(self, id: str) -> None:
        """Marks a request (`rid`) or one sample (`rid/i`); unknown ids are ignored. `reap` ends what is marked."""
        job = self.jobs.get(id)
        if job is not None:
            for sample in job.samples:
                sample.aborted = True
            return
        rid, _, index = id.rpartition("/")
        job = self.jobs.get(rid)
        if job is not None and index.isdecimal() and int(index) < len(job.samples):
            job.samples[int(index)].aborted = True

    def reap(self) -> list[Delivery]:
        """Ends all marked samples, running or waiting. Not to be called while a round is on the device."""
        marked = [s for job in self.jobs.values() for s in job.samples if s.aborted and not s.ended]
        if any(sample.slot < 0 for sample in marked):
            self.waiting = deque(sample for sample in self.waiting if not sample.aborted)
        return [self._end(sample, FinishReason.ABORT) for sample in marked]

    def invalidate(self) -> None:
        """Forgets the cache, as after a change of weights: running samples are to be started again."""
        self.cached_N[:] = False
        for sample in itertools.chain(self.waiting, filter(None, self.occupant)):
            sample.place = None

    def clear(self) -> list[Job]:
        """Drops everything; returns the jobs that were open."""
        return self._drop(list(self.jobs.values()))

    def _drop(self, jobs: list[Job]) -> list[Job]:
        """Forgets jobs, without chunks; returns them."""
        for job in jobs:
            del self.jobs[job.request.rid]
            for sample in job.samples:
                self._free(sample)
        self.waiting = deque(sample for sample in self.waiting if not sample.ended)
        return jobs
