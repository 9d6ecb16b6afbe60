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
from .programs import DecodeRound, doubling
from .requests import EngineLimits, checked
from .sampling import SlotSampling, seed_words

LEAST_IDS = 8  # stop and forbidden ids a slot; doubled when a request brings more


class SlotTable:
    """The state of `N` slots on the host; entries of free slots are stale."""

    def __init__(self, slots: int, max_sequence_tokens: int) -> None:
        self.slots = slots
        self.prompt_N = np.zeros(slots, np.int32)  # tokens of the prompt
        self.next_position_N = np.zeros(slots, np.int32)  # rotary position of the response's first token
        self.produced_N = np.zeros(slots, np.int32)  # tokens of the response, prefix included
        self.limit_N = np.zeros(slots, np.int32)  # the most tokens that the response may have
        self.response_NT = np.zeros((slots, max_sequence_tokens), np.int32)
        self.temperature_N = np.ones(slots, np.float32)
        self.top_p_N = np.ones(slots, np.float32)
        self.top_k_N = np.zeros(slots, np.int32)
        self.seed_N2 = np.zeros((slots, 2), np.uint32)
        self.sample_N = np.zeros(slots, np.int32)
        self.stop_ids_NI = np.full((slots, LEAST_IDS), -1, np.int32)
        self.forbidden_ids_NI = np.full((slots, LEAST_IDS), -1, np.int32)

    def assign(self, slot: int, request: GenerateRequest, sample: int, prefix: tuple[int, ...]) -> None:
        sampling = request.sampling
        self.prompt_N[slot] = len(request.prompt)
        self.next_position_N[slot] = request.prompt.next_position
        self.produced_N[slot] = len(prefix)
        self.limit_N[slot] = sampling.max_new_tokens
        self.response_NT[slot, : len(prefix)] = prefix
        self.temperature_N[slot] = sampling.temperature
        self.top_p_N[slot] = sampling.top_p
        self.top_k_N[slot] = sampling.top_k
        self.seed_N2[slot] = seed_words(request.seed)
        self.sample_N[slot] = sample
        self.stop_ids_NI = _with_ids(self.stop_ids_NI, slot, sampling.stop_ids)
        self.forbidden_ids_NI = _with_ids(self.forbidden_ids_NI, slot, sampling.forbidden_ids)

    def extend(self, slots_B: np.ndarray, tokens_BR: np.ndarray, count_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds the first `count_B` (at least 1) tokens to each slot; returns who hit a stop id, and who the limit."""
        fresh_BR = np.arange(tokens_BR.shape[1]) < count_B[:, None]
        column_BR = self.produced_N[slots_B][:, None] + np.arange(tokens_BR.shape[1])
        row_BR = np.broadcast_to(slots_B[:, None], column_BR.shape)
        self.response_NT[row_BR[fresh_BR], column_BR[fresh_BR]] = tokens_BR[fresh_BR]
        self.produced_N[slots_B] += count_B
        last_B = np.take_along_axis(tokens_BR, count_B[:, None] - 1, axis=1)
        stop_B = (last_B == self.stop_ids_NI[slots_B]).any(axis=1)
        return stop_B, self.produced_N[slots_B] >= self.limit_N[slots_B]

    def sampling(self, slots_B: np.ndarray, size: int) -> SlotSampling:
        """The parameters of some slots, filled up to `size` rows with those of slot 0 (never looked at)."""
        slots_B = _filled(slots_B, size, 0)
        return SlotSampling(
            self.temperature_N[slots_B],
            self.top_p_N[slots_B],
            self.top_k_N[slots_B],
            _trimmed(self.stop_ids_NI[slots_B]),
            _trimmed(self.forbidden_ids_NI[slots_B]),
            self.seed_N2[slots_B],
            self.sample_N[slots_B],
        )

    def round(self, slots_B: np.ndarray, size: int) -> DecodeRound:
        """The input of the decode program, filled up to `size` rows with slots out of range and nothing to do."""
        padding = size - len(slots_B)
        produced_B = self.produced_N[slots_B]
        cached_B = self.prompt_N[slots_B] + produced_B - 1  # the last token is the round's first input

        def fill(x_B: np.ndarray) -> np.ndarray:
            return np.pad(x_B, (0, padding))

        return DecodeRound(
            slots_B=_filled(slots_B, size, self.slots),
            token_B=fill(self.response_NT[slots_B, produced_B - 1]),
            position_B=fill(self.next_position_N[slots_B] + produced_B - 1),
            length_B=fill(cached_B),
            index_B=fill(produced_B),
            remaining_B=fill(self.limit_N[slots_B] - produced_B),
            sampling=self.sampling(slots_B, size),
        )


def _filled(x_B: np.ndarray, size: int, value: int) -> np.ndarray:
    return np.pad(x_B, (0, size - len(x_B)), constant_values=value).astype(np.int32)


def _trimmed(ids_BI: np.ndarray) -> np.ndarray:
    """Only as wide as these slots need: other requests, past or present, must not decide the compiled shape."""
    return ids_BI[:, : doubling(int((ids_BI >= 0).sum(axis=1).max()), LEAST_IDS)]


def _with_ids(ids_NI: np.ndarray, slot: int, ids: tuple[int, ...]) -> np.ndarray:
    """Writes a slot's list of ids, in a wider table if need be."""
    width = doubling(len(ids), ids_NI.shape[1])
    ids_NI = np.pad(ids_NI, ((0, 0), (0, width - ids_NI.shape[1])), constant_values=-1)
    ids_NI[slot] = -1
    ids_NI[slot, : len(ids)] = ids
    return ids_NI


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
