"""A request to an engine is checked whole, before it is entered into the books (rule 9 of `test_engine.py`).

Types are checked by the test session's import hook, too; here it is stepped around, as production has no such hook.
"""

import asyncio
import copy
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import (
    HANG,
    IMAGE,
    LONGEST,
    TEXT,
    VL,
    VOCAB,
    assert_logprobs,
    build,
    collect,
    engine,
    media_prompt,
    request,
    run,
    text_prompt,
)
from turns import third_of

from rollout.engine import EngineError
from rollout.requests import LEAST_TEMPERATURE, MOST_SAMPLES, EngineLimits, checked

NAN, INF = math.nan, math.inf
PICTURE = media_prompt(2, ("image", (1, 4, 8)), 3, seed=3)
SERVED = {"text": EngineLimits(1, LONGEST, VOCAB), "vision": EngineLimits(1, LONGEST, VOCAB, VL.vision)}


def altered(value, path, new):
    """A copy of nested frozen data in which the field at `path` is `new`, whatever its type."""
    name, _, rest = path.partition(".")
    value = copy.copy(value)
    object.__setattr__(value, name, altered(getattr(value, name), rest, new) if rest else new)
    return value


def good(prompt=PICTURE, **how):
    return request("r", prompt, **{"n": 2, "max_new_tokens": 4, **how})


def with_pixel(value):
    pixels = PICTURE.vision.patches_PX.copy()
    pixels[3, 5] = value
    return pixels


ROW = np.zeros(len(PICTURE), np.int32)
BAD = [
    *(("rid", value, "rid of a request must be a string") for value in (None, 3, ["r"], b"r")),
    *(("n", value, "n=.* must be an integer") for value in (1.0, True, "2", None, np.array(2))),
    *(("n", value, f"n=.* must be in 1 .. {MOST_SAMPLES}") for value in (0, -1, 10**9, 2**31, 10**5000)),
    *(("seed", value, "seed=.* must be an integer") for value in (0.5, None, False, "7")),
    *(("sampling.max_new_tokens", v, "max_new_tokens=.* must be an integer") for v in (2.5, NAN, None, np.float32(3))),
    *(("sampling.max_new_tokens", v, "max_new_tokens=.* must be in 1") for v in (0, -3, 2**31, 2**64)),
    ("sampling.max_new_tokens", LONGEST, r"exceed rollout\.max_sequence_tokens=64"),
    *(("sampling.temperature", v, "temperature=.* must be finite") for v in (NAN, INF, -INF, np.float32(NAN), 10**400)),
    *(("sampling.temperature", v, r"temperature=.* must be 0 \(greedy\)") for v in (-1, -1e-30, 1e-30, 1e-300, 1e39)),
    *(("sampling.temperature", v, "temperature=.* must be a number") for v in (True, "1", None, 1j, np.ones(1))),
    *(("sampling.top_p", v, "top_p=.* must be finite") for v in (NAN, INF)),
    *(("sampling.top_p", v, r"top_p=.* must be in \(0, 1\]") for v in (0, 0.0, -0.5, 1.0001)),
    *(("sampling.top_p", v, "top_p=.* must be a number") for v in (True, None, "0.5")),
    *(("sampling.top_k", v, "top_k=.* must be in 0") for v in (-1, 2**31)),
    *(("sampling.top_k", v, "top_k=.* must be an integer") for v in (1.0, NAN, None, False)),
    *(
        (f"sampling.{name}", value, f"{name}=.* must be {what}")
        for name in ("stop_ids", "forbidden_ids")
        for value, what in [
            ((2**31,), "in -2147483648"), ((1, -(2**31) - 1), "in -2147483648"), ((1.0,), "a tuple of integers"),
            ((1, True), "a tuple of integers"), (5, "a tuple of integers"), ("12", "a tuple of integers"),
            (b"12", "a tuple of integers"), (None, "a tuple of integers"), (((1,),), "a tuple of integers"),
            (np.array(3), "a tuple of integers"), (np.array([1.0]), "a tuple of integers"),
        ]
    ),
    ("sampling.forbidden_ids", tuple(range(-5, VOCAB + 5)), "every token of the vocabulary"),
    ("sampling", None, "sampling must be SamplingParams"),
    ("prefix_ids", ((1,),), "1 prefixes for n=2"),
    ("prefix_ids", ((1,), (2**40,)), r"prefix_ids\[1\]=.* must be in"),
    ("prefix_ids", ((1,), (2, VOCAB)), r"token ids 2 .. 40 of prefix_ids\[1\] are not all in the vocabulary of 40"),
    ("prefix_ids", ((1,), (-1,)), "are not all in the vocabulary"),
    ("prefix_ids", ((1,), None), r"prefix_ids\[1\]=None must be a tuple"),
    ("prefix_ids", ((True,), ()), r"prefix_ids\[0\]=.* must be a tuple of integers"),
    ("prefix_ids", 7, "prefix_ids must be a tuple of tuples"),
    *(("samples", v, "samples=.* must be n=2 different numbers") for v in ((0,), (1, 1), (-1, 2), (0, 1, 2), (3, 3))),
    *(("samples", v, "samples=.* must be a tuple of integers") for v in (None, 2, (0, 1.0), (True, 0))),
    ("samples", (0, 2**31), "samples=.* must be in"),
    ("session", 7, "session must be a string, not 7"),
    ("prompt", None, "prompt must be a ModelInput"),
    ("prompt", [1, 2], "prompt must be a ModelInput"),
    ("prompt.token_ids_T", ROW[:0], "the prompt has no tokens"),
    ("prompt.token_ids_T", ROW + VOCAB, "vocabulary of 40"),
    ("prompt.token_ids_T", ROW - 1, "vocabulary of 40"),
    ("prompt.token_ids_T", ROW.astype(np.float32), "token_ids_T must be an array of integer"),
    ("prompt.token_ids_T", ROW.astype(bool), "token_ids_T must be an array of integer"),
    ("prompt.token_ids_T", ROW[None], "token_ids_T has the shape"),
    ("prompt.token_ids_T", [1, 2], "token_ids_T must be an array"),
    ("prompt.positions_3T", PICTURE.positions_3T[:, 1:], "positions_3T has the shape"),
    ("prompt.positions_3T", PICTURE.positions_3T[0], "positions_3T has the shape"),
    ("prompt.positions_3T", PICTURE.positions_3T.astype(np.int64) + 2**31, "positions_3T has values"),
    ("prompt.feature_index_T", PICTURE.feature_index_T[1:], "feature_index_T has the shape"),
    ("prompt.feature_index_T", PICTURE.feature_index_T + 1, "feature_index_T has values of 0 .. 8"),
    ("prompt.feature_index_T", ROW - 2, "feature_index_T has values"),
    ("prompt.next_position", 3.0, "next_position=3.0 must be an integer"),
    ("prompt.next_position", 2**31 - 2, "next_position=2147483646 must be in"),
    ("prompt.vision", 3, "vision must be a VisionInput"),
    ("prompt.vision", None, "feature_index_T has values"),
    ("prompt.vision.route", 3, "route"),
    ("prompt.vision.patches_PX", with_pixel(NAN), "patches_PX has NaN or infinity"),
    ("prompt.vision.patches_PX", with_pixel(-INF), "patches_PX has NaN or infinity"),
    ("prompt.vision.patches_PX", PICTURE.vision.patches_PX[:, 1:], "patches_PX has the shape"),
    ("prompt.vision.patches_PX", PICTURE.vision.patches_PX[1:], "has 31 patches, which must be a multiple of 4"),
    ("prompt.vision.patches_PX", PICTURE.vision.patches_PX[:0], "has 0 patches"),
    ("prompt.vision.patches_PX", PICTURE.vision.patches_PX.astype(np.uint8), "patches_PX must be an array of floating"),
    ("prompt.vision.patches_PX", None, "patches_PX must be an array"),
    ("prompt.vision.positions_P2", PICTURE.vision.positions_P2[1:], "positions_P2 has the shape"),
    ("prompt.vision.frame_segments_P", PICTURE.vision.frame_segments_P[4:], "frame_segments_P has the shape"),
    ("prompt.vision.frame_segments_P", PICTURE.vision.frame_segments_P - 2, "frame_segments_P has values"),
    ("prompt.vision.window_segments_P", PICTURE.vision.window_segments_P + 2**20, "window_segments_P has values"),
    ("prompt.vision.frame_bound", 4, "frame_bound=4 is too small: a frame pair has 32 patches"),
    ("prompt.vision.frame_bound", 32.0, r"frame_bound=32\.0 must be an integer"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "complaint"), BAD, ids=[f"{path} {i}" for i, (path, _, _) in enumerate(BAD)])
def test_each_field_is_checked_and_named_in_one_line(path, value, complaint):
    with pytest.raises(EngineError, match=complaint) as caught:
        checked(altered(good(), path, value), SERVED["vision"])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    assert path == "rid" or str(caught.value).startswith("request 'r': ")


def test_what_is_no_request_at_all():
    for nothing in (None, 3, "prompt", {"rid": "r"}):
        with pytest.raises(EngineError, match="GenerateRequest"):
            checked(nothing, SERVED["text"])
    with pytest.raises(EngineError, match="text-only"):
        checked(good(), SERVED["text"])


def test_numpy_numbers_and_lists_become_plain_ones():
    asked = good(prefix=((), (3, 4)), n=2, seed=-(2**70), max_new_tokens=4, temperature=1.0, top_k=5, stop_ids=(1, 2))
    for path, value in [
        ("n", np.int64(2)),
        ("sampling.max_new_tokens", np.uint8(4)),
        ("sampling.temperature", np.float32(1)),
        ("sampling.temperature", 1),
        ("sampling.top_p", np.float64(1)),
        ("sampling.top_k", np.int32(5)),
        ("sampling.stop_ids", [np.int16(2), 1, VOCAB + 3, -1]),  # nobody can sample those outside the vocabulary
        ("prefix_ids", [np.array([], np.int64), [3, np.int64(4)]]),
        ("prompt.token_ids_T", PICTURE.token_ids_T.astype(np.uint8)),
        ("prompt.positions_3T", jnp.asarray(PICTURE.positions_3T)),
        ("prompt.vision.patches_PX", PICTURE.vision.patches_PX.astype(np.float64)),
    ]:
        plain = checked(altered(asked, path, value), SERVED["vision"])
        expected = checked(asked, SERVED["vision"])
        assert repr(plain) == repr(expected)
        assert plain.prompt.token_ids_T.dtype == np.int32 and plain.prompt.vision.patches_PX.dtype == np.float32
    for seed in (np.int32(-1), np.uint64(2**64 - 1), np.int8(7)):
        assert type(checked(altered(asked, "seed", seed), SERVED["vision"]).seed) is int
    assert checked(good(temperature=LEAST_TEMPERATURE), SERVED["vision"]).sampling.temperature == LEAST_TEMPERATURE


@pytest.mark.slow
def test_the_lowest_and_the_highest_temperature_draw_from_what_is_allowed():
    """At the lowest it is the most probable token; at the highest any of them, but never a forbidden one."""
    forbidden = tuple(range(0, VOCAB, 2))  # more than the engine's smallest list
    asked = [
        request(str(t), text_prompt(5), n=8, temperature=t, max_new_tokens=6, forbidden_ids=forbidden)
        for t in (0.0, LEAST_TEMPERATURE, 3e38)
    ]
    greedy, cold, hot = run(engine(build(TEXT), slots=32), *asked)
    assert [a.ids for a in cold] == [a.ids for a in greedy]
    for answer in greedy:
        assert_logprobs(build(TEXT), text_prompt(5), answer, never=forbidden)
    ids = {id for answer in hot for id in answer.ids}
    assert len(ids) > 10 and not ids & set(forbidden)


ANSWERABLE = [
    request("a", text_prompt(6, seed=1), n=3, seed=5, max_new_tokens=7, stop_ids=(4, 9)),
    request("b", PICTURE, n=2, seed=6, temperature=0.7, top_p=0.9, max_new_tokens=9, forbidden_ids=(IMAGE,)),
    request("c", text_prompt(4, seed=2), n=2, seed=7, top_k=9, max_new_tokens=5, prefix=((1, 2), ())),
]


@pytest.fixture(scope="module")
def served():
    """An engine for all examples, and what it answers to good requests alone."""
    serving = engine(build(VL), slots=4)
    return serving, run(serving, *ANSWERABLE)


async def serve_among(serving, script):
    """Submits everything in order; a request with a complaint must be refused with it and change nothing."""
    await serving.pause()
    streams = []
    for complaint, each in script:
        if complaint is None:
            streams.append(collect(serving.generate(each), each.n))
            continue
        before = serving.stats(), list(serving._scheduler.jobs)
        with pytest.raises(EngineError, match=complaint):
            serving.generate(each)
        assert (serving.stats(), list(serving._scheduler.jobs)) == before
    await serving.resume()
    return await asyncio.gather(*streams)


@pytest.mark.slow
@settings(deadline=None, max_examples=third_of(15))
@given(st.lists(st.tuples(st.sampled_from(BAD), st.sampled_from("abcr"), st.integers(0, 15)), max_size=12))
def test_bad_requests_among_good_ones_leave_no_trace(served, bad):
    """The good ones get the same bits, under ids that refused ones had, in an engine that refused many before."""
    serving, expected = served
    script = [(None, each) for each in ANSWERABLE]
    for (path, value, complaint), rid, place in bad:
        wrong = altered(altered(good(), "rid", rid), path, value)
        script.insert(min(place, len(script)), (complaint, wrong))
    assert asyncio.run(asyncio.wait_for(serve_among(serving, script), HANG)) == expected
