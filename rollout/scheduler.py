"""The engine's bookkeeping of requests, samples, slots and pages: pure host code without device, clock or event loop.

Samples wait in the order of submission and take the lowest free slots in that order, so that equal submissions
give equal batches. A slot is a place in the tables; what a sample has in the cache is in its pages, which it gets when
they are free, in the order of submission, too. The full pages of a prompt are held by all samples of its request
together. A sample that has pages and nothing in them (new, or the weights changed) is to be *started* from prefilled
rows; all others are decoded.

Pages are given for the tokens that are there, not for those that may come: responses end long before their limit more
often than not. Where a round finds no free page, the youngest sample that has any loses its pages and is started again
later, with the tokens that it has (it is *preempted*). The oldest one never loses any to others, and every request
alone fits the pool, so somebody always gets on.

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
from .pages import PAGE_TOKENS, PagePool, pages_for
from .programs import DecodeRound, doubling
from .requests import EngineLimits, checked, ended_before
from .sampling import SlotSampling, seed_words

LEAST_IDS = 8  # stop and forbidden ids a slot; doubled when a request brings more
PREFILL_TOKENS = 4096  # of one turn, so that rounds come in between; a single prompt with media may have more
CHUNK_TOKENS = 2048  # of one prompt, or of what a sample has, in one prefill; a multiple of a page


class SlotTable:
    """The state of `N` slots on the host, in a cache of `pages` pages; entries of free slots are stale."""

    def __init__(self, slots: int, max_sequence_tokens: int, pages: int) -> None:
        self.no_page = pages  # out of range: nothing is written there
        self.page_NC = np.full((slots, pages_for(max_sequence_tokens)), pages, np.int32)  # of each slot's entries
        self.pages_N = np.zeros(slots, np.int32)  # the first so many are its pages; 0: all are stale
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

    def assign(self, request: GenerateRequest, samples: list[int], slots: list[int], prefixes: list[tuple]) -> None:
        """Gives free slots to samples of one request, which begin with these tokens."""
        sampling = request.sampling
        self.prompt_N[slots] = len(request.prompt)
        self.next_position_N[slots] = request.prompt.next_position
        self.produced_N[slots] = list(map(len, prefixes))
        for slot, prefix in zip(slots, prefixes, strict=True):
            self.response_NT[slot, : len(prefix)] = prefix
        self.limit_N[slots] = sampling.max_new_tokens
        self.temperature_N[slots] = sampling.temperature
        self.top_p_N[slots] = sampling.top_p
        self.top_k_N[slots] = sampling.top_k
        self.seed_N2[slots] = seed_words(request.seed)
        self.sample_N[slots] = [request.samples[i] for i in samples] if request.samples else samples
        self.stop_ids_NI = _with_ids(self.stop_ids_NI, slots, sampling.stop_ids)
        self.forbidden_ids_NI = _with_ids(self.forbidden_ids_NI, slots, sampling.forbidden_ids)

    def place(self, slot: int, pages: list[int]) -> None:
        """Notes the pages that the sample of a slot has now."""
        self.page_NC[slot, : len(pages)] = pages
        self.page_NC[slot, len(pages) :] = self.no_page
        self.pages_N[slot] = len(pages)

    def wanted_pages(self, slots_B: np.ndarray, steps: int) -> np.ndarray:
        """The pages that some slots need for so many more tokens each, or for as many as they may get, of which the
        last one is never in the cache."""
        entries_B = np.minimum(self.produced_N[slots_B] + steps, self.limit_N[slots_B]) + self.prompt_N[slots_B] - 1
        return -(-entries_B // PAGE_TOKENS)

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

    def round(self, slots_B: np.ndarray, size: int, steps: int, view_pages: int) -> DecodeRound:
        """The input of the decode program for `steps` tokens, filled up to `size` rows with nothing to do. The first
        `view_pages` pages of each slot are read."""
        padding = size - len(slots_B)
        produced_B = self.produced_N[slots_B]
        cached_B = self.prompt_N[slots_B] + produced_B - 1  # the last token is the round's first input
        entry_BR = cached_B[:, None] + np.arange(steps)
        page_BR = np.minimum(entry_BR // PAGE_TOKENS, self.page_NC.shape[1] - 1)
        entries_BR = self.page_NC[slots_B[:, None], page_BR] * PAGE_TOKENS + entry_BR % PAGE_TOKENS
        entries_BR[entry_BR >= self.page_NC.shape[1] * PAGE_TOKENS] = self.no_page * PAGE_TOKENS

        def fill(x_B: np.ndarray) -> np.ndarray:
            return np.pad(x_B, (0, padding))

        return DecodeRound(
            pages_BC=np.pad(self.page_NC[slots_B, :view_pages], ((0, padding), (0, 0))),
            entries_BR=np.pad(entries_BR, ((0, padding), (0, 0)), constant_values=self.no_page * PAGE_TOKENS),
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


def _with_ids(ids_NI: np.ndarray, slots: list[int], ids: tuple[int, ...]) -> np.ndarray:
    """Writes a list of ids for some slots, into a wider table if need be; returns the table."""
    width = doubling(len(ids), ids_NI.shape[1])
    if width > ids_NI.shape[1]:  # `np.pad` takes longer than all the rest of a start
        ids_NI = np.pad(ids_NI, ((0, 0), (0, width - ids_NI.shape[1])), constant_values=-1)
    ids_NI[slots] = -1
    ids_NI[slots, : len(ids)] = ids
    return ids_NI


@dataclasses.dataclass(eq=False)
class RunningSample:
    """One response in the making. `slot` is -1 while it waits and after it ended. `place` is for `rollout.turns`: the
    batch in which its prompt was prefilled and its place there, until it is started."""

    job: Job
    index: int
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)  # of its entries, in their order
    filled: int = 0  # of its own entries, those that chunks have written; whole pages
    place: Any = None
    aborted: bool = False
    ended: bool = False
    preemptions: int = 0

    @property
    def waiting(self) -> bool:
        """It has no pages yet, or none any more."""
        return not (self.pages or self.ended or self.aborted)

    def forget_context(self) -> None:
        """Drops what was prefilled behind pages of the prompt that are gone."""
        if self.place is not None and self.place[1].skip:
            self.place = None

    @property
    def age(self) -> tuple[bool, int, int]:
        """The order in which samples get pages; the last one loses them first."""
        return not self.job.suspect, self.job.number, self.index

    @property
    def written(self) -> int:
        """Its first entries that are in the cache before it is started; whole pages."""
        return max(self.filled, self.job.filled) if self.pages else 0


@dataclasses.dataclass(eq=False)
class Job:
    """A request in flight. `sink` gets the chunks."""

    request: GenerateRequest
    sink: Any = None
    samples: list[RunningSample] = dataclasses.field(default_factory=list)
    number: int = 0  # in the order of submission
    suspect: bool = False  # a turn that it shared with others failed
    pages: list[int] = dataclasses.field(default_factory=list)  # the full ones of the prompt, while any sample has them
    filled: int = 0  # of their entries, those that are written; whole pages

    @property
    def open(self) -> bool:
        return any(not sample.ended for sample in self.samples)

    def prefix(self, index: int) -> tuple[int, ...]:
        return self.request.prefix_ids[index] if self.request.prefix_ids else ()


Delivery = tuple[Job, TokenChunk]


class Scheduler:
    """Requests, samples, slots and pages. Methods that end or advance samples return the chunks to deliver."""

    def __init__(self, limits: EngineLimits) -> None:
        self.resize(limits)
        self.jobs: dict[str, Job] = {}
        self.occupant: list[RunningSample | None] = [None] * limits.slots
        self.cached_N = np.zeros(limits.slots, bool)  # the slot's cache holds its sample
        self.waiting: deque[RunningSample] = deque()
        self._pageless: set[RunningSample] = set()  # that hold a slot
        self.tokens_generated = self.preemptions = self._submitted = 0
        self._starting: dict[Job, list[RunningSample]] = {}  # in the turn that is prepared or in flight
        self._more_to_start = False  # than fits one turn

    def resize(self, limits: EngineLimits) -> None:
        """Takes in how many pages there are, while there are no requests."""
        self.limits = limits
        self.pool = PagePool(limits.pages)
        self.table = SlotTable(limits.slots, limits.max_sequence_tokens, limits.pages)

    @property
    def running(self) -> int:
        return sum(sample is not None for sample in self.occupant)

    def submit(self, request: GenerateRequest, sink: Any = None) -> tuple[Job, list[Delivery]]:
        """Queues a request. Raises EngineError for one that can never be served, which then leaves no trace; chunks
        are of samples whose prefix is already a whole response."""
        request = checked(request, self.limits)
        if request.rid in self.jobs:
            raise EngineError(f"request {request.rid!r}: a request of this id is already in flight")
        self._submitted += 1
        job = self.jobs[request.rid] = Job(request, sink, number=self._submitted)
        job.samples = [RunningSample(job, index) for index in range(request.n)]
        done: list[Delivery] = []
        for sample in job.samples:
            finish = ended_before(job.prefix(sample.index), request.sampling)
            if finish is None:
                self.waiting.append(sample)
            else:
                done.append(self._end_with(sample, finish))
        return job, done

    def next_turn(self) -> None:
        """Gives free slots and pages to those who wait, and decides what the next turn is: a start, or a round, for
        which it makes room. Where there is more to start than fits one turn, rounds come in between."""
        self._admit()
        due, self._more_to_start = self._more_to_start, False
        self._starting = {}
        if due and len(self.to_decode()):
            self._make_room()
        if not (due and len(self.to_decode())):
            self._starting = self._to_start()
            if not self._starting:
                self._make_room()

    def _admit(self) -> None:
        free = [slot for slot, occupant in enumerate(self.occupant) if occupant is None] if self.waiting else []
        admitted = [self.waiting.popleft() for _ in range(min(len(free), len(self.waiting)))]
        for slot, sample in zip(free, admitted, strict=False):
            sample.slot = slot
            self.occupant[slot] = sample
        for job, members in itertools.groupby(admitted, key=lambda sample: sample.job):
            samples = list(members)
            indices = [sample.index for sample in samples]
            slots = [sample.slot for sample in samples]
            self.table.assign(job.request, indices, slots, list(map(job.prefix, indices)))
            self.cached_N[slots] = False
            self._pageless.update(samples)
        if not self._pageless:
            return
        held_B = np.flatnonzero(self.table.pages_N > 0)
        # A page more for each that can use one: who gets pages now should not lose them at once.
        spare = int((self.table.pages_N[held_B] < self.table.wanted_pages(held_B, PAGE_TOKENS)).sum())
        samples = sorted(self._pageless, key=lambda sample: sample.age)
        slots_B = np.array([sample.slot for sample in samples])
        wanted_B = self.table.wanted_pages(slots_B, self.limits.steps_per_sync)
        grows_B = self.table.wanted_pages(slots_B, PAGE_TOKENS) > wanted_B
        for sample, wanted, grows in zip(samples, wanted_B.tolist(), grows_B.tolist(), strict=True):
            if not self._give(sample, wanted, spare):
                break
            spare += grows

    def _give(self, sample: RunningSample, wanted: int, spare: int) -> bool:
        """Gives a sample its first pages, if so many and `spare` more are free. Returns whether it did."""
        job, shared = sample.job, len(sample.job.request.prompt) // PAGE_TOKENS
        if self.pool.free < wanted - len(job.pages) + spare:
            return False
        if job.pages:
            self.pool.share(job.pages)
        else:
            job.pages = self.pool.take(shared)
        sample.pages = job.pages + self.pool.take(wanted - shared)
        self.table.place(sample.slot, sample.pages)
        self._pageless.discard(sample)
        return True

    def _make_room(self) -> None:
        """Gives each sample that is decoded the pages for the tokens of a round, the oldest first."""
        slots_B, steps = self.to_decode(), self.limits.steps_per_sync
        wanted_B = self.table.wanted_pages(slots_B, steps)
        short_B = wanted_B > self.table.pages_N[slots_B]
        growing = [(self.occupant[slot], int(n)) for slot, n in zip(slots_B[short_B], wanted_B[short_B], strict=True)]
        for sample, wanted in sorted(((s, n) for s, n in growing if s is not None), key=lambda pair: pair[0].age):
            while sample.pages and self.pool.free < wanted - len(sample.pages):
                holders = (holder for holder in self.occupant if holder is not None and holder.pages)
                self._preempt(max(holders, key=lambda holder: holder.age))
            if sample.pages:
                sample.pages += self.pool.take(wanted - len(sample.pages))
                self.table.place(sample.slot, sample.pages)

    def _preempt(self, sample: RunningSample) -> None:
        self._release(sample)
        sample.preemptions += 1
        self.preemptions += 1

    def _release(self, sample: RunningSample) -> None:
        """Takes a sample's pages away; those of its prompt are free when no other sample has them."""
        job = sample.job
        self.pool.release(sample.pages)
        sample.pages, sample.filled, sample.place = [], 0, None
        self.table.pages_N[sample.slot] = 0
        self.cached_N[sample.slot] = False
        self._pageless.add(sample)
        if job.pages and not self.pool.holders[job.pages[0]]:
            job.pages, job.filled = [], 0
            for other in job.samples:
                other.forget_context()

    def to_start(self) -> dict[Job, list[RunningSample]]:
        """Samples that the next turn starts, by job: a round if there are none."""
        return self._starting

    def _to_start(self) -> dict[Job, list[RunningSample]]:
        """Samples that hold pages and have nothing decoded in them, in the order of their slots, as many as fit one
        turn."""
        alone, spent = self._alone(), 0
        jobs: dict[Job, list[RunningSample]] = {}
        for slot in np.flatnonzero((self.table.pages_N > 0) & ~self.cached_N):
            sample = self.occupant[slot]
            if sample is None or alone not in (None, sample.job):
                continue
            tokens = self._to_compute(sample, first=sample.job not in jobs)
            if spent and spent + min(tokens, CHUNK_TOKENS) > PREFILL_TOKENS:
                self._more_to_start = True
                break
            spent += min(tokens, CHUNK_TOKENS)
            self._more_to_start |= tokens > CHUNK_TOKENS
            jobs.setdefault(sample.job, []).append(sample)
        return jobs

    def _to_compute(self, sample: RunningSample, first: bool) -> int:
        """Tokens that must be computed to start a sample; without those of the prompt unless it is the `first`."""
        if sample.place is not None:
            return 0
        prompt = len(sample.job.request.prompt)
        return prompt + self.response_tokens(sample) - max(sample.written, 0 if first else prompt)

    def to_decode(self) -> np.ndarray:
        """Slots with a sample in the cache, ascending."""
        slots_B = np.flatnonzero(self.cached_N)
        if (alone := self._alone()) is not None:
            slots_B = np.intersect1d(slots_B, [sample.slot for sample in alone.samples])
        return slots_B.astype(np.int32)

    def _alone(self) -> Job | None:
        """The first suspect that has pages: the next turn serves nobody else."""
        suspects = (job for job in self.jobs.values() if job.suspect)
        return next((job for job in suspects if any(sample.pages for sample in job.samples)), None)

    def at_turn(self) -> list[Job]:
        """The jobs that the next turn serves, or the one in flight: those to start if there are any."""
        return list(self._starting) or self.holders(self.to_decode())

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

    def response_tokens(self, sample: RunningSample) -> int:
        """How many tokens a sample has so far, its prefix included."""
        return len(sample.job.prefix(sample.index)) if sample.slot < 0 else int(self.table.produced_N[sample.slot])

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
            new = tuple(tokens[:count]), tuple(logprobs[:count]), (version,) * count
            chunk = TokenChunk(job.request.rid, index, *new, finish, sample.preemptions)
            deliveries.append((job, chunk))
            if finish is not None:
                self._end(sample)
        return deliveries

    def _end(self, sample: RunningSample) -> None:
        """Frees the slot, and forgets the job with its last sample."""
        self._free(sample)
        if not sample.job.open:
            del self.jobs[sample.job.request.rid]

    def _end_with(self, sample: RunningSample, finish: FinishReason) -> Delivery:
        """Ends a sample without new tokens; returns the chunk that says so."""
        self._end(sample)
        return sample.job, TokenChunk(sample.job.request.rid, sample.index, (), (), (), finish, sample.preemptions)

    def _free(self, sample: RunningSample) -> None:
        if sample.slot >= 0:
            self._release(sample)
            self._pageless.discard(sample)
            self.occupant[sample.slot] = None
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
        return [self._end_with(sample, FinishReason.ABORT) for sample in marked]

    def invalidate(self) -> None:
        """Forgets the cache, as after a change of weights: running samples are to be started again."""
        for sample in filter(None, self.occupant):
            self._release(sample)
        for sample in self.waiting:
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
