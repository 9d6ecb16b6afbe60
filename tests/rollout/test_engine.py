"""The embedded engine on tiny real models. The rules, each tested under its number:

1. Greedy ids are the argmax of the full forward pass; log-probs of all sampled tokens are its log-probs.
2. A response ends at its first stop id (included) or at `max_new_tokens`, exactly, however many steps a turn has.
3. Forbidden ids are never sampled (shown in `test_requests.py`); top-k and top-p bound what is.
4. `n` samples share one prefill, also when they don't all get a slot at once.
5. Token `t` of sample `i` depends on (seed, i, t) and the weights only: not on company, slots, or steps a turn.
6. Equal submissions give equal bits.
7. A continued response goes on as it would have without interruption; `max_new_tokens` counts its prefix.
8. More samples than slots all complete, in the order of submission.
9. Requests that can't be served are refused at once, with numbers and the name of the setting.
10. Text and vision prompts run in one batch, and text-only models need no vision.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_cases import (
    END,
    IMAGE,
    QWEN3,
    QWEN3_VL,
    START,
    TEXT,
    TOLERANCE,
    VIDEO,
    VL,
    VOCAB,
    assert_logprobs,
    build,
    collect,
    engine,
    full_logits,
    full_logprobs,
    media_prompt,
    request,
    run,
    text_prompt,
)
from turns import by_turns

import models
from rollout import turns
from rollout.engine import EngineError, FinishReason

MEDIA = (IMAGE, VIDEO, START, END)


@pytest.mark.slow
@pytest.mark.parametrize("config", [TEXT, QWEN3], ids=["qwen2", "qwen3"])
def test_1_greedy_is_the_argmax_of_the_full_forward_pass_and_logprobs_are_its(config):
    model, temperatures = build(config), (0.6, 1.7)
    prompts = [text_prompt(length, seed=length) for length in (1, 7, 16, 17, 40)]
    greedy = [request(f"r{i}", p, temperature=0.0, max_new_tokens=20) for i, p in enumerate(prompts)]
    how = {"n": 5, "top_p": 0.9, "top_k": 30, "max_new_tokens": 24}
    drawn = [request(str(temperature), text_prompt(11), temperature=temperature, **how) for temperature in temperatures]
    answers = run(engine(model), *greedy, *drawn)
    for prompt, (answer,) in zip(prompts, answers[:5], strict=True):
        assert answer.ids == tuple(full_logits(model, prompt, answer.ids).argmax(-1))
        assert answer.finish is FinishReason.LENGTH
        assert_logprobs(model, prompt, answer)
    for temperature, group in zip(temperatures, answers[5:], strict=True):
        for answer in group:
            assert len(answer.ids) == 24
            assert_logprobs(model, text_prompt(11), answer, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("config", by_turns([VL, QWEN3_VL]))
def test_1_and_10_vision_text_and_several_media_in_one_batch(config):
    model = build(config)
    prompts = [
        media_prompt(3, ("image", (1, 8, 12)), 4, seed=1),
        text_prompt(9, seed=2),
        media_prompt(("video", (2, 4, 4)), 2, ("image", (1, 4, 4)), 1, seed=3),
        media_prompt(1, ("image", (1, 4, 8)), ("video", (3, 4, 4)), 5, seed=4),
    ]
    requests = [request(f"r{i}", p, n=3, max_new_tokens=9, forbidden_ids=MEDIA) for i, p in enumerate(prompts)]
    greedy = request("greedy", prompts[3], temperature=0.0, max_new_tokens=12)
    *drawn, (best,) = run(engine(model), *requests, greedy)
    assert best.ids == tuple(full_logits(model, prompts[3], best.ids).argmax(-1))
    for prompt, answers in zip(prompts, drawn, strict=True):
        for answer in answers:
            assert not set(answer.ids) & set(MEDIA)
            assert_logprobs(model, prompt, answer, never=MEDIA)
    # the pixels matter: another picture, another distribution
    other_picture = media_prompt(3, ("image", (1, 8, 12)), 4, seed=99)
    blind = full_logprobs(model, other_picture, answers[0].ids, never=MEDIA)
    seen = full_logprobs(model, prompts[0], answers[0].ids, never=MEDIA)
    assert np.abs(blind - seen).max() > 0.01


@pytest.mark.medium
def test_2_stop_ids_and_limits_are_exact():
    model, prompt = build(TEXT), text_prompt(6)
    free = run(engine(model), request("r", prompt, n=15, max_new_tokens=17))[0]
    stops = (free[0].ids[4], free[1].ids[9])
    asked = request("r", prompt, n=15, max_new_tokens=13, stop_ids=stops), request("one", prompt, max_new_tokens=1)
    for steps in (3, 8):
        answers, (single,) = run(engine(model, steps_per_sync=steps), *asked)
        assert len(single.ids) == 1 and single.finish is FinishReason.LENGTH
        for whole, answer in zip(free, answers, strict=True):
            cut = next((t + 1 for t, id in enumerate(whole.ids[:13]) if id in stops), None)
            assert answer.ids == whole.ids[: cut or 13]
            assert answer.finish is (FinishReason.STOP if cut else FinishReason.LENGTH)
        assert len({answer.finish for answer in answers}) == 2, "the example should show both ends"


def test_3_top_k_and_top_p_bound_the_support():
    model, prompt = build(TEXT), text_prompt(8)
    asked = [
        request("k", prompt, n=8, temperature=2.0, top_k=3, max_new_tokens=20),
        request("p", prompt, n=8, temperature=1.5, top_p=0.5, max_new_tokens=20),
        request("one", prompt, n=8, temperature=2.0, top_k=1, max_new_tokens=20),
        request("greedy", prompt, temperature=0.0, max_new_tokens=20),
    ]
    by_k, by_p, ones, (greedy,) = run(engine(model), *asked)
    for answer in by_k:
        ranks = (-full_logits(model, prompt, answer.ids)).argsort(-1).argsort(-1)
        assert ranks[np.arange(20), list(answer.ids)].max() == 2
    for answer in by_p:
        logits = full_logits(model, prompt, answer.ids) / 1.5
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        drawn = probs[np.arange(20), list(answer.ids)][:, None]
        assert (np.where(probs > drawn, probs, 0).sum(-1) < 0.5 + 1e-5).all()
    assert {answer.ids for answer in ones} == {greedy.ids}


@pytest.mark.medium
def test_4_samples_share_the_prefill_of_their_prompt():
    model, serving = build(TEXT), engine(build(TEXT))
    prompts = [text_prompt(10, seed=1), text_prompt(23, seed=2)]
    answers = run(serving, *(request(f"r{i}", p, n=8, max_new_tokens=6) for i, p in enumerate(prompts)))
    assert serving.stats().tokens_prefilled == 33
    assert serving.stats().tokens_generated == 96
    for prompt, group in zip(prompts, answers, strict=True):
        assert len({answer.ids for answer in group}) > 4
        for answer in group:
            assert_logprobs(model, prompt, answer)


@pytest.mark.medium
def test_4_and_8_more_samples_than_slots_take_one_prefill():
    model, serving = build(TEXT), engine(build(TEXT), slots=4)
    prompt = text_prompt(13)
    asked = request("r", prompt, n=11, max_new_tokens=14, stop_ids=tuple(range(6)))
    (answers,) = run(serving, asked)
    (expected,) = run(engine(model), asked)
    assert [a.ids for a in answers] == [e.ids for e in expected]
    assert serving.stats().tokens_prefilled == 13
    assert (serving.stats().running, serving.stats().waiting) == (0, 0)


@pytest.mark.slow
def test_5_ids_are_the_same_alone_and_in_company():
    model = build(VL)
    prompt = media_prompt(3, ("image", (1, 4, 8)), 4, seed=1)
    watched = request("own", prompt, n=3, seed=77, max_new_tokens=15)
    company = [
        request(f"c{i}", text_prompt(3 + i, seed=i), n=1 + i % 3, seed=i, temperature=0.5 * i, max_new_tokens=1 + i,
                top_p=(1.0, 0.7)[i % 2], top_k=(0, 5, 9)[i % 3], stop_ids=tuple(range(i)))
        for i in range(7)
    ]  # fmt: skip
    alone = run(engine(model, slots=4), watched)[0]
    beside = run(engine(model), *company[:4], watched, *company[4:])[4]
    for expected, answer in zip(alone, beside, strict=True):
        assert expected.ids == answer.ids
        np.testing.assert_allclose(expected.logprobs, answer.logprobs, rtol=0, atol=TOLERANCE)


def test_5_seed_and_sample_decide():
    model, prompt = build(TEXT), text_prompt(6)
    seeds = (0, 1, 2**32, -1)
    answers = run(engine(model), *(request(f"r{s}", prompt, n=2, seed=s, max_new_tokens=12) for s in seeds))
    assert len({answer.ids for group in answers for answer in group}) == 2 * len(seeds)


@pytest.mark.slow
def test_6_equal_submissions_give_equal_bits():
    model = build(VL)
    requests = [
        request("a", media_prompt(2, ("image", (1, 4, 4)), 1), n=5, seed=3, max_new_tokens=11, stop_ids=(1, 2, 3)),
        request("b", text_prompt(12, seed=2), n=7, seed=4, max_new_tokens=9, stop_ids=(5, 6, 7)),
        request("c", media_prompt(("video", (2, 4, 4)), 2, seed=3), n=6, seed=5, max_new_tokens=13),
    ]  # fmt: skip
    first = run(engine(model, slots=4), *requests)
    used = engine(model, slots=4)
    run(used, request("before", text_prompt(3), n=5, max_new_tokens=3, forbidden_ids=tuple(range(20))))
    assert run(used, *requests) == first == run(engine(model, slots=4), *requests)


@pytest.mark.slow
def test_7_continuation_equals_no_interruption():
    model, prompt = build(TEXT), text_prompt(11)
    whole = run(engine(model), request("r", prompt, n=5, seed=9, max_new_tokens=20, stop_ids=(3,)))[0]
    cuts = [min(cut, len(answer.ids)) for cut, answer in zip((0, 1, 7, 12, 20), whole, strict=True)]
    prefixes = tuple(answer.ids[:cut] for cut, answer in zip(cuts, whole, strict=True))
    serving = engine(model)
    asked = request("r", prompt, n=5, seed=9, prefix=prefixes, max_new_tokens=20, stop_ids=(3,))
    rest = run(serving, asked)[0]
    for cut, before, after in zip(cuts, whole, rest, strict=True):
        assert after.ids == before.ids[cut:]
        assert after.finish is before.finish
        np.testing.assert_allclose(after.logprobs, before.logprobs[cut:], rtol=0, atol=TOLERANCE)
    still_open = [p for p, answer in zip(prefixes, rest, strict=True) if answer.ids]
    assert 0 < serving.stats().tokens_prefilled <= 2 * len(prompt) + sum(map(len, still_open))


@pytest.mark.slow
async def test_9_refusals():
    """All others are those of `test_requests.py`."""
    serving = engine(build(TEXT))
    first = serving.generate(request("r", text_prompt(3), max_new_tokens=2))
    with pytest.raises(EngineError, match="already in flight"):
        serving.generate(request("r", text_prompt(3), max_new_tokens=2))
    with pytest.raises(
        EngineError, match=r"60 prompt tokens \+ max_new_tokens=5 = 65 .*rollout\.max_sequence_tokens=64"
    ):
        serving.generate(request("s", text_prompt(60), max_new_tokens=5))
    assert len((await collect(first, 1))[0].ids) == 2, "a refusal leaves others alone"
    exact = serving.generate(request("r", text_prompt(60), max_new_tokens=4))
    assert len((await collect(exact, 1))[0].ids) == 4, "what just fits is served"


@pytest.mark.slow
def test_sampled_frequencies_follow_the_models_softmax():
    """Chi-square over six allowed ids, of first tokens (from the prefill) and of second ones (decoded) behind the
    most frequent first; the limit is the 0.999 quantile for 5 degrees of freedom."""
    model, prompt, allowed = build(TEXT), text_prompt(6), 6
    forbidden = tuple(range(allowed, VOCAB))
    asked = request("r", prompt, n=1024, seed=5, max_new_tokens=2, forbidden_ids=forbidden)
    ids = np.array([answer.ids for answer in run(engine(model), asked)[0]])
    for t, first in ((0, None), (1, np.bincount(ids[:, 0]).argmax())):
        group = ids if first is None else ids[ids[:, 0] == first]
        logits = full_logits(model, prompt, group[0])[t][:allowed]
        expected = np.exp(logits) / np.exp(logits).sum() * len(group)
        assert expected.min() >= 5, "too few for the test; take other weights"
        counts = np.bincount(group[:, t], minlength=allowed)
        assert ((counts - expected) ** 2 / expected).sum() < 20.52


@pytest.mark.slow
def test_bfloat16_weights_and_cache():
    """The cached pass rounds in other places than the full one: 0.05 absolute, at log-probs of 2 to 8."""
    model, prompt = build(TEXT), text_prompt(9)
    graphdef, params = models.split(model)
    narrow = models.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    answers = run(engine(model, compute_dtype=jnp.bfloat16), request("r", prompt, n=4, max_new_tokens=16))[0]
    for answer in answers:
        expected = full_logprobs(narrow, prompt, answer.ids)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=0.05)


@pytest.mark.slow
def test_the_batches_of_a_large_model_are_not_filled_up(monkeypatch):
    """One sample is computed as one row; its tokens are those of a filled batch."""
    prompt = text_prompt(9)
    asked = request("r", prompt, max_new_tokens=9, temperature=0.0)
    ((filled,),) = run(engine(build(TEXT)), asked)
    monkeypatch.setattr(turns, "SMALL_MODEL", 0)
    serving = engine(build(TEXT))
    ((answer,),) = run(serving, asked)
    assert answer.ids == filled.ids
    assert_logprobs(build(TEXT), prompt, answer)
    sizes = dict(serving.compiled_shapes)
    assert sizes["decode"][0] == 1 and sizes["prefill"] == (1, 16)
