"""A device that keeps token ids in its pages and states, on which tests play the engine's plans (`test_pages.py`)."""

import numpy as np
import pytest
from rollout_cases import IMAGE, VIDEO, VL, VOCAB, Answer

from rollout import scheduler as scheduling
from rollout import turns
from rollout.engine import GenerateRequest
from rollout.requests import EngineLimits
from rollout.scheduler import Flight, Scheduler
from rollout.slots import PAGE_TOKENS

STOP, SOME_IDS = 0, 9
LONGEST = 96
STEPS = 3


def small_chunks(patch: pytest.MonkeyPatch, tokens: int) -> None:
    for module in (scheduling, turns):
        patch.setattr(module, "CHUNK_TOKENS", tokens)
        patch.setattr(module, "PREFILL_TOKENS", 2 * tokens)


class PagedDevice:
    """Plays the engine's turns on pages of token ids; checks what they read, and the books between turns. `ahead`: the
    tokens of a turn are read after the next turn."""

    def __init__(
        self, slots: int, kv_tokens: int = 0, recurrent: bool = False, ahead: bool = False, kept_states: int = 0
    ) -> None:
        kinds = {"recurrent": recurrent, "kept_states": kept_states}
        self.limits = EngineLimits(
            slots, LONGEST, VOCAB, VL.vision, STEPS, 5 * STEPS, ahead, kv_tokens=kv_tokens, **kinds
        )
        self.unread: list[tuple[Flight, np.ndarray, np.ndarray, np.ndarray]] = []
        self.lengths: set[int] = set()  # of rounds
        self.states: dict[int, list[int]] = {}  # by row of the states, the tokens that the state has read
        self.least_id = STOP  # of new tokens
        self.scheduler, self.version = Scheduler(self.limits), 0
        self.cache = np.full((self.limits.pages, PAGE_TOKENS), -1)
        self.answers: dict[tuple[str, int], Answer] = {}
        self.poisoned: set[str] = set()
        self.lost: set[tuple[str, int]] = set()

    def submit(self, request: GenerateRequest) -> None:
        self.answers |= {(request.rid, sample): Answer() for sample in range(request.n)}
        self.deliver(self.scheduler.submit(request)[1])

    def deliver(self, deliveries) -> None:
        for job, chunk in deliveries:
            self.answers[job.request.rid, chunk.sample].add(chunk)

    def turn(self, seed: int, fails: bool = False) -> None:
        """A turn that serves a poisoned request fails; any other that serves several does where it is told to."""
        scheduler, rng = self.scheduler, np.random.default_rng(seed)
        if not scheduler.next_turn(unread=bool(self.unread)):
            self.read(0)
            return
        self.check()
        if not self.limits.kv_tokens:
            assert not scheduler.waiting or scheduler.running == self.limits.slots, "a free slot while samples wait"
        jobs = scheduler.at_turn()
        if self.poisoned & {job.request.rid for job in jobs} or (fails and len(jobs) > 1):
            self.read(0)
            self.forget()
            for job in scheduler.blame(jobs):
                assert job.request.rid in self.poisoned, "lost for another's failure"
                self.lost |= {(job.request.rid, sample.index) for sample in job.samples}
            assert not len(scheduler.to_decode())
            return
        if not scheduler.jobs:
            return
        if scheduler.starting:
            slots_B = self.start(turns.plan_starts(scheduler))
            count_B, steps = np.ones(len(slots_B), np.int32), 1
            tokens_BR = rng.integers(self.least_id, SOME_IDS, (len(slots_B), 1)).astype(np.int32)
        else:
            slots_B, batch = turns.plan_round(scheduler)
            assert len(slots_B), "a turn that serves nobody"
            steps = scheduler.steps
            self.lengths.add(steps)
            tokens_BR = rng.integers(self.least_id, SOME_IDS, (len(slots_B), steps)).astype(np.int32)
            count_B = np.minimum(steps, batch.remaining_B[: len(slots_B)])
            for row, slot in enumerate(slots_B):
                number = batch.length_B[row] + np.arange(steps)
                pages = np.append(batch.pages_BC[row], self.limits.pages)  # no page behind the last
                page = pages[np.minimum(number // PAGE_TOKENS, len(pages) - 1)]
                entries = page * PAGE_TOKENS + number % PAGE_TOKENS
                inside = entries < self.cache.size
                sample = scheduler.occupant[slot]
                stop_ids = sample.job.request.sampling.stop_ids
                if np.isin(self.unread_tokens(sample), stop_ids).any():
                    assert self.limits.ahead
                    count_B[row], self.cache.ravel()[entries[inside]] = 0, -1
                    continue
                stops = np.flatnonzero(np.isin(tokens_BR[row, : count_B[row]], stop_ids))
                count_B[row] = stops[0] + 1 if len(stops) else count_B[row]
                known = self.tokens(scheduler.occupant[slot])
                assert batch.length_B[row] == len(known) - 1
                response = len(known) - len(scheduler.occupant[slot].job.request.prompt)
                assert batch.index_B[row] == response
                after = scheduler.occupant[slot].job.request.prompt.next_position
                assert batch.position_B[row] == after + response - 1
                read = self.cache[np.minimum(batch.pages_BC[row], self.limits.pages - 1)].ravel()
                np.testing.assert_array_equal(read[: len(known) - 1], known[:-1])
                fresh = [known[-1], *tokens_BR[row, :-1]]
                assert inside[: count_B[row]].all(), "a token without a page"
                self.cache.ravel()[entries[inside]] = np.array(fresh)[inside]
                if self.limits.recurrent:
                    assert self.states[slot] == known[:-1]
                    self.states[slot] = [*known[:-1], *map(int, fresh)]
            assert batch.slot_B[: len(slots_B)].tolist() == slots_B.tolist()
            assert (batch.slot_B[len(slots_B) :] == self.limits.slots + self.limits.kept_states).all()
            assert (batch.pages_BC[len(slots_B) :] >= self.limits.pages).all()
        self.unread.append((scheduler.dispatched(slots_B, self.version), slots_B, tokens_BR, count_B))
        self.read(int(self.limits.ahead))

    def read(self, most: int) -> None:
        """Reads the tokens of the oldest turns, until those of `most` turns are unread."""
        while len(self.unread) > most:
            flight, *arrays = self.unread.pop(0)
            held_B = self.scheduler.holds(flight, arrays[0])
            assert held_B.all() or self.limits.ahead
            slots_B, tokens_BR, count_B = (x[held_B] for x in arrays)
            logprobs_BR = np.zeros(tokens_BR.shape, np.float32)
            self.deliver(self.scheduler.record(flight, slots_B, tokens_BR, logprobs_BR, count_B))
            self.deliver(self.scheduler.reap())
            self.check()

    def unread_tokens(self, sample) -> list[int]:
        return [
            token
            for flight, slots_B, tokens_BR, count_B in self.unread
            for slot, tokens, count in zip(slots_B.tolist(), tokens_BR.tolist(), count_B.tolist(), strict=True)
            if flight.samples[slot] is sample
            for token in tokens[:count]
        ]

    def forget(self) -> None:
        self.cache[:], self.states = -1, {}
        self.unread.clear()

    def ends(self, batch) -> list[list[int]]:
        """The tokens that the state behind each row has read."""
        inputs, context = batch.inputs, batch.context
        rows = [inputs.tokens_BT[row, real].tolist() for row, real in enumerate(inputs.segments_BT != 0)]
        if inputs.runs is None:
            assert context is None or context.slot_B is None
            return rows
        assert (inputs.runs.columns_BNC >= 0).sum((1, 2)).tolist() == list(map(len, rows))
        for row, length in enumerate([] if context is None else context.length_B):
            before = self.states[context.slot_B[row]] if length else []
            assert before == self.cache[context.pages_BC[row]].ravel()[:length].tolist()
            rows[row] = before + rows[row]
        return rows

    def start(self, plan) -> np.ndarray:
        started = []
        for step in plan:
            inputs, context = step.batch.inputs, step.batch.context
            assert (inputs.segments_BT != 0).sum(axis=1).max() <= max(turns.CHUNK_TOKENS, LONGEST)
            if context is not None and step.batch.outputs is None:
                for row, length in enumerate(context.length_B):
                    before = self.cache[context.pages_BC[row]].ravel()[:length]
                    assert (before >= 0).all(), "a context that nobody wrote"
            shown_BT = np.isin(inputs.tokens_BT, (IMAGE, VIDEO))
            np.testing.assert_array_equal(inputs.feature_index_BT >= 0, shown_BT, "media are shown by their tokens")
            step.batch.outputs = ends = step.batch.outputs or self.ends(step.batch)
            states = step.writes.states
            assert self.limits.recurrent == (inputs.runs is not None) == (states is not None)
            if states is not None:
                slot_B, row_B = states
                real_B = slot_B < self.limits.slots + self.limits.kept_states
                assert len(set(slot_B[real_B].tolist())) == real_B.sum(), "a state is written twice"
                written = zip(slot_B[real_B].tolist(), row_B[real_B].tolist(), strict=True)
                self.states |= {slot: ends[row] for slot, row in written}
            page_W, row_W, column_WS = step.writes.page_W, step.writes.row_W, step.writes.column_WS
            real = page_W < self.limits.pages
            assert len(set(page_W[real].tolist())) == real.sum(), "a page is written twice"
            self.cache[page_W[real]] = inputs.tokens_BT[row_W[real][:, None], column_WS[real]]
            for row, slot in enumerate(step.slots_B):
                known = self.tokens(self.scheduler.occupant[slot])
                assert inputs.tokens_BT[step.starts.row_B[row], step.starts.last_B[row]] == known[-1]
                pages = self.scheduler.occupant[slot].pages
                np.testing.assert_array_equal(self.cache[pages].ravel()[: len(known)], known)
                assert not self.limits.recurrent or self.states[slot] == known
            started.append(step.slots_B)
        return np.concatenate([np.zeros(0, np.int32), *started])

    def tokens(self, sample) -> list[int]:
        read = [*sample.job.request.prompt.token_ids_T, *self.scheduler.response(sample)]
        return read + self.unread_tokens(sample)

    def check(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        holders = np.zeros(pool.total, int)
        for slot, sample in enumerate(scheduler.occupant):
            if sample is None:
                continue
            holders[sample.pages] += 1
            assert scheduler.table.page_NC[slot, : len(sample.pages)].tolist() == sample.pages
            assert sample.pages[: len(sample.job.pages)] == sample.job.pages or not sample.pages
            own = sample.pages[len(sample.job.pages) :]
            assert all(pool.holders[page] == 1 for page in own), "a page of one sample that another has, too"
            assert not scheduler.cached_N[slot] or len(sample.pages) * PAGE_TOKENS >= len(self.tokens(sample)) - 1
        states = np.zeros(self.limits.kept_states, int)
        for job in scheduler.jobs.values():
            assert job.holders == sum(bool(sample.pages) for sample in job.samples)
            states[job.state :][: job.state >= 0] += 1
        for prefix in scheduler.kept._prefixes.values():
            holders[prefix.pages] += 1
            states[prefix.state_held] += 1
            tokens = prefix.identity_5T[0].tolist()
            assert self.cache[prefix.pages].ravel().tolist() == tokens, "somebody wrote a kept page"
            assert not prefix.state_held or self.states[self.limits.slots + prefix.state] == tokens
        assert states.tolist() == scheduler.kept.states.holders
        assert holders.tolist() == pool.holders
        assert pool.free == (holders == 0).sum()
        running = [sample for sample in scheduler.occupant if sample is not None]
        assert len({id(sample) for sample in running}) == len(running) == scheduler.running
        assert all(scheduler.occupant[sample.slot] is sample and not sample.ended for sample in running)
        assert all(sample.slot < 0 and not sample.ended for sample in scheduler.waiting)
        unfinished = {key for key, answer in self.answers.items() if answer.finish is None} - self.lost
        assert len(unfinished) == len(running) + len(scheduler.waiting)
        assert set(scheduler.jobs) == {rid for rid, _ in unfinished}
