"""A layer-streamed model answers what the resident one does, and never has more layers on the device than it says.

In the end: which layers stay on the device, and when the others travel.
"""

import asyncio
import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import (
    QWEN3_5,
    QWEN3_VL,
    TEXT,
    VL,
    VOCAB,
    build,
    engine,
    full_logits,
    full_logprobs,
    prompt_of,
    request,
    text_prompt,
)
from streamed_program import CONFIG as SEVEN
from turns import third_of

import models
from models.config import DecoderConfig
from models.folder import CheckpointError
from rollout.engine import EngineError
from rollout.streamed import (
    PARTS,
    DeviceSpeed,
    StreamedModel,
    finish,
    layer_weights,
    pass_bytes,
    resident_layers,
    streamed_places,
    travel,
)
from rollout.streamed_judge import StreamedJudge, in_loop

LAYERS = 5
DEEP = DecoderConfig("qwen2", dataclasses.replace(TEXT.text, num_layers=LAYERS))
TOLERANCE = 1e-5  # absolute, float32 log-probs, against the forward pass over the whole stack
STATE = 1e-4  # of models with states: sums through a state have another order, token by token


@functools.cache
def deep():
    return build(DEEP)


@functools.cache
def streamed(resident):
    return StreamedModel(deep(), resident=resident)


def expected_score(model, prompt, answer):
    """By the model as training computes it."""
    return full_logprobs(model, prompt_of(prompt), answer).sum()


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


ANSWERS = ((3,), (7, 5, 1), (9, 2))


@pytest.mark.slow
@pytest.mark.parametrize("resident", [0, 2, LAYERS])
def test_scores_are_those_of_the_resident_model(resident):
    prompts = prompts_of((9, 1, 14))
    scores = finish(streamed(resident).score(prompts, ANSWERS))
    for prompt, found in zip(prompts, scores, strict=True):
        assert found == pytest.approx([expected_score(deep(), prompt, answer) for answer in ANSWERS], abs=TOLERANCE)
    assert scores == finish(streamed(LAYERS).score(prompts, ANSWERS))  # bit for bit


@pytest.mark.slow
@settings(max_examples=third_of(6), deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, LAYERS), st.integers(0, 5))
def test_any_lengths_and_residents_give_the_same_bits(lengths, resident, seed):
    prompts = prompts_of(lengths, seed)
    same = [finish(streamed(count).score(prompts, ANSWERS)) for count in (resident, LAYERS)]
    assert same[0] == same[1] and len(same[0]) == len(lengths)


@pytest.mark.medium
@pytest.mark.parametrize("resident", [0, 2])
def test_it_generates_the_likeliest_tokens(resident):
    prompts = prompts_of((5, 11, 3), seed=1)
    texts = finish(streamed(resident).generate(prompts, 4))
    for prompt, text in zip(prompts, texts, strict=True):
        assert list(text) == full_logits(deep(), prompt_of(prompt), text).argmax(-1).tolist() and len(text) == 4
    stop = texts[0][1]
    stopped = finish(streamed(resident).generate(prompts[:1], 4, (stop,)))
    assert stopped == [texts[0][: texts[0].index(stop) + 1]]


@pytest.mark.slow
def test_small_batches_change_nothing():
    prompts = prompts_of((20, 3))
    alone = StreamedModel(deep(), resident=1, batch_tokens=1)
    for one, together in zip(
        finish(alone.score(prompts, ANSWERS)), finish(streamed(1).score(prompts, ANSWERS)), strict=True
    ):
        assert one == pytest.approx(together, abs=TOLERANCE)
    assert finish(alone.generate(prompts, 2)) == finish(streamed(1).generate(prompts, 2))
    assert finish(alone.score([], ANSWERS)) == [] == finish(alone.generate([], 3))


def on_device(model):
    """Bytes of the layers' weights in device memory, wherever anything holds them."""
    (shapes,) = model._programs.kinds.values()
    sizes = {part.shape for part in model._host[0]} | set(shapes.values())
    arrays = [x for x in jax.live_arrays() if x.sharding.device_set == {model.device}]
    return sum(x.nbytes for x in arrays if x.shape in sizes and x.sharding.memory_kind == "device")


@pytest.mark.medium
@pytest.mark.parametrize("resident", [0, 3])
def test_no_more_than_two_layers_beside_the_resident_ones_are_on_the_device(resident):
    # A device of its own, so that nothing else is counted.
    model = StreamedModel(deep(), resident=resident, device=jax.local_devices()[-1])
    outside = on_device(model)
    work = model.generate(prompts_of((9, 4)), 3)
    most, layers = 0, 0
    for _ in work:
        most, layers = max(most, on_device(model) - outside), layers + 1
    assert layers == 3 * LAYERS
    assert resident * model.layer_bytes * 0.9 < most <= (resident + 2) * model.layer_bytes
    assert len(model.resident) == resident
    model.release()
    assert on_device(model) == outside


def test_a_pass_that_is_given_up_leaves_the_model_usable():
    model = StreamedModel(deep(), resident=2)
    prompts = prompts_of((9,))
    whole = finish(model.score(prompts, ANSWERS))
    for stop in range(1, LAYERS):
        work = model.score(prompts, ANSWERS)
        list(itertools.islice(work, stop))
        work.close()
        assert finish(model.score(prompts, ANSWERS)) == whole


@pytest.mark.medium
def test_longer_batches_leave_fewer_layers_on_the_device(monkeypatch):
    pace = DeviceSpeed(flops=1e10, memory_bytes=1e12, link_bytes=4e8)
    model = StreamedModel(deep(), pace=pace)
    counts = []
    for length in (4, 40, 400):
        finish(model.score(prompts_of((length,)), ANSWERS))
        counts.append(len(model.resident))
    assert counts == sorted(counts, reverse=True) and counts[0] == LAYERS and counts[-1] == 0
    room = 4 * model.layer_bytes + pass_bytes(model.text, 1, 16, 0, 4)
    tight = StreamedModel(deep(), pace=pace)
    monkeypatch.setattr(tight, "_free", lambda: room)
    finish(tight.score(prompts_of((4,)), ANSWERS))
    assert len(tight.resident) == 2
    with pytest.raises(EngineError, match="needs room for 2 layers"):
        finish(tight.score(prompts_of((4000,)), ANSWERS))


@pytest.mark.slow
def test_a_checkpoint_folder_and_another_dtype(tmp_path):
    models.save(deep(), tmp_path, dtype="bfloat16")
    prompts = prompts_of((9, 30))
    loaded = StreamedModel.load(tmp_path, resident=1)
    assert loaded.dtype == "bfloat16"
    assert finish(loaded.score(prompts, ANSWERS)) == finish(StreamedModel.load(tmp_path).score(prompts, ANSWERS))
    wide = finish(StreamedModel.load(tmp_path, resident=1, compute_dtype="float32").score(prompts, ANSWERS))
    model = models.load(tmp_path, dtype="float32")
    assert wide[1] == pytest.approx([expected_score(model, prompts[1], answer) for answer in ANSWERS], abs=TOLERANCE)


@pytest.mark.medium
@pytest.mark.parametrize("config", [VL, QWEN3_VL], ids=["qwen2_5_vl", "qwen3_vl"])
def test_the_decoder_of_a_model_with_vision_reads_text(config):
    model = build(config)
    prompt = prompts_of((12,))[0]
    (scores,) = finish(StreamedModel(model, resident=0).score([prompt], ANSWERS))
    assert scores == pytest.approx([expected_score(model, prompt, answer) for answer in ANSWERS], abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("resident", [0, 2])
def test_layers_of_two_kinds_are_those_of_the_resident_model(resident):
    """Qwen3.5: a prompt's state goes on in each answer, and in tokens that are generated, whatever its length."""
    model, prompts = build(QWEN3_5), prompts_of((9, 70, 1), seed=2)
    judge = StreamedModel(model, resident=resident)
    for prompt, found in zip(prompts, finish(judge.score(prompts, ANSWERS)), strict=True):
        assert found == pytest.approx([expected_score(model, prompt, answer) for answer in ANSWERS], abs=STATE)
    for prompt, text in zip(prompts, finish(judge.generate(prompts, 4)), strict=True):
        chosen = full_logits(model, prompt_of(prompt), text)
        best = chosen.max(-1)
        np.testing.assert_allclose(np.take_along_axis(chosen, np.asarray(text)[:, None], -1)[:, 0], best, atol=STATE)


def test_what_it_refuses(tmp_path):
    model = streamed(1)
    for message, work in {
        "prompt 1 is empty": model.score([[1], []], ANSWERS),
        f"prompt 0 has token ids from -1 to 2; the model knows 0 to {VOCAB - 1}": model.generate([[2, -1]], 1),
        f"answer 0 has token ids from {VOCAB} to {VOCAB}": model.score([[1]], [[VOCAB]]),
        "answer 0 is empty": model.score([[1]], [[]]),
        "no answers to score": model.score([[1]], []),
        "max_new_tokens must be positive, got 0": model.generate([[1]], 0),
    }.items():
        with pytest.raises(EngineError, match=message):
            finish(work)
    with pytest.raises(EngineError, match="resident=6 must be 0 to 5"):
        StreamedModel(deep(), resident=6)
    with pytest.raises(EngineError, match="batch_tokens must be positive"):
        StreamedModel(deep(), batch_tokens=0)
    with pytest.raises(CheckpointError, match="no such folder"):
        StreamedModel.load(tmp_path / "absent")
    with pytest.raises(EngineError, match=r"share=0\.0: it must be above 0"):
        StreamedJudge(model, share=0.0)


@pytest.mark.slow
async def test_what_waits_is_computed_together():
    model = StreamedModel(deep(), resident=2)
    judge, prompts = StreamedJudge(model), prompts_of((9, 5, 31))
    alone = [(await judge.generate([prompt], 3))[0] for prompt in prompts]
    before = judge.layers_computed
    # The first one begins at once, all others wait together.
    both = await asyncio.gather(*(judge.generate([prompt], 3) for prompt in prompts), judge.score([], ANSWERS))
    assert [texts[0] for texts in both[:-1]] == alone and both[-1] == []
    assert judge.layers_computed - before <= 2 * 3 * LAYERS
    await judge.close()


async def test_a_prompt_that_is_too_long_fails_alone(monkeypatch):
    room = 8 * 2**20
    model = StreamedModel(deep())
    monkeypatch.setattr(model, "_free", lambda: room)
    judge, prompts = StreamedJudge(model), prompts_of((9, 5, 20000, 12))
    found = await asyncio.gather(*(judge.score([prompt], ANSWERS) for prompt in prompts), return_exceptions=True)
    assert [isinstance(scores, EngineError) for scores in found] == [False, False, True, False]
    await judge.close()


@pytest.mark.medium
async def test_judges_in_another_event_loop_get_turns():
    judged = engine(build(TEXT))
    judge = StreamedJudge(streamed(1), in_loop(judged.between_turns, asyncio.get_running_loop()))
    prompts = prompts_of((9, 20))
    scores = await asyncio.to_thread(lambda: asyncio.run(judge.score(prompts, ANSWERS)))
    assert scores == finish(streamed(1).score(prompts, ANSWERS))
    await judged.close()


@pytest.mark.slow
async def test_judge_and_engine_share_the_device():
    judged = engine(build(TEXT))
    judge = StreamedJudge(streamed(1), judged.between_turns, share=0.5)
    prompts = prompts_of((9, 20))

    async def respond(rid, n):
        return [chunk async for chunk in judged.generate(request(rid, text_prompt(6), n=n, max_new_tokens=20))]

    alone = await respond("alone", 4)
    beside, scores = await asyncio.gather(respond("beside", 4), judge.score(prompts, ANSWERS))
    assert scores == finish(streamed(1).score(prompts, ANSWERS))
    drawn = [sorted((c.sample, c.token_ids, c.logprobs) for c in chunks) for chunks in (alone, beside)]
    assert drawn[0] == drawn[1]
    assert judge.layers_computed == LAYERS and judge.seconds > 0
    assert await judge.generate(prompts, 2) == finish(streamed(1).generate(prompts, 2))
    with pytest.raises(EngineError, match="prompt 0 is empty"):
        await judge.score([[]], ANSWERS)
    await judged.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        await judge.score(prompts, ANSWERS)
    await judge.close()


async def test_a_judge_goes_on_after_somebody_gave_up_waiting():
    model = StreamedModel(deep(), resident=1)
    judge, prompts = StreamedJudge(model), prompts_of((9,))
    scores = await judge.score(prompts, ANSWERS)
    for turns in (1, 2, 5):
        waiting = asyncio.ensure_future(judge.generate(prompts, 40))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await judge.score(prompts, ANSWERS) == scores
    await judge.close()


@pytest.mark.medium
async def test_judges_of_their_own_answer_in_turn_and_can_be_closed():
    judge = StreamedJudge(StreamedModel(deep(), resident=0))
    prompts = prompts_of((9, 20))
    both = await asyncio.gather(judge.score(prompts, ANSWERS), judge.score(prompts[::-1], ANSWERS))
    assert both[0] == both[1][::-1]
    running = asyncio.ensure_future(judge.generate(prompts, 50))
    await asyncio.sleep(0)
    await asyncio.wait_for(judge.close(), 60)
    with pytest.raises(EngineError, match="the judge was closed"):
        await running


# --- the plan -------------------------------------------------------------------------------------

LAYER = 2 * layer_weights(SEVEN)  # bytes in bfloat16
PLENTY = float("inf")


def chosen(tokens, free_bytes=PLENTY, rows=1):
    pace = DeviceSpeed()
    compute = pace.compute_seconds(SEVEN, rows, tokens, 0, LAYER)
    return resident_layers(28, LAYER, compute, pace.transfer_seconds(LAYER), free_bytes)


def test_a_7b_judge_on_an_h100():
    assert 465e6 < LAYER < 467e6
    assert chosen(32768) == 0  # a layer computes for longer than it travels
    assert chosen(8192) in (0, 14)
    assert chosen(4096) in (14, 19)
    assert chosen(512) == 28  # nothing would hide the transfers
    assert chosen(512, 10 * LAYER) == 8  # all that fit beside two buffers
    with pytest.raises(EngineError, match="needs room for 2 layers"):
        chosen(512, 1.9 * LAYER)


@given(
    st.integers(1, 80),
    st.floats(1e-4, 1e4),
    st.floats(1e-4, 1e4),
    st.floats(2, 100),
    st.floats(1, 10),
    st.floats(1, 10),
)
def test_it_is_monotone_and_fits(layers, compute, transfer, free, longer, larger):
    size = 1000
    resident = resident_layers(layers, size, compute, transfer, free * size)
    assert 0 <= resident <= layers
    assert resident == layers or (resident + 2) * size <= free * size
    assert resident_layers(layers, size, compute, transfer, free * larger * size) >= resident
    assert resident_layers(layers, size, compute * longer, transfer, free * size) <= resident
    if free >= layers and transfer > PARTS * compute:
        assert resident == layers
    if transfer <= compute and layers > 2:
        assert resident == 0


@given(st.integers(1, 64), st.data())
def test_each_streamed_layer_travels_once_and_is_there_in_time(layers, data):
    resident = data.draw(st.integers(0, layers))
    streamed = streamed_places(layers, resident)
    assert len(set(streamed)) == layers - resident and (not streamed or streamed[0] == 0)
    plan = travel(layers, streamed)
    assert len(plan) == layers
    if not streamed:
        assert all(parts == () for _, parts in plan)
        return
    edges = [*streamed, layers]
    gaps = [stop - start for start, stop in itertools.pairwise(edges)]
    assert max(gaps) - min(gaps) <= 1
    for (start, stop), gap in zip(itertools.pairwise(edges), gaps, strict=True):
        during = plan[start:stop]
        assert {target for target, _ in during} == {stop % layers}
        assert [part for _, parts in during for part in parts] == list(range(PARTS))
        assert max(len(parts) for _, parts in during) == -(-PARTS // gap)


def test_costs_grow_with_the_batch():
    pace = DeviceSpeed(flops=1e9, memory_bytes=1e9, link_bytes=1e9)
    text = TEXT.text
    short, long, behind = (pace.compute_seconds(text, 1, *tokens, 1000) for tokens in ((100, 0), (200, 0), (100, 50)))
    assert 2 * short < long and short < behind
    assert pace.compute_seconds(text, 1, 1, 0, 10**9) == 1.0  # its weights are read
    one, two, three = (pass_bytes(text, rows, 64, 0, 4) for rows in (1, 2, 3))
    assert two > one > 4 * layer_weights(text) and three - two == two - one
    assert pass_bytes(text, 1, 64, 16, 4) - pass_bytes(text, 1, 64, 0, 4) == 4 * 80 * 2 * 2 * 16
    with pytest.raises(EngineError, match="all numbers of a DeviceSpeed must be positive"):
        DeviceSpeed(flops=0.0)
