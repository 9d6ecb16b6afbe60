"""The engine's bookkeeping of requests, samples, slots and pages: pure host code without device, clock or event loop.

Samples wait in the order of submission (or of seeds). They get the lowest free slots and then free pages in that order,
so that equal submissions give equal batches. All samples of a request share the full pages of its prompt. A sample with
empty pages (it is new, was preempted, or the weights changed) is *started* from prefilled rows.

A sample gets pages for the tokens that it has, not for tokens that may follow, since most responses end long before
their limit. If a round finds no free page, the youngest sample with pages is *preempted*: it loses its pages. It is
started again later with the tokens that it has. The oldest sample never loses pages to others, and every request alone
fits the pool, so that some sample always advances.

If a turn of a single request fails, the request is lost. If a turn of several requests fails, the requests become
*suspects*: each has turns for itself until it completes a round. So only requests that fail alone are lost.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .engine import EngineError, FinishReason, GenerateRequest, TokenChunk
from .in_flight import Flight, Job, RunningSample
from .requests import EngineLimits, checked, ended_before
from .sessions import KeptPages, identity_of, with_response, without_media
from .slots import PAGE_TOKENS, PagePool, SlotTable

if TYPE_CHECKING:
    from models.inputs import ModelInput

PREFILL_TOKENS = 4096  # the most tokens of a turn of starts, unless a prompt that can't be cut has more
LONGER = 4  # ratio of one length of rounds to the next shorter length
CHUNK_TOKENS = 2048  # the most tokens of one prompt or sample in one prefill; a multiple of a page

Delivery = tuple[Job, TokenChunk]


class Scheduler:
    """Keeps requests, samples, slots and pages. Methods that end or advance samples return the chunks to deliver."""

    def __init__(self, limits: EngineLimits) -> None:
        self.resize(limits)
        self.jobs: dict[str, Job] = {}
        self.occupant: list[RunningSample | None] = [None] * limits.slots
        self.cached_N = np.zeros(limits.slots, bool)  # whether the cache holds the slot's sample
        self.waiting: deque[RunningSample] = deque()
        self._pageless: set[RunningSample] = set()  # samples with a slot and no pages
        self.tokens_generated = self.preemptions = self._submitted = 0
        self.starting: dict[Job, list[RunningSample]] = {}  # starts of the next or present turn; empty: a round
        self.steps = limits.steps_per_sync  # the most tokens of a sample in the next or present round
        self._more_to_start = False  # more samples wait for a start than fit one turn

    def resize(self, limits: EngineLimits) -> None:
        """Sets the number of pages, while there are no requests."""
        self.limits = limits
        self.pool = PagePool(limits.pages)
        self.kept = KeptPages(self.pool, PagePool(limits.kept_states))
        self.table = SlotTable(limits.slots, limits.max_sequence_tokens, limits.pages, limits.kept_states)

    @property
    def running(self) -> int:
        return sum(sample is not None for sample in self.occupant)

    def submit(self, request: GenerateRequest, sink: Any = None) -> tuple[Job, list[Delivery]]:
        """Queues a request; returns it with final chunks of samples whose prefix already is a complete response. Raises
        EngineError for a request that can never be served, which then leaves no trace."""
        request = checked(request, self.limits)
        if request.rid in self.jobs:
            raise EngineError(f"request {request.rid!r}: a request of this id is already in flight")
        self._submitted += 1
        job = Job(request, request.prompt, sink, number=self._submitted, session=request.session)
        self.jobs[request.rid] = job
        if job.session and (self.limits.kept_states or not self.limits.recurrent):
            job.identity_5T = identity_of(request.prompt, self.limits.merge_unit)
        job.samples = [RunningSample(job, index) for index in range(request.n)]
        done: list[Delivery] = []
        for sample in job.samples:
            finish = ended_before(job.prefix(sample.index), request.sampling)
            if finish is None:
                self.waiting.append(sample)
            else:
                done.append(self._end_with(sample, finish))
        return job, done

    def by_seed(self) -> None:
        """Puts the requests of which no sample has a slot yet in the order of their seeds."""
        new = [job for job in self.jobs.values() if all(sample.slot < 0 for sample in job.samples)]
        numbers = sorted(job.number for job in new)
        for number, job in zip(numbers, sorted(new, key=lambda job: job.request.seed), strict=True):
            job.number = number
        self.waiting = deque(sorted(self.waiting, key=lambda sample: (sample.job.number, sample.index)))

    def next_turn(self, unread: bool = False) -> bool:
        """Gives free slots and pages to waiting samples, and decides whether the next turn is a start or a round. Makes
        room for a round. If more samples wait for a start than fit one turn, rounds come in between. While tokens of an
        earlier turn are `unread`, returns False if samples would be preempted, a suspect has turns for itself, or no
        sample is known to go on: the turn must then wait for these tokens."""
        if unread and any(job.suspect for job in self.jobs.values()):
            return False
        self._admit()
        due, self._more_to_start = self._more_to_start, False
        self.starting = {}
        if due and len(self.to_decode()) and not self._make_room(unread):
            self._more_to_start = True
            return False
        if due and len(self.to_decode()):
            return True
        self.starting = self._to_start()
        return bool(self.starting) or (self._make_room(unread) and (not unread or len(self.to_decode()) > 0))

    def dispatched(self, slots_B: np.ndarray, version: int, tokens: Any = None) -> Flight:
        """Notes that the device computes the decided turn, with tokens for these slots. Returns the turn's flight."""
        jobs, decodes, table = self.at_turn(), not self.starting, self.table
        left_B = (table.limit_N - table.tokens_N)[slots_B]
        table.unread_N[slots_B] += np.minimum(self.steps, left_B) if decodes else 1
        self.cached_N[slots_B] = True
        samples = {slot: sample for slot in slots_B.tolist() if (sample := self.occupant[slot]) is not None}
        return Flight(jobs, samples, decodes, version, tokens)

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
        # A spare page for each sample that can use one: otherwise a sample could soon lose its new pages.
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
        """Gives a sample its first `wanted` pages and returns True, if `spare` further pages are free."""
        job, shared = sample.job, len(sample.job.prompt) // PAGE_TOKENS
        begun, state = (job.pages, -1) if job.holders else self._kept_of(job)
        self.pool.share(begun)  # before room is made, so that these pages are not given away
        if not self.kept.fits(wanted - len(begun) + spare):
            self.pool.release(begun)
            return False
        if state >= 0:
            self.kept.states.share([state])
            job.state, job.state_tokens = state, len(begun) * PAGE_TOKENS
            sample.filled, sample.from_kept = job.state_tokens, True
        self.kept.make_room(wanted - len(begun))
        if not job.holders:
            job.pages, job.filled = begun + self.pool.take(shared - len(begun)), len(begun) * PAGE_TOKENS
            if begun:
                job.prompt = without_media(job.prompt, job.filled, self.limits.merge_unit)
        job.holders += 1
        sample.pages = job.pages + self.pool.take(wanted - shared)
        self.table.place(sample.slot, sample.pages)
        self._pageless.discard(sample)
        return True

    def _kept_of(self, job: Job) -> tuple[list[int], int]:
        """The kept pages with which the pages of a job can begin, and the kept state behind them (-1: none). A group
        does not go on from a state, since a sample that is preempted alone would need the media before the state."""
        if job.identity_5T is None or (self.limits.recurrent and job.request.n > 1):
            return [], -1
        return self.kept.match(job.request.session, job.request.numbers, job.identity_5T)

    def keeps_state(self, job: Job) -> bool:
        """Says whether a state behind the prompt of a job is to be kept."""
        return self.limits.recurrent and job.identity_5T is not None

    def new_state(self, job: Job, tokens: int) -> list[int]:
        """Takes a kept state for the state behind the first tokens of a job, in place of the job's earlier kept state.
        Returns the number of its row in the cache, or nothing if all kept states belong to other jobs."""
        self._release_state(job)
        job.state = self.kept.take_state()
        if job.state < 0:
            return []
        job.state_tokens = tokens
        return [self.limits.slots + job.state]

    def _release_state(self, job: Job) -> None:
        if job.state >= 0:
            self.kept.states.release([job.state])
        job.state, job.state_tokens = -1, 0

    def state_row(self, sample: RunningSample) -> int:
        """The row of the cache's states from which the next prefill of a sample goes on."""
        return self.limits.slots + sample.job.state if sample.from_kept else sample.slot

    def prompt_to_compute(self, job: Job) -> ModelInput:
        """A job's prompt without the media that are shown only in kept pages."""
        begun, _ = ([], -1) if job.holders else self._kept_of(job)
        return without_media(job.prompt, len(begun) * PAGE_TOKENS, self.limits.merge_unit) if begun else job.prompt

    def _round_steps(self, slots_B: np.ndarray) -> int:
        """The most tokens of a sample in the next round: more than `steps_per_sync` only if no sample waits."""
        table, steps, limits = self.table, self.limits.steps_per_sync, self.limits
        if not len(slots_B) or self.waiting or len(slots_B) < self.running:
            return steps
        most = min(limits.longest_round, int((table.limit_N - table.tokens_N)[slots_B].min()))

        def fits(steps: int) -> bool:
            return self.kept.fits(int(table.missing_pages(slots_B, steps).sum()))

        if not limits.ahead:  # a CPU would also compute the rows of samples that a stop id has ended
            known = limits.small_model and not (table.stop_ids_NI[slots_B] >= 0).any()
            return max(most, steps) if known and fits(most) else steps
        while steps * LONGER <= most and fits(steps * LONGER):
            steps *= LONGER
        return steps

    def _make_room(self, unread: bool) -> bool:
        """Gives each sample in the cache the pages for the tokens of a round, the oldest first. Kept pages are dropped
        before samples are preempted. Returns False, without giving pages, if samples would be preempted while tokens
        are `unread`."""
        slots_B = self.to_decode()
        self.steps = steps = self._round_steps(slots_B)
        wanted_B, missing_B = self.table.wanted_pages(slots_B, steps), self.table.missing_pages(slots_B, steps)
        if unread and not self.kept.fits(int(missing_B.sum())):
            return False
        short_B = missing_B > 0
        growing = [(self.occupant[slot], int(n)) for slot, n in zip(slots_B[short_B], wanted_B[short_B], strict=True)]
        for sample, wanted in sorted(((s, n) for s, n in growing if s is not None), key=lambda pair: pair[0].age):
            while sample.pages and not self.kept.make_room(wanted - len(sample.pages)):
                holders = (holder for holder in self.occupant if holder is not None and holder.pages)
                self._preempt(max(holders, key=lambda holder: holder.age))
            if sample.pages:
                sample.pages += self.pool.take(wanted - len(sample.pages))
                self.table.place(sample.slot, sample.pages)
        return True

    def _preempt(self, sample: RunningSample) -> None:
        self._release(sample)
        sample.preemptions += 1
        self.preemptions += 1

    def _release(self, sample: RunningSample) -> None:
        """Takes a sample's pages away; pages of its prompt are freed with their last holder."""
        job = sample.job
        job.holders -= bool(sample.pages)
        self.pool.release(sample.pages)
        sample.pages, sample.filled, sample.place, sample.from_kept = [], 0, None, False
        self.table.pages_N[sample.slot] = 0
        self.cached_N[sample.slot] = False
        self._pageless.add(sample)
        if not job.holders:
            self._release_state(job)
        if job.pages and not job.holders:
            job.pages, job.filled, job.features, job.prompt = [], 0, None, job.request.prompt
            for sibling in job.samples:  # drops prefills that have read pages of the prompt
                if sibling.place is not None and sibling.place[1].skip:
                    sibling.place = None

    def upcoming(self) -> Iterator[Job]:
        """Yields the jobs that wait for a start after the planned turn, in about the order of their starts. These
        include the jobs whose images and videos are not finished by the planned turn."""
        slots = np.flatnonzero((self.table.pages_N > 0) & ~self.cached_N).tolist()
        held = (sample for sample in map(self.occupant.__getitem__, slots) if sample is not None)
        pageless = sorted(self._pageless, key=lambda sample: sample.age)
        seen = {job for job in self.starting if job.features is None}
        for sample in itertools.chain(held, pageless, self.waiting):
            if sample.place is None and sample.job not in seen:
                seen.add(sample.job)
                yield sample.job

    def _to_start(self) -> dict[Job, list[RunningSample]]:
        """The samples, by job, that hold pages and are not in the cache: in slot order, as many as fit one turn."""
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
        """The tokens to compute before a sample starts. Tokens of the prompt count for the `first` sample only."""
        if sample.place is not None:
            return 0
        prompt = len(sample.job.prompt)
        return prompt + self.response_tokens(sample) - max(self.computed(sample), 0 if first else prompt)

    def computed(self, sample: RunningSample) -> int:
        """The number of tokens, from a sample's first on, that its prefill can leave out. If layers have states, pages
        that siblings wrote do not count, since a prefill goes on from the slot's own state only."""
        return sample.filled if self.limits.recurrent else sample.written

    def unstarted(self, job: Job) -> list[RunningSample]:
        """The samples of a job that are in no cache and in no prefilled batch."""
        samples = (sample for sample in job.samples if not sample.ended and sample.place is None)
        return [sample for sample in samples if sample.slot < 0 or not self.cached_N[sample.slot]]

    def to_decode(self) -> np.ndarray:
        """The slots whose samples are in the cache and not known to end with unread tokens, ascending."""
        slots_B = np.flatnonzero(self.cached_N & (self.table.tokens_N < self.table.limit_N))
        if (alone := self._alone()) is not None:
            slots_B = np.intersect1d(slots_B, [sample.slot for sample in alone.samples])
        return slots_B.astype(np.int32)

    def _alone(self) -> Job | None:
        """The first suspect that has pages: the next turn serves only this job."""
        suspects = (job for job in self.jobs.values() if job.suspect)
        return next((job for job in suspects if any(sample.pages for sample in job.samples)), None)

    def at_turn(self) -> list[Job]:
        """The jobs of the decided turn: the starting jobs, or else the jobs of the round."""
        return list(self.starting) or self.holders(self.to_decode())

    def holders(self, slots_B: np.ndarray) -> list[Job]:
        """The jobs whose samples run in these slots."""
        samples = (self.occupant[slot] for slot in slots_B.tolist())
        return list(dict.fromkeys(sample.job for sample in samples if sample is not None))

    def blame(self, jobs: list[Job]) -> list[Job]:
        """Notes that a turn of these jobs failed: a single job is lost and returned, several jobs become suspects. The
        cache can't be trusted afterwards, so all running samples must be started again."""
        self.invalidate()
        left = [job for job in jobs if job.open]
        if len(jobs) == 1:
            return self.drop(left)
        for job in left:
            job.suspect = True
        return []

    def response_tokens(self, sample: RunningSample) -> int:
        """The number of read tokens that a sample has, its prefix included."""
        return len(sample.job.prefix(sample.index)) if sample.slot < 0 else int(self.table.produced_N[sample.slot])

    def response(self, sample: RunningSample) -> np.ndarray:
        """The read tokens that a sample has, its prefix included."""
        if sample.slot < 0:
            return np.asarray(sample.job.prefix(sample.index), np.int32)
        return self.table.response_NT[sample.slot, : self.table.produced_N[sample.slot]].copy()

    def holds(self, flight: Flight, slots_B: np.ndarray) -> np.ndarray:
        """Says for each slot whether the turn's sample still has it, since a sample that has ended gets no tokens."""
        return np.array([self.occupant[slot] is flight.samples[slot] for slot in slots_B.tolist()], bool)

    def record(
        self, flight: Flight, slots_B: np.ndarray, tokens_BR: np.ndarray, logprobs_BR: np.ndarray, count_B: np.ndarray
    ) -> list[Delivery]:
        """Adds the first `count_B` new tokens of a dispatched turn to each slot, and ends samples that are complete or
        aborted. Each slot must still have the turn's sample (`holds`)."""
        most = count_B.max(initial=0)  # a round may have been shorter than its arrays
        tokens_BR, logprobs_BR = tokens_BR[:, :most], logprobs_BR[:, :most]
        stop_B, full_B = self.table.extend(slots_B, tokens_BR, count_B)
        self.table.unread_N[slots_B] -= count_B  # samples that end here get fewer than expected
        self.tokens_generated += int(count_B.sum())
        deliveries: list[Delivery] = []
        arrays = (slots_B, tokens_BR, logprobs_BR, count_B, stop_B, full_B)
        for slot, tokens, logprobs, count, stop, full in zip(*(array.tolist() for array in arrays), strict=True):
            sample = self.occupant[slot]
            assert sample is not None and sample is flight.samples[slot], "the tokens are another sample's"
            finish = FinishReason.STOP if stop else FinishReason.LENGTH if full else None
            if finish is None and sample.aborted:
                finish = FinishReason.ABORT
            job, index = sample.job, sample.index
            job.suspect = job.suspect and not flight.decodes
            new = tuple(tokens[:count]), tuple(logprobs[:count]), (flight.version,) * count
            chunk = TokenChunk(job.request.rid, index, *new, finish, sample.preemptions)
            deliveries.append((job, chunk))
            if finish is not None:
                if finish is not FinishReason.ABORT:
                    self._keep(sample)
                self._end(sample)
                job.end_surplus()
        return deliveries

    def _keep(self, sample: RunningSample) -> None:
        """Keeps the pages of a sample that ends. The keys and values of the last token are not computed."""
        job = sample.job
        if not job.session or job.identity_5T is None:
            return
        identity_5T = with_response(job.identity_5T, job.prompt, self.response(sample)[:-1])
        if self.limits.recurrent:
            identity_5T = identity_5T[:, : job.state_tokens]
        self.kept.keep(job.session, job.request.numbers[sample.index], sample.pages, identity_5T, job.state)

    def end_session(self, session: str) -> None:
        """Drops what is kept of a session (empty: of all). Samples of the session that still run keep nothing."""
        self.kept.end(session)
        for job in self.jobs.values():
            job.session = "" if job.session == session else job.session

    def _end(self, sample: RunningSample) -> None:
        self._free(sample)
        if not sample.job.open:
            del self.jobs[sample.job.request.rid]

    def _end_with(self, sample: RunningSample, finish: FinishReason) -> Delivery:
        self._end(sample)
        return sample.job, TokenChunk(sample.job.request.rid, sample.index, (), (), (), finish, sample.preemptions)

    def _free(self, sample: RunningSample) -> None:
        if sample.slot >= 0:
            self._release(sample)
            self._pageless.discard(sample)
            self.occupant[sample.slot] = None
            sample.slot = -1
        sample.ended, sample.place = True, None

    def mark_aborted(self, id: str) -> bool:
        """Marks a request (`rid`) or one sample (`rid/i`) as aborted, for `reap` to end; ignores unknown ids. Returns
        whether a sample is to end."""
        rid, _, index = id.rpartition("/")
        samples = self.jobs[id].samples if id in self.jobs else []
        if not samples and rid in self.jobs and index.isdecimal():
            samples = self.jobs[rid].samples[int(index) :][:1]
        for sample in samples:
            sample.aborted = True
        return any(not sample.ended for sample in samples)

    def reap(self) -> list[Delivery]:
        """Ends all marked samples, running or waiting. Unread tokens of these samples are dropped."""
        marked = [s for job in self.jobs.values() for s in job.samples if s.aborted and not s.ended]
        if any(sample.slot < 0 for sample in marked):
            self.waiting = deque(sample for sample in self.waiting if not sample.aborted)
        return [self._end_with(sample, FinishReason.ABORT) for sample in marked]

    def invalidate(self) -> None:
        """Forgets the cache, as after a change of weights, and unread tokens, so that running samples must be started
        again."""
        self.table.unread_N[:] = 0
        self.kept.end("")
        for sample in filter(None, self.occupant):
            self._release(sample)
        for sample in self.waiting:
            sample.place = None

    def clear(self) -> list[Job]:
        """Drops all jobs and kept pages; returns the jobs."""
        self.kept.end("")
        return self.drop(list(self.jobs.values()))

    def drop(self, jobs: list[Job]) -> list[Job]:
        """Removes jobs, without chunks; returns them."""
        for job in jobs:
            del self.jobs[job.request.rid]
            for sample in job.samples:
                self._free(sample)
        self.waiting = deque(sample for sample in self.waiting if not sample.ended)
        return jobs
