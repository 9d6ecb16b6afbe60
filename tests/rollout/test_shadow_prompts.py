"""Prompts whose pixels are elsewhere, and those whose features are computed by groups: the same as at once (24, 25).

24. An engine that fetches pixels computes what it computes of the pixels themselves. It asks for them when their prompt
    is next, keeps none, and a request whose pixels can't be had is lost alone.
25. Features of a prompt with many patches are computed by groups of frame pairs, in chunks of its tokens. No program
    ever gets more patches than a group, and the features are those of all frame pairs at once.
"""

import asyncio
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_device import small_chunks
from rollout_cases import (
    HANG,
    QWEN3_VL,
    TEXT,
    TOLERANCE,
    VL,
    assert_equal,
    assert_logprobs,
    build,
    collect,
    engine,
    media_prompt,
    request,
    run,
    serve,
)
from shadow_cases import Elsewhere
from turns import third_of

import models
from fluxjax.base.types import PreparedPrompt, Prompt, Reward
from fluxjax.run.parts import HeldOut
from models.processing import MediaError
from models.shadow import ShadowTensor
from rollout import lowered, prompt_pixels, turns
from rollout.engine import EngineError, SamplingParams
from rollout.jax_engine import JaxEngine
from rollout.lowered import EngineArrays
from rollout.prompt_pixels import FetchedPixels, PromptFeatures
from rollout.requests import EngineLimits
from sharding.walk import Walk

WORDS = (36, 37, 38, 39)  # never generated
PROMPTS = {
    "image": media_prompt(3, ("image", (1, 8, 8)), 9, seed=1),  # 64 patches
    "images": media_prompt(2, ("image", (1, 4, 8)), 5, ("image", (1, 4, 4)), 1, ("image", (1, 8, 4)), 4, seed=2),
    "video": media_prompt(1, ("video", (8, 4, 4)), 7, seed=3),  # pairs of 16 patches
    "both": media_prompt(18, ("image", (1, 4, 8)), ("video", (4, 4, 4)), 2, seed=4),
}


def asked(prompts, tokens: int = 5):
    how = {"max_new_tokens": tokens, "forbidden_ids": WORDS}
    return [request(name, prompt, n=1 + i % 3, seed=i, **how) for i, (name, prompt) in enumerate(prompts.items())]


def assert_idle(serving: JaxEngine) -> None:
    pool, held = serving._scheduler.pool, serving._device.pixels
    assert pool.free == pool.total and not serving._scheduler.jobs
    assert not held._held and not held._wanted


@functools.cache
def expected_of(config):
    """What an engine that has all pixels at once answers."""
    return run(engine(build(config)), *asked(PROMPTS))


@pytest.fixture
def expected():
    return expected_of(VL)


def largest(serving: JaxEngine) -> int:
    """The most patches that a program got."""
    sizes = {"prefill": 2, "continue": 3, "features": 0}
    of_pixels = {"prefill": 4, "continue": 5, "features": 2}
    return max(shape[sizes[name]] for name, shape in serving.compiled_shapes if len(shape) == of_pixels.get(name))


# --- pixels are elsewhere ------------------------------------------------------------------------


@pytest.mark.slow
def test_24_fetched_pixels_are_the_pixels(expected):
    there = Elsewhere()
    prompts = {name: there.shadow(prompt, name, parts=2) for name, prompt in PROMPTS.items()}
    serving = engine(build(VL), fetch=there.fetch)
    answers = run(serving, *asked(prompts))
    assert [[a.logprobs for a in group] for group in answers] == [[a.logprobs for a in group] for group in expected]
    assert sorted(set(there.tickets)) == sorted(f"{name}.{k}" for name in PROMPTS for k in range(2))
    assert len(there.tickets) == 2 * len(PROMPTS), "each once, for all samples of its prompt"
    assert_idle(serving)


@pytest.mark.slow
async def test_24_pixels_are_asked_for_when_their_prompt_is_next_and_again_after_new_weights():
    there = Elsewhere()
    prompt = there.shadow(PROMPTS["video"], "film")
    serving = engine(build(VL), fetch=there.fetch)
    await serving.pause()
    stream = serving.generate(request("r", prompt, max_new_tokens=20, forbidden_ids=WORDS))
    await asyncio.sleep(0.05)
    assert not there.calls, "it only waits"
    await serving.resume()
    await anext(stream)
    assert len(there.calls) == 1
    await serving.update_weights(1, models.split(build(VL, 1))[1])
    async for _ in stream:
        pass
    assert len(there.calls) == 2, "what was fetched is not kept"
    assert_idle(serving)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "error"),
    [
        (4096, MediaError("film.mp4", "has changed since it was preprocessed")),
        (32, OSError("no route to host")),
        (32, KeyError("x")),
    ],
    ids=["media, at once", "network, by groups", "bug, by groups"],
)
async def test_24_a_request_without_pixels_is_lost_alone(monkeypatch, expected, most, error):
    monkeypatch.setattr(turns, "PREFILL_PATCHES", most)

    def fails(rows):
        if any(each.ticket.startswith("bad") for each in rows) and max(each.stop for each in rows) > 40:
            raise error

    there = Elsewhere(fails)
    prompts = {name: there.shadow(prompt, name) for name, prompt in PROMPTS.items()}
    bad = there.shadow(PROMPTS["video"], "bad")
    requests = asked(prompts)
    requests.insert(2, request("bad", bad, n=2, max_new_tokens=9))
    serving = engine(build(VL), fetch=there.fetch)
    answers = await serve(serving, requests, lossy=True)
    lost = answers.pop(2)
    assert isinstance(lost, EngineError) and f"'bad' was lost: {type(error).__name__}: {error}" in str(lost)
    assert lost.__cause__ is error
    assert_equal(answers, expected)
    assert serving.stats().tokens_prefilled == sum(len(prompt) for prompt in (*prompts.values(), bad)) or most < 4096, (
        "nothing was computed again"
    )
    assert_idle(serving)
    assert_equal(await serve(serving, asked(prompts)), expected)


@pytest.mark.slow
async def test_24_pixels_that_are_not_finite_or_have_another_shape_lose_their_request():
    there = Elsewhere()
    odd, bright = (there.shadow(PROMPTS["image"], name) for name in ("odd", "bright"))
    there._patches["odd.0"][3, 3], there._patches["bright.0"][3, 3] = np.nan, np.inf
    short = there.shadow(PROMPTS["images"], "short")
    there._patches["short.0"] = there._patches["short.0"][:-4]
    serving = engine(build(VL), fetch=there.fetch)
    requests = [request(str(i), prompt, max_new_tokens=3) for i, prompt in enumerate((odd, bright, short))]
    first, second, third = await serve(serving, requests, lossy=True)
    assert "patches 0 to 64 of odd.0 have NaN or infinity" in str(first)
    assert "patches 0 to 64 of bright.0 have NaN or infinity" in str(second)
    assert "ShadowError: rows 0 to 80 of short.0 were fetched as float32[76, 96], but must be float32[80, 96]" in str(
        third
    )


@pytest.mark.medium
async def test_24_who_can_not_fetch_refuses():
    there = Elsewhere()
    prompt = there.shadow(PROMPTS["image"], "picture")
    with pytest.raises(EngineError, match=r"patches_PX is a shadow tensor .*made without `fetch`"):
        engine(build(VL)).generate(request("r", prompt, max_new_tokens=3))
    serving = engine(build(VL), fetch=there.fetch)
    for tensor, complaint in [
        (ShadowTensor.of("p", (64, 95), np.float32), r"must be float32 \(P, 96\)"),
        (ShadowTensor.of("p", (64, 96), np.uint8), "is a shadow tensor of uint8"),
        (ShadowTensor.of("p", (63, 96), np.float32), "has 63 patches"),
    ]:
        assert prompt.vision is not None
        other = dataclasses.replace(prompt.vision, patches_PX=tensor)
        with pytest.raises(EngineError, match=complaint):
            serving.generate(request("r", dataclasses.replace(prompt, vision=other), max_new_tokens=3))
    assert not there.calls


def test_24_what_is_next_is_fetched_ahead_and_no_more(monkeypatch):
    monkeypatch.setattr(prompt_pixels, "AHEAD_PATCHES", 10)
    begun = threading.Semaphore(0)
    there = Elsewhere(lambda rows: begun.release())
    data = {f"t{k}": np.full((4, 3), k, np.float32) for k in range(6)}
    there._patches = data
    tensors = [ShadowTensor.of(name, (4, 3), np.float32) for name in data]
    held = FetchedPixels(there.fetch)
    held.expect(tensors)
    begun.acquire()
    begun.acquire()
    assert sorted(there.tickets) == ["t0", "t1"], "eight of ten patches; another four would be more"
    for k, tensor in enumerate(tensors):
        assert (held.take(tensor) == k).all()
        assert len(held._held) <= 2
    assert sorted(there.tickets) == sorted(data), "each once"
    held.expect(tensors[:2])
    held.expect(tensors[4:])
    assert {rows[0].ticket for rows in held._held} == {"t4", "t5"}, "what is not next any more is dropped"
    held.close()
    held.close()
    assert not held._held


@pytest.mark.slow
def test_24_who_is_asked_blind_needs_no_pixels():
    """Held-out prompts without their pixels are the same whether these are here or elsewhere."""
    there = Elsewhere()

    def answers(prompt):
        texts = []

        async def score(_, text, rewards):
            texts.append(text)
            return Reward(0.0, False)

        prepared = PreparedPrompt(Prompt("p", "q", "a", "s"), prompt)
        sampling = SamplingParams(max_new_tokens=5, forbidden_ids=WORDS)
        held_out = HeldOut({"s": [prepared]}, score, lambda ids: " ".join(map(str, ids)), sampling)
        asyncio.run(asyncio.wait_for(held_out.accuracy(engine(build(VL)), blind=True), HANG))
        return texts

    assert answers(there.shadow(PROMPTS["image"], "m")) == answers(PROMPTS["image"])
    assert not there.calls


# --- features by groups --------------------------------------------------------------------------


@settings(max_examples=third_of(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["image", "video"]), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 200),
    st.data(),
)
def test_25_groups_are_whole_frame_pairs_and_every_feature_has_its_place(media, most, data):
    parts = []
    for kind, pairs, rows, columns in media:
        parts += [(kind, (1 if kind == "image" else pairs, 2 * rows, 2 * columns)), 1]
    prompt = media_prompt(*parts)
    kept = PromptFeatures.of(prompt, 4, most)
    vision, edges = prompt.vision, prompt.frame_edges
    assert [group.start for group in kept.groups] == [0, *(group.stop for group in kept.groups[:-1])]
    assert kept.groups[-1].stop == vision.num_patches
    for group in kept.groups:
        assert {group.start, group.stop} <= set(edges)
        pairs = edges.index(group.stop) - edges.index(group.start)
        assert group.stop - group.start <= most or pairs == 1
        assert group.stop - group.start <= group.padded <= max(most, group.stop - group.start)
    # rows of the features, by their patches
    rows = np.full(kept.size, -1)
    start = data.draw(st.integers(0, len(prompt) - 1))
    parts = [(0, start), (start, len(prompt))]
    if data.draw(st.booleans()):
        parts.reverse()
    computed = []
    for first, last in parts:
        index = prompt.feature_index_T[first:last]
        for number in kept.plan(index):
            computed.append(number)
            group = kept.groups[number]
            part = kept.input(number, kept.patches(number))
            assert part.num_patches == group.padded
            assert part.frame_bound >= np.bincount(part.frame_segments_P)[1:].max()
            features = np.full(group.padded // 4, -7)
            features[: (group.stop - group.start) // 4] = np.arange(group.start // 4, group.stop // 4)
            assert group.row + len(features) <= kept.size
            rows[group.row : group.row + len(features)] = features
        places = kept.places(index)
        np.testing.assert_array_equal(np.where(places >= 0, rows[places], -1), index)
    assert sorted(computed) == list(range(len(kept.groups))), "each is computed once"


@pytest.mark.slow
@pytest.mark.parametrize("most", [16, 60])
def test_25_the_features_of_groups_are_those_of_all_at_once(most):
    model = build(VL)
    graphdef, params = models.split(model)
    tower = jax.jit(lambda params, vision: models.merge(graphdef, params).features(Walk(), vision))
    for prompt in PROMPTS.values():
        whole = np.asarray(tower(params, jax.tree.map(jnp.asarray, prompt.vision)))
        kept = PromptFeatures.of(prompt, 4, most)
        for number, group in enumerate(kept.groups):
            part = tower(params, jax.tree.map(jnp.asarray, kept.input(number, kept.patches(number))))
            there = whole[group.start // 4 : group.stop // 4]
            np.testing.assert_allclose(np.asarray(part)[: len(there)], there, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "most", "chunk"), [(VL, 16, 16), (VL, 48, 2048), (VL, 2048, 16), (QWEN3_VL, 48, 16)]
)
def test_25_a_prompt_by_groups_is_the_prompt(monkeypatch, config, most, chunk):
    expected = expected_of(config)
    monkeypatch.setattr(turns, "PREFILL_PATCHES", most)
    small_chunks(monkeypatch, chunk)
    there = Elsewhere()
    prompts = {name: there.shadow(prompt, name, parts=2) for name, prompt in PROMPTS.items()}
    serving = engine(build(config), fetch=there.fetch)
    assert_equal(run(serving, *asked(prompts)), expected)
    assert max(there.calls) <= max(most, 64), "the picture of 64 patches is one frame pair"
    assert largest(serving) <= max(most, 64)
    if most < 64:
        names = {name for name, _ in serving.compiled_shapes}
        assert {"features", "keep"} <= names
        if chunk < 2048:  # text is cut, and so is the film
            rows = [shape[1] for name, shape in serving.compiled_shapes if name in ("prefill", "continue")]
            assert max(rows) <= chunk and "continue" in names
        # Each frame pair once; samples that start later compute the last page of their prompt again.
        total = sum(prompt.vision.num_patches for prompt in PROMPTS.values())
        assert total <= sum(there.calls) <= total + 2 * (32 + 16)
    assert_idle(serving)
    if most < chunk:
        assert_equal(run(engine(build(config)), *asked(PROMPTS)), expected)  # pixels that are here


@pytest.mark.slow
def test_25_the_programs_are_few(monkeypatch):
    """Films of any length share what the tower is compiled for."""
    monkeypatch.setattr(turns, "PREFILL_PATCHES", 64)
    serving = engine(build(VL))
    for pairs in (5, 6, 9, 12):
        run(serving, request("r", media_prompt(1, ("video", (pairs, 4, 4)), 2), max_new_tokens=2))
    assert len([name for name, _ in serving.compiled_shapes if name == "features"]) <= 2


@pytest.mark.long
def test_25_a_preempted_prompt_fetches_again(monkeypatch):
    prompts = {f"{name} {k}": prompt for k in range(2) for name, prompt in PROMPTS.items()}
    wanted = asked(prompts, tokens=16)
    right = run(engine(build(VL)), *wanted)
    monkeypatch.setattr(turns, "PREFILL_PATCHES", 32)
    small_chunks(monkeypatch, 16)
    there = Elsewhere()
    shadows = asked({name: there.shadow(prompt, name) for name, prompt in prompts.items()}, tokens=16)
    serving = engine(build(VL), kv_tokens=96, fetch=there.fetch)
    assert_equal(run(serving, *shadows), right)
    assert serving.stats().preemptions
    assert sum(there.calls) > sum(prompt.vision.num_patches for prompt in prompts.values())
    assert max(there.calls) <= 64
    assert_idle(serving)


@pytest.mark.slow
async def test_25_features_do_not_outlive_their_weights(monkeypatch):
    monkeypatch.setattr(turns, "PREFILL_PATCHES", 32)
    small_chunks(monkeypatch, 16)
    new = build(VL, 1)
    serving = engine(build(VL))
    stream = serving.generate(request("r", PROMPTS["video"], max_new_tokens=6, forbidden_ids=WORDS))
    while serving.stats().tokens_prefilled < 16:
        await asyncio.sleep(0)
    await serving.update_weights(1, models.split(new)[1])
    (answer,) = await collect(stream, 1)
    assert set(answer.versions) == {1}, "its first chunks were of other weights"
    assert_logprobs(new, PROMPTS["video"], answer, never=WORDS)


@pytest.mark.long
def test_25_over_several_devices(monkeypatch, expected):
    monkeypatch.setattr(turns, "PREFILL_PATCHES", 32)
    small_chunks(monkeypatch, 16)
    assert_equal(run(engine(build(VL), devices=jax.devices()[:2]), *asked(PROMPTS)[2:]), expected[2:])


@pytest.mark.slow
def test_25_the_preflight_counts_the_tower_by_groups(monkeypatch):
    for module in (turns, lowered):
        monkeypatch.setattr(module, "PREFILL_PATCHES", 32)
    devices = jax.devices()[:2]
    arrays = EngineArrays(models.abstract(VL), EngineLimits.of(VL, 16, 64, kv_tokens=1024), None, devices)
    programs = arrays.lowered(PROMPTS["video"])
    assert programs.keys() == {"prefill", "decode", "features"}
    values = VL.vision.patch_values
    assert f"tensor<32x{values}xf32>" in programs["features"].as_text(), "two frame pairs"
    assert f"x{values}xf32>" not in programs["prefill"].as_text(), "no pixels"
    assert all(program.compile() for program in programs.values())


def test_25_a_text_model_has_no_features():
    model = build(TEXT)
    with pytest.raises(ValueError, match="text model"):
        model.features(Walk(), PROMPTS["image"].vision)
    with pytest.raises(ValueError, match="nothing says which tokens they belong to"):
        model.embed(Walk(), jnp.zeros((1, 2), jnp.int32), None, None, jnp.zeros((3, 32), jnp.float32))
