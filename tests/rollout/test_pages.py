"""The engine's bookkeeping, and the plans that read and write pages, against a device that keeps token ids in its pages
and answers with arbitrary tokens.

22. A page belongs to those whose tokens are in it: the full pages of a prompt to all its samples, others to one. What a
    round reads, and what a prefill takes for its context, are exactly the tokens that stand before.
23. A pool that has no room for all serves all, one after the other, and is empty in the end: nothing waits forever, and
    no page is lost, whatever is aborted, lost or computed again.

24. If layers have states, the state with which a row or a round begins is that behind exactly the tokens that stand
    before, and a state is written to each slot that goes on from it.

Whatever happens, every sample ends once, with its own tokens, and only a request that fails alone is lost.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_device import LONGEST, STOP, PagedDevice, small_chunks
from rollout_cases import LONGEST as ROW
from rollout_cases import VL, VOCAB, media_prompt, text_prompt
from turns import by_turns, third_of

from rollout import turns
from rollout.engine import EngineError, FinishReason, GenerateRequest, SamplingParams
from rollout.requests import EngineLimits
from rollout.scheduler import Scheduler
from rollout.slots import PAGE_TOKENS, PagePool, SlotTable, doubling, geometric, pages_for
from rollout.turns import Place, Prefix, plan

IMAGE = media_prompt(3, ("image", (1, 4, 8)), 25, seed=1)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_a_page_is_free_when_nobody_holds_it(script):
    pool, held = PagePool(12), []
    for action, number in script:
        if action == "take":
            if number > pool.free:
                with pytest.raises(ValueError, match=f"{number} pages are needed"):
                    pool.take(number)
            else:
                held.append(pool.take(number))
        elif held:
            pages = held[number % len(held)]
            if action == "share":
                pool.share(pages)
                held.append(list(pages))
            else:
                held.remove(pages)
                pool.release(pages)
        used = {page for pages in held for page in pages}
        assert pool.free == 12 - len(used)
        assert pool.holders == [sum(page in pages for pages in held) for page in range(12)]
    for pages in held:
        pool.release(pages)
    assert pool.free == 12 and sorted(pool.take(12)) == list(range(12))


lengths = st.lists(st.integers(0, 30), min_size=4, max_size=4)
asked = st.tuples(st.integers(1, 60), st.integers(1, 4), st.integers(1, 36), lengths, st.booleans())
script = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), asked),
        st.tuples(st.just("turn"), st.integers(0, 10**6)),
        st.tuples(st.just("abort"), st.tuples(st.integers(0, 5), st.integers(-1, 3))),
        st.tuples(st.just("weights"), st.just(None)),
        st.tuples(st.just("failure"), st.integers(0, 10**6)),
        st.tuples(st.just("poison"), st.integers(0, 5)),
    ),
    max_size=40,
)


@pytest.mark.medium
@settings(deadline=None, max_examples=third_of(200))
@given(script, st.integers(1, 5), st.integers(0, 12), st.sampled_from([16, 32, 2048]), st.booleans(), st.booleans())
def test_22_and_23_pages_hold_what_is_read_and_every_sample_ends_once_with_its_own_tokens(
    history, slots, more, chunk, recurrent, ahead
):
    play(history, slots, more, chunk, recurrent, ahead=ahead)


@pytest.mark.medium
@pytest.mark.parametrize("seed", by_turns(range(3)))
def test_24_states_go_on_from_the_tokens_before_them(seed):
    """Groups with long prompts and begun responses, of which some samples wait, are preempted or computed again."""
    rng = np.random.default_rng(seed)
    for _ in range(60):
        history = []
        for _ in range(rng.integers(1, 4)):
            length = int(rng.choice([int(rng.integers(33, 61)), 48, 16 * int(rng.integers(1, 4))]))
            prefixes = (rng.integers(0, 2, 4) * rng.integers(0, 31, 4)).tolist()
            history.append(("submit", (length, int(rng.integers(2, 5)), 36, prefixes, bool(rng.integers(0, 5) == 0))))
            for turn in rng.integers(0, 10**6, rng.integers(1, 20)).tolist():
                history += [("turn", turn)] + [("preempt", turn // 4)] * (turn % 4 == 0)
                history += [("abort", (turn // 8 % 3, turn % 4))] * (turn % 8 == 1)
            history += [("weights", None)] * int(rng.integers(0, 2))
        chunk, least_id = int(rng.choice([16, 32, 2048])), int(rng.integers(STOP, STOP + 2))  # responses may never stop
        ahead = bool(rng.integers(0, 2))
        play(history, int(rng.integers(2, 6)), int(rng.integers(0, 13)), chunk, True, least_id, ahead)


def test_24_samples_with_tokens_share_the_prefill_of_their_prompt(monkeypatch):
    """Up to its last page boundary, here in two chunks."""
    small_chunks(monkeypatch, 32)
    device = PagedDevice(4, recurrent=True)
    prefixes = tuple((1,) * 18 for _ in range(3))
    device.submit(GenerateRequest("r", text_prompt(60), SamplingParams(max_new_tokens=30), 3, 0, prefixes))
    tokens, scheduler = 0, device.scheduler
    while len(scheduler.to_decode()) < 3:
        scheduler.next_turn()
        if scheduler.starting:  # else a round, whose tokens do not matter here
            steps = turns.plan_starts(scheduler)
            tokens += sum(step.batch.tokens for step in steps if step.batch.outputs is None)
            slots_B = device.start(steps)
            new_B1 = np.ones((len(slots_B), 1), np.int32)
            flight = scheduler.dispatched(slots_B, 0)
            scheduler.record(flight, slots_B, new_B1, np.zeros(new_B1.shape, np.float32), new_B1[:, 0])
    assert tokens == 48 + 3 * (12 + 18)


def play(history, slots, more, chunk, recurrent, least_id=STOP, ahead=False):
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk)
        device = PagedDevice(slots, LONGEST + more * PAGE_TOKENS if more < 12 else 0, recurrent, ahead)
        device.least_id = least_id
        scheduler = device.scheduler
        asked, aborted = {}, set()
        for action, value in history:
            if action == "submit":
                length, n, limit, prefixes, picture = value
                prompt, rid = IMAGE if picture else text_prompt(length, seed=length), f"r{len(asked)}"
                asked[rid] = limit, prefixes
                prefix = tuple((1,) * count for count in prefixes[:n])
                sampling = SamplingParams(max_new_tokens=limit, stop_ids=(STOP,))
                device.submit(GenerateRequest(rid, prompt, sampling, n, 0, prefix))
            elif action in ("turn", "failure"):
                device.turn(value, fails=action == "failure")
            elif action == "preempt":
                device.read(0)
                sample = scheduler.occupant[value % slots]
                if sample is not None and sample.pages:
                    scheduler._preempt(sample)
            elif action == "poison":
                device.poisoned.add(f"r{value}")
            elif action == "abort":
                rid, sample = f"r{value[0]}", value[1]
                aborted |= {key for key in device.answers if key[0] == rid and sample in (-1, key[1])}
                scheduler.mark_aborted(rid if sample < 0 else f"{rid}/{sample}")
                device.deliver(scheduler.reap())
            else:
                device.read(0)
                device.version += 1
                scheduler.invalidate()
                device.forget()
            device.check()
        for seed in range(2000):
            if not scheduler.jobs:
                break
            device.turn(seed, fails=seed % 3 == 0)
        assert (scheduler.running, len(scheduler.waiting), scheduler.jobs) == (0, 0, {})
        assert scheduler.pool.free == scheduler.pool.total
        assert scheduler.tokens_generated == sum(len(answer.ids) for answer in device.answers.values())
    for (rid, sample), answer in device.answers.items():
        limit, prefixes = asked[rid]
        total = prefixes[sample] + len(answer.ids)
        assert list(answer.versions) == sorted(answer.versions)
        if answer.finish is FinishReason.STOP:
            assert answer.ids.index(STOP) == len(answer.ids) - 1
        elif answer.finish is FinishReason.LENGTH:
            assert STOP not in answer.ids and total == max(limit, prefixes[sample])
        elif answer.finish is FinishReason.ABORT:
            assert (rid, sample) in aborted and STOP not in answer.ids and total < limit
        else:
            assert (rid, sample) in device.lost


def test_22_a_group_has_the_full_pages_of_its_prompt_once():
    device = PagedDevice(8, 4096)
    device.submit(GenerateRequest("r", text_prompt(40), SamplingParams(max_new_tokens=30), n=8))
    device.turn(1)
    pool = device.scheduler.pool
    assert pool.total - pool.free == 2 + 8  # 32 tokens in two pages of all, 8 of the prompt in a page of each
    assert sorted(count for count in pool.holders if count) == [1] * 8 + [8] * 2
    device.scheduler.mark_aborted("r/3")
    device.scheduler.reap()
    assert pool.total - pool.free == 2 + 7


def test_23_the_youngest_makes_room_and_the_oldest_never_waits():
    device = PagedDevice(3, LONGEST + PAGE_TOKENS)
    for number in range(3):
        device.submit(GenerateRequest(f"r{number}", text_prompt(20), SamplingParams(max_new_tokens=70)))
    scheduler, progress = device.scheduler, []
    while scheduler.jobs:
        device.turn(10 * len(progress) + 1)
        progress.append(list(scheduler.jobs))
        if "r0" in scheduler.jobs:
            assert scheduler.jobs["r0"].samples[0].pages, "the oldest lost its pages"
    assert scheduler.preemptions > 0


def test_23_a_request_that_no_empty_pool_could_serve_is_refused():
    scheduler = Scheduler(EngineLimits(4, LONGEST, VOCAB, kv_tokens=64))
    asked = GenerateRequest("r", text_prompt(60), SamplingParams(max_new_tokens=5))
    with pytest.raises(EngineError, match=r"60 prompt tokens .* 5 pages of 16 .* has 4: raise rollout\.kv_tokens"):
        scheduler.submit(asked)
    scheduler.submit(GenerateRequest("r", text_prompt(60), SamplingParams(max_new_tokens=4)))
    assert pages_for(64) == 4


def test_rounds_come_between_the_chunks_of_a_long_prompt(monkeypatch):
    small_chunks(monkeypatch, 16)
    device = PagedDevice(4, 4096)
    device.submit(GenerateRequest("short", text_prompt(5), SamplingParams(max_new_tokens=60)))
    device.turn(1)
    device.submit(GenerateRequest("long", text_prompt(80), SamplingParams(max_new_tokens=5)))
    kinds = []
    for seed in range(8):
        device.turn(seed + 3)
        kinds.append("start" if device.scheduler.starting else "round")
    assert kinds == ["start", "round"] * 4


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


# --- packing prompts and begun responses into batches: nothing lost, nothing seen that should not be ---

IMAGES = (("image", (1, 4, 4)), ("image", (1, 4, 8)), ("video", (2, 4, 4)))


# kind of prompt, its length if text, its seed, and the lengths of the samples' responses so far
described = st.tuples(
    st.integers(0, len(IMAGES)),
    st.integers(1, 30),
    st.integers(0, 9),
    st.lists(st.integers(0, ROW - 30), min_size=1, max_size=6),
)


def prefix_of(kind, length, seed, lengths):
    prompt = text_prompt(length, seed) if kind == len(IMAGES) else media_prompt(2, IMAGES[kind], 3, seed=seed)
    return Prefix(prompt, tuple(np.arange(n, dtype=np.int32) + 7 * i for i, n in enumerate(lengths)))


def entries(place: Place) -> np.ndarray:
    """The index in the row of each of the sample's cache entries."""
    response = np.arange(place.response_start, place.response_start + place.response_tokens)
    return np.concatenate([np.arange(place.prompt_tokens), response])


@settings(deadline=None)
@given(st.lists(described, max_size=7), st.integers(1, 1024), st.integers(1, 200))
def test_every_sample_finds_its_own_entries(descriptions, batch_tokens, batch_patches):
    items = [prefix_of(*each) for each in descriptions]
    batches = list(plan(items, EngineLimits.of(VL, 1, ROW), batch_tokens, batch_patches))
    assert [i for members, _ in batches for i in members] == list(range(len(items)))
    for members, batch in batches:
        inputs = batch.inputs
        used = np.zeros(inputs.tokens_BT.shape, bool)
        patches = 0
        for i, places in zip(members, batch.places, strict=True):
            prefix, prompt = items[i], items[i].prompt
            P = len(prompt)
            assert len(places) == len(prefix.responses)
            for place, response in zip(places, prefix.responses, strict=True):
                at = entries(place)
                row = place.row
                used[row, at] = True
                assert inputs.tokens_BT[row, at].tolist() == [*prompt.token_ids_T, *response]
                rotary = np.concatenate(
                    [prompt.positions_3T, np.tile(prompt.next_position + np.arange(len(response)), (3, 1))], axis=1
                )
                np.testing.assert_array_equal(inputs.positions_3BT[:, row, at], rotary)
                # what the last token attends to is exactly its own sequence
                last = at[-1]
                seen = (inputs.segments_BT[row] == inputs.segments_BT[row, last]) & (
                    np.arange(inputs.segments_BT.shape[1]) <= last
                )
                seen &= (inputs.branches_BT[row] == 0) | (inputs.branches_BT[row] == inputs.branches_BT[row, last])
                assert np.flatnonzero(seen).tolist() == at.tolist()
                # features: those of its own prompt, and text has none
                index = inputs.feature_index_BT[row, at]
                expected = np.where(prompt.feature_index_T >= 0, prompt.feature_index_T + patches // 4, -1)
                assert index[:P].tolist() == expected.tolist() and (index[P:] == -1).all()
            if prompt.vision is not None:
                span = slice(patches, patches + prompt.vision.num_patches)
                np.testing.assert_array_equal(inputs.vision.patches_PX[span], prompt.vision.patches_PX)
                patches = span.stop
        assert (inputs.segments_BT != 0).sum() == used.sum() == batch.tokens
        assert inputs.tokens_BT.shape[1] <= ROW
        if len(members) > 1:
            assert inputs.tokens_BT.size <= batch_tokens and patches <= batch_patches
        assert (inputs.vision is None) == (patches == 0)
        if patches:
            assert inputs.vision.num_patches >= patches
            assert (inputs.vision.frame_segments_P[patches:] == 0).all()


def test_a_prompt_stands_once_in_a_row_of_many_samples():
    prompt = text_prompt(10)
    responses = tuple(np.zeros(length, np.int32) for length in (0, 5, 0, 7))
    ((_, batch),) = plan([Prefix(prompt, responses)], EngineLimits.of(VL, 1, 64), batch_tokens=64, batch_patches=1)
    assert batch.tokens == 10 + 12
    long = (np.zeros(40, np.int32),) * 3
    ((_, batch),) = plan([Prefix(prompt, long)], EngineLimits.of(VL, 1, 64), batch_tokens=64, batch_patches=1)
    assert batch.tokens == 3 * (10 + 40) and [place.row for place in batch.places[0]] == [0, 1, 2]


@given(st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 10**6))
def test_buckets_hold_their_size_and_are_few(size, least, most):
    for bucket, waste in ((doubling(size, least), 2), (geometric(size, least), 1.5)):
        assert size <= bucket <= max(least, waste * size + 1)
    if size <= most:
        assert size <= doubling(size, least, most) <= most


def test_buckets_by_hand():
    assert sorted({geometric(size, 16) for size in range(1, 129)}) == [16, 24, 32, 48, 64, 96, 128]
    assert [doubling(size, 32, 200) for size in (1, 33, 150, 200)] == [32, 64, 200, 200]
