"""The engine's bookkeeping against a scripted device that answers with arbitrary tokens."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import VOCAB, text_prompt

from rollout.engine import FinishReason, GenerateRequest, SamplingParams
from rollout.requests import EngineLimits
from rollout.scheduler import Scheduler
from rollout.slots import SlotTable

STOP = 0
SOME_IDS = 6  # the device draws from so many, to stop often

requests = st.tuples(st.integers(1, 5), st.integers(1, 9), st.lists(st.integers(0, 6), min_size=5, max_size=5))
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), requests),
        st.tuples(st.just("turn"), st.integers(0, 10**6)),
        st.tuples(st.just("abort"), st.tuples(st.integers(0, 5), st.integers(-1, 4))),
        st.tuples(st.just("weights"), st.just(None)),
        st.tuples(st.just("poison"), st.integers(0, 5)),
        st.tuples(st.just("failure"), st.integers(0, 10**6)),
    ),
    max_size=40,
)


class Device:
    """Plays the engine's turns; knows for each slot which tokens its cache would hold."""

    def __init__(self, slots, steps):
        self.scheduler, self.steps, self.version = Scheduler(EngineLimits(slots, 64, VOCAB)), steps, 0
        self.cache = {}
        self.answers = {}
        self.poisoned, self.lost = set(), set()

    def deliver(self, deliveries):
        for job, chunk in deliveries:
            answer = self.answers[job.request.rid, chunk.sample]
            assert answer["finish"] is None, "a chunk after the last one"
            answer["ids"] += chunk.token_ids
            answer["versions"] += chunk.versions
            answer["finish"] = chunk.finish

    def turn(self, seed, fails=False):
        """A turn that serves a poisoned request fails; any other that serves several does where it is told to."""
        scheduler = self.scheduler
        scheduler.next_turn()
        assert not scheduler.waiting or scheduler.running == len(scheduler.occupant), "a free slot while samples wait"
        jobs = scheduler.at_turn()
        if self.poisoned & {job.request.rid for job in jobs} or (fails and len(jobs) > 1):
            self.cache = {}
            for job in scheduler.blame(jobs):
                assert job.request.rid in self.poisoned, "lost for another's failure"
                self.lost |= {(job.request.rid, sample.index) for sample in job.samples}
            assert not len(scheduler.to_decode())
            return
        starts = [sample for samples in scheduler.to_start().values() for sample in samples]
        rng = np.random.default_rng(seed)
        if starts:
            slots = np.array([sample.slot for sample in starts], np.int32)
            counts, steps = np.ones(len(slots), np.int32), 1
            for sample in starts:
                self.cache[sample.slot] = [*scheduler.response(sample)]
        else:
            slots, steps = scheduler.to_decode(), self.steps
            counts = np.full(len(slots), steps, np.int32)
        if not len(slots):
            return
        tokens = rng.integers(0, SOME_IDS, (len(slots), steps)).astype(np.int32)
        batch = scheduler.table.round(slots, len(slots) + 2, self.steps, 4) if not starts else None
        for row, slot in enumerate(slots):
            sample = scheduler.occupant[slot]
            known = [*scheduler.response(sample)]
            if batch is not None:  # the cache holds all but the last token, which is the round's input
                assert self.cache[slot] == known[:-1] and batch.token_B[row] == known[-1]
                assert batch.index_B[row] == len(known) and batch.length_B[row] == 3 + len(known) - 1
                assert batch.position_B[row] == 3 + len(known) - 1
            left = sample.job.request.sampling.max_new_tokens - len(known)
            counts[row] = min(counts[row], left)
            stops = np.flatnonzero(tokens[row, : counts[row]] == STOP)
            if len(stops):
                counts[row] = stops[0] + 1
            self.cache[slot] = [*known, *tokens[row, : counts[row]].tolist()][:-1]
        self.deliver(scheduler.record(slots, tokens, np.zeros(tokens.shape, np.float32), counts, self.version))
        self.deliver(scheduler.reap())

    def check(self):
        scheduler = self.scheduler
        holders = [sample for sample in scheduler.occupant if sample is not None]
        assert len({id(sample) for sample in holders}) == len(holders) == scheduler.running
        assert all(scheduler.occupant[sample.slot] is sample and not sample.ended for sample in holders)
        assert all(sample.slot < 0 and not sample.ended for sample in scheduler.waiting)
        open_ones = {key for key, answer in self.answers.items() if answer["finish"] is None}
        unfinished = len(open_ones - self.lost)
        assert unfinished == len(holders) + len(scheduler.waiting)
        assert set(scheduler.jobs) == {rid for rid, _ in open_ones - self.lost}


@settings(deadline=None)
@given(actions, st.integers(1, 5), st.integers(1, 4))
def test_every_sample_ends_once_with_its_own_tokens(script, slots, steps):
    device = Device(slots, steps)
    scheduler = device.scheduler
    asked, aborted = {}, set()
    for action, value in script:
        if action == "submit":
            n, limit, lengths = value
            rid = f"r{len(asked)}"
            prefix = tuple((1,) * length for length in lengths[:n])
            asked[rid] = (limit, prefix)
            sampling = SamplingParams(max_new_tokens=limit, stop_ids=(STOP,))
            for sample in range(n):
                device.answers[rid, sample] = {"ids": (), "versions": (), "finish": None}
            _, done = scheduler.submit(GenerateRequest(rid, text_prompt(3), sampling, n, 0, prefix))
            device.deliver(done)
        elif action == "turn":
            device.turn(value)
        elif action == "failure":
            device.turn(value, fails=True)
        elif action == "poison":
            device.poisoned.add(f"r{value}")
        elif action == "abort":
            rid, sample = f"r{value[0]}", value[1]
            aborted |= {key for key in device.answers if key[0] == rid and sample in (-1, key[1])}
            scheduler.mark_aborted(rid if sample < 0 else f"{rid}/{sample}")
            device.deliver(scheduler.reap())
        else:
            device.version += 1
            scheduler.invalidate()
        device.check()
    for seed in range(1000):
        if not scheduler.jobs:
            break
        device.turn(seed, fails=seed % 3 == 0)
        device.check()
    assert (scheduler.running, len(scheduler.waiting), scheduler.jobs) == (0, 0, {})
    for (rid, sample), answer in device.answers.items():
        limit, prefix = asked[rid]
        ids, total = answer["ids"], len(prefix[sample]) + len(answer["ids"])
        assert len(answer["versions"]) == len(ids) and list(answer["versions"]) == sorted(answer["versions"])
        if answer["finish"] is FinishReason.STOP:
            assert ids.index(STOP) == len(ids) - 1
        elif answer["finish"] is FinishReason.LENGTH:
            assert STOP not in ids and total == max(limit, len(prefix[sample]))
        elif answer["finish"] is FinishReason.ABORT:
            assert (rid, sample) in aborted
            assert STOP not in ids and total < limit
        else:
            assert (rid, sample) in device.lost
    assert scheduler.tokens_generated == sum(len(answer["ids"]) for answer in device.answers.values())


def test_first_come_first_served_in_the_lowest_slots():
    scheduler = Scheduler(EngineLimits(3, 64, VOCAB))
    for rid in ("a", "b", "c"):
        scheduler.submit(GenerateRequest(rid, text_prompt(3), SamplingParams(max_new_tokens=4), n=2))
    scheduler.next_turn()
    assert [(s.job.request.rid, s.index) for s in scheduler.occupant] == [("a", 0), ("a", 1), ("b", 0)]
    scheduler.mark_aborted("a/0")
    scheduler.reap()
    scheduler.next_turn()
    assert [(s.job.request.rid, s.index) for s in scheduler.occupant] == [("b", 1), ("a", 1), ("b", 0)]
    assert [(s.job.request.rid, s.index) for s in scheduler.waiting] == [("c", 0), ("c", 1)]


def test_tables_of_ids_grow_only_for_longer_lists():
    """Copied for each sample, they took half of the time that the host spends on a rollout of short answers."""
    table = SlotTable(4, 64, 4)
    before = table.stop_ids_NI

    def assign(slot, stop_ids):
        sampling = SamplingParams(max_new_tokens=4, stop_ids=stop_ids)
        table.assign(GenerateRequest(str(slot), text_prompt(3), sampling), [0], [slot], [()])

    assign(1, (5, 6))
    assign(1, (7,))
    assert table.stop_ids_NI is before and before[1, :3].tolist() == [7, -1, -1]
    wide = tuple(range(9))
    assign(2, wide)
    assert table.stop_ids_NI.shape == (4, 16) and table.stop_ids_NI[2, :9].tolist() == list(wide)
    assert table.stop_ids_NI[1, :3].tolist() == [7, -1, -1]
