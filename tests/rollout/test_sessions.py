"""Conversations whose prefixes an engine keeps between turns. The rules, each tested under its number:

26. A turn of a conversation computes only the tokens behind the kept pages, and only their media. Tokens are those of
    one request with the whole history; log-probs are those of the trainer's forward pass.
27. Nothing else depends on kept pages: eviction, preemption, new weights, aborts, sleep and other devices change no
    token, and a request that an empty cache can serve is served.
28. Kept pages are never written. When all sessions have ended, all pages are free.
"""

import asyncio
import dataclasses
import itertools

import jax
import numpy as np
import pytest
import rollout_cases
from paged_device import LONGEST, STOP, PagedDevice, small_chunks
from rollout_cases import QWEN3_5, QWEN3_VL, TEXT, VL, build, engine, full_logprobs
from session_cases import Episode, ask, conversation, text
from shadow_cases import Elsewhere
from turns import by_turns

import models
from models.shadow import ShadowTensor
from rollout import turns
from rollout.engine import FinishReason
from rollout.sessions import common_tokens, identity_of, with_response, without_media

TOLERANCE = 1e-4
LONG = 192
MEDIA = [
    ("image", (1, 4, 8), 1),
    ("image", (1, 4, 4), 2),
    ("video", (2, 4, 4), 3),
    ("image", (1, 8, 4), 4),
]


@pytest.fixture(autouse=True)
def long_rows(monkeypatch):
    monkeypatch.setattr(rollout_cases, "LONGEST", LONG)


def observation(turn, number, vision):
    """The observation behind a turn. It differs between the samples of a group."""
    kind, grid, seed = MEDIA[turn % len(MEDIA)]
    shown = [(kind, grid, seed + 10 * number)] if vision else []
    return [text(3, 100 * turn + number), *shown, text(2 + turn, 50 * turn + number)]


def assert_trainers(model, prompt, answer):
    expected = full_logprobs(model, prompt, answer.ids, never=(36, 37, 38, 39))
    np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)


async def play(serving, model, group=3, session=True, between=None, shadow=lambda prompt: prompt, **how):
    """Plays conversations of four turns, each of a group. `between` is called after each turn, and may return another
    model. Returns the answers by turn and sample."""
    vision = model.config.vision is not None
    first = [text(19, 7), *([MEDIA[3]] if vision else []), text(4, 8)]
    episodes = [Episode("group", number, list(first), seed=3) for number in range(group)]
    answers = []
    for turn in range(4):
        if turn == 0:
            requests = [episodes[0].request("first", group, session, **how)]
        else:
            requests = [each.request(f"turn {turn}.{each.number}", 1, session, **how) for each in episodes]
        prompts = [each.prompt for each in requests]
        asked = [dataclasses.replace(each, prompt=shadow(each.prompt)) for each in requests]
        came = list(itertools.chain(*await asyncio.gather(*(ask(serving, each) for each in asked))))
        for number, answer in enumerate(came):
            assert_trainers(model, prompts[number % len(prompts)], answer)
            episodes[number].add(answer, *observation(turn, number, vision))
        answers.append([(answer.ids, answer.finish) for answer in came])
        if between is not None:
            model = await between(serving, turn, episodes) or model
    return answers


def whole(config, between=None, **how):
    """The answers of an engine that keeps nothing, and the tokens that it prefilled."""
    serving = engine(build(config), max_sequence_tokens=LONG)
    return asyncio.run(
        play(serving, build(config), session=False, between=between, **how)
    ), serving.stats().tokens_prefilled


def assert_idle(serving):
    scheduler = serving._scheduler
    asyncio.run(serving.end_session("group"))
    assert scheduler.pool.free == scheduler.pool.total and not scheduler.kept._prefixes
    assert scheduler.kept.states.free == scheduler.kept.states.total


DRAWN = {"temperature": 1.0, "stop_ids": (3, 5)}
KEEPING = {
    "text": (TEXT, {}),
    "media": (VL, {"ahead": True}),
    "deep features": (QWEN3_VL, {}),
    "chunks": (VL, {}),
    "states": (QWEN3_5, {"kept_states": 5}),
    "states in chunks": (QWEN3_5, {"kept_states": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_turns(KEEPING))
def test_26_a_turn_computes_what_is_new(name, monkeypatch):
    config, how = KEEPING[name]
    expected, all_tokens = whole(config, **DRAWN)
    if "chunks" in name:
        small_chunks(monkeypatch, 16)
        monkeypatch.setattr(turns, "PREFILL_PATCHES", 16)
    serving = engine(build(config), max_sequence_tokens=LONG, **how)
    assert asyncio.run(play(serving, build(config), **DRAWN)) == expected
    assert serving.stats().tokens_prefilled < 0.5 * all_tokens
    assert_idle(serving)


@pytest.mark.slow
@pytest.mark.parametrize("config", by_turns([VL, QWEN3_5]))
def test_26_a_context_that_is_rewritten_shares_the_prompt(config):
    """Each turn sees the first prompt and the newest observation. Two pages of the prompt are computed once."""

    async def rewritten(serving, turn, episodes):
        for each in episodes:
            each.parts = [*each.parts[:3], *each.parts[-3:], text(16, turn)]

    expected, all_tokens = whole(config, rewritten)
    serving = engine(build(config), max_sequence_tokens=LONG, kept_states=8)
    assert asyncio.run(play(serving, build(config), between=rewritten)) == expected
    assert serving.stats().tokens_prefilled <= all_tokens - 9 * 32
    assert_idle(serving)


async def new_weights(serving, turn, episodes):
    """Other weights after the second turn, and the first ones again after the third."""
    if turn in (1, 2):
        other = build(serving_config(serving), seed=2 - turn)
        await serving.update_weights(turn, models.split(other)[1])
        assert not serving._scheduler.kept._prefixes
        return other


async def sleep(serving, turn, episodes):
    await serving.sleep()
    await serving.wake()


async def move(serving, turn, episodes):
    await serving.set_parallelism(jax.devices("cpu")[: 1 + turn % 2])


async def abort(serving, turn, episodes):
    """A turn that is given up while it runs, and a context that is rewritten."""
    if turn == 3:
        return
    stream = serving.generate(episodes[0].request("given up", max_new_tokens=20, temperature=1.0))
    await anext(stream)
    await serving.abort("given up")
    await stream.aclose()
    cut = Episode("group", 0, [episodes[0].parts[0], *observation(3, 9, False)])
    await ask(serving, cut.request("rewritten"))


async def nothing(serving, turn, episodes): ...


def serving_config(serving):
    return serving._device.abstract.config


def shaken(serving):
    """Every third turn, the youngest sample loses its pages."""
    scheduler, plain, count = serving._scheduler, serving._scheduler.next_turn, itertools.count(1)

    def next_turn(unread=False):
        holders = [sample for sample in scheduler.occupant if sample is not None and sample.pages]
        if holders and not unread and next(count) % 3 == 0:
            scheduler._preempt(max(holders, key=lambda sample: sample.age))
        return plain(unread)

    scheduler.next_turn = next_turn


CHANGES = {
    "few pages": (VL, abort, {"kv_tokens": 128}),
    "few pages, ahead": (VL, nothing, {"kv_tokens": 128, "ahead": True}),
    "new weights": (VL, new_weights, {}),
    "sleep": (TEXT, sleep, {}),
    "devices": (VL, move, {}),
    "two devices": (VL, nothing, {"devices": jax.devices("cpu")[:2]}),
    "few states": (QWEN3_5, abort, {"kept_states": 2, "kv_tokens": 144}),
    "new weights, states": (QWEN3_5, new_weights, {"kept_states": 8, "ahead": True}),
    "states on two devices": (QWEN3_5, nothing, {"kept_states": 8, "devices": jax.devices("cpu")[:2]}),
    "preempted": (VL, abort, {}),
    "preempted, with states": (QWEN3_5, nothing, {"kept_states": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", by_turns(CHANGES))
def test_27_nothing_but_speed_depends_on_what_is_kept(name):
    config, between, how = CHANGES[name]
    expected, all_tokens = whole(config, between if between is new_weights else None)
    serving = engine(build(config), max_sequence_tokens=LONG, **how)
    if name.startswith("preempted"):
        shaken(serving)
    assert asyncio.run(play(serving, build(config), between=between)) == expected
    assert "few" not in name or serving.stats().tokens_prefilled > 0.4 * all_tokens, "nothing was evicted"
    assert serving.stats().preemptions or "preempted" not in name
    assert_idle(serving)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at once", "by groups", "one by one"])
def test_26_media_of_kept_pages_are_not_fetched_again(monkeypatch, how):
    there = Elsewhere()
    if how == "by groups":
        monkeypatch.setattr(turns, "PREFILL_PATCHES", 16)
        monkeypatch.setattr(turns, "CHUNK_TOKENS", 16)

    def shadow(prompt):
        """Each medium has a ticket: the sum of its pixels."""
        vision, tensors = prompt.vision, []
        for frame in range(1, 1 + int(vision.frame_segments_P.max())):
            patches_PX = vision.patches_PX[vision.frame_segments_P == frame]
            ticket = str(float(patches_PX.sum()))
            there._patches[ticket] = patches_PX
            tensors.append(ShadowTensor.of(ticket, patches_PX.shape, np.float32))
        return prompt.with_patches(np.concatenate(tensors))

    slots = 1 if how == "one by one" else 16  # then the pixels of samples that wait are fetched ahead
    serving = engine(build(VL), slots=slots, max_sequence_tokens=LONG, kv_tokens=16 * LONG, fetch=there.fetch)
    assert asyncio.run(play(serving, build(VL), shadow=shadow)) == whole(VL)[0]
    assert sorted(there.tickets) == sorted(set(there.tickets)), "a medium was fetched again"


def test_28_a_token_is_the_same_if_its_medium_is():
    parts = [text(5, 1), ("image", (1, 4, 4), 1), text(3, 2), ("video", (4, 4, 4), 2), text(4, 3)]
    prompt = conversation(parts)
    known = identity_of(prompt, 4)
    assert known.shape == (5, len(prompt)) and len(set(known[4][known[4] > 0])) == (16 + 64) // 4
    longer = conversation([*parts, ("image", (1, 8, 4), 5), text(2, 1)])
    assert common_tokens(known, identity_of(longer, 4)) == len(prompt)
    with_answer = conversation([*parts, ("text", (1, 2, 3)), text(2, 1)])
    answered = with_response(known, prompt, np.array([1, 2, 3, 4], np.int32))
    assert common_tokens(answered, identity_of(with_answer, 4)) == len(prompt) + 3
    for place, other, common in [(1, 9, 6), (3, 9, 15), (0, 9, 0)]:
        changed = list(parts)
        changed[place] = text(5, other) if place == 0 else (*parts[place][:2], other)
        assert common_tokens(known, identity_of(conversation(changed), 4)) <= common
        assert place == 0 or common_tokens(known, identity_of(conversation(changed), 4)) == common
    moved = dataclasses.replace(prompt, positions_3T=prompt.positions_3T + (np.arange(len(prompt)) > 8))
    assert common_tokens(known, identity_of(moved, 4)) == 9


def test_26_media_before_the_kept_pages_are_left_out():
    parts = [text(5, 1), ("image", (1, 4, 4), 1), text(3, 2), ("video", (4, 4, 4), 2), text(4, 3)]
    prompt = conversation(parts)
    for tokens in range(len(prompt) + 1):
        rest = without_media(prompt, tokens, 4)
        names = identity_of(rest, 4)[4]
        np.testing.assert_array_equal(names[tokens:], identity_of(prompt, 4)[4][tokens:])
        assert (rest.feature_index_T[:tokens] == -1).all()
        patches = 0 if rest.vision is None else rest.vision.num_patches
        assert patches == 16 * sum(end > tokens for end in (10, 19, 23, 27, 31)), "of the frames shown later"
    assert without_media(prompt, len(prompt), 4).vision is None


# --- the books, against a device that keeps token ids in its pages -----------------------------------


class History:
    """Conversations of several turns on a `PagedDevice`, with everything that can come in between."""

    def __init__(self, device, rng):
        self.device, self.rng = device, rng
        self.asked = {}  # by rid: the conversations that it answers
        self.prefixes = {}  # by rid: the tokens with which its responses begin
        self.ended, self.used = set(), 0  # requests whose answers were read; pages that a turn did not compute
        match = device.scheduler.kept.match

        def counted(*args):
            pages, state = match(*args)
            self.used += len(pages)
            return pages, state

        device.scheduler.kept.match = counted

    def parts(self, least, most):
        """Some text, perhaps with an image."""
        length = int(self.rng.integers(least, most))
        image = [("image", (1, 4, 4), int(self.rng.integers(0, 3)))] * int(self.rng.integers(0, 2))
        return [text(length, int(self.rng.integers(0, 2))), *image, text(2, 1)]

    def begin(self):
        session, n = f"s{len(self.asked)}", int(self.rng.integers(1, 4))
        parts = self.parts(1, 30)
        self.submit([Episode(session, number, list(parts)) for number in range(n)])

    def submit(self, episodes):
        if len(conversation(episodes[0].parts)) > LONGEST - 20:
            return
        rid = f"r{len(self.asked)}"
        how = {"max_new_tokens": int(self.rng.integers(1, 20)), "stop_ids": (STOP,)}
        self.asked[rid] = episodes
        request = episodes[0].request(rid, len(episodes), **how)
        if self.rng.integers(0, 4) == 0:  # tokens of this turn come from another engine
            request = dataclasses.replace(request, prefix_ids=tuple((1,) * number for number, _ in enumerate(episodes)))
        self.prefixes[rid] = request.prefix_ids or ((),) * len(episodes)
        self.device.submit(request)

    def resume(self):
        """Goes on with a conversation whose last turn has ended; sometimes with a context that was rewritten."""
        device, rng = self.device, self.rng
        for rid, episodes in self.asked.items():
            for sample, episode in enumerate(episodes):
                answer = device.answers[rid, sample]
                if answer.finish in (FinishReason.STOP, FinishReason.LENGTH) and (rid, sample) not in self.ended:
                    self.ended.add((rid, sample))
                    episode.parts.append(("text", self.prefixes[rid][sample]))
                    episode.add(answer, *self.parts(0, 9))
                    if rng.integers(0, 4) == 0:
                        episode.parts[int(rng.integers(0, len(episode.parts)))] = text(4, 5)
                    self.submit([episode])
                    return

    def play(self, steps):
        device, rng, scheduler = self.device, self.rng, self.device.scheduler
        for _ in range(steps):
            match int(rng.integers(0, 16)):
                case 0:
                    self.begin()
                case 1 | 2 | 3:
                    self.resume()
                case 4:
                    device.read(0)
                    sample = scheduler.occupant[int(rng.integers(0, len(scheduler.occupant)))]
                    if sample is not None and sample.pages:
                        scheduler._preempt(sample)
                case 5 if rng.integers(0, 3) == 0:
                    scheduler.mark_aborted(f"r{rng.integers(0, 1 + len(self.asked))}")
                    device.deliver(scheduler.reap())
                case 6 if rng.integers(0, 4) == 0:
                    device.read(0)
                    device.version += 1
                    scheduler.invalidate()
                    device.forget()
                case 7 if rng.integers(0, 4) == 0:
                    scheduler.end_session(f"s{rng.integers(0, 1 + len(self.asked))}")
                case 8 if rng.integers(0, 8) == 0:
                    device.poisoned.add(f"r{len(self.asked)}")
                case _:
                    device.turn(int(rng.integers(0, 10**6)), fails=bool(rng.integers(0, 12) == 0))
            device.check()

    def end(self):
        device, scheduler = self.device, self.device.scheduler
        for seed in range(2000):
            if not scheduler.jobs:
                break
            device.turn(seed)
        assert not scheduler.jobs, "a sample waits forever"
        for session in {episode.session for episodes in self.asked.values() for episode in episodes}:
            scheduler.end_session(session)
        device.check()
        assert scheduler.pool.free == scheduler.pool.total and not scheduler.kept._prefixes
        assert scheduler.kept.states.free == scheduler.kept.states.total


@pytest.mark.parametrize("ahead", [False, True])
def test_27_kept_pages_are_dropped_before_samples_are_preempted(ahead):
    device = PagedDevice(2, LONGEST + 16, ahead=ahead)
    device.least_id = STOP + 1
    scheduler = device.scheduler
    for rid, limit in (("first", 40), ("second", 70)):
        episode = Episode(rid, 0, [text(20, 1)])
        device.submit(episode.request(rid, max_new_tokens=limit))
        for seed in range(100):
            if scheduler.jobs:
                device.turn(seed)
        assert {key[0] for key in scheduler.kept._prefixes} == {rid}
    assert not scheduler.preemptions


@pytest.mark.medium
@pytest.mark.parametrize("seed", by_turns(range(3)))
@pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "states"])
def test_28_no_page_is_lost_and_no_kept_page_is_written(seed, recurrent):
    rng, used = np.random.default_rng(seed), 0
    for _ in range(40):
        with pytest.MonkeyPatch.context() as patch:
            small_chunks(patch, int(rng.choice([16, 32, 2048])))
            pages = int(rng.integers(0, 9))
            states = int(rng.integers(1, 7)) if recurrent else 0
            room = LONGEST + pages * 16 if pages < 8 else 0
            device = PagedDevice(int(rng.integers(1, 5)), room, recurrent, bool(rng.integers(0, 2)), states)
            history = History(device, rng)
            history.play(60)
            history.end()
            used += history.used
    assert used > 40, "the histories say nothing about kept pages"
