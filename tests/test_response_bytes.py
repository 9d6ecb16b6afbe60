"""A response as bytes: nothing is lost, and what is none is named. What a step asks of every response stands beside
each other, from when its group is scored on."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_cases import response_of

from fluxjax.base.scored import bytes_of, head_of, numbers_of
from fluxjax.base.types import ENVIRONMENT, Columns, Group, Media, MediaKind, Prompt, Response, Reward, Sample
from fluxjax.coordinator.ledger import Ledger, PromptStage
from fluxjax.coordinator.ledger_state import ledger_state, load_ledger_state
from fluxjax.coordinator.messages import Request

tokens_strategy = st.one_of(
    st.lists(st.integers(0, 2**16 - 1), max_size=40), st.lists(st.integers(-1, 2**31 - 1), max_size=40)
)


@given(tokens_strategy, st.integers(0, 2**20), st.sampled_from([None, 0.0, 0.7, 1.0]), st.data())
def test_numbers_come_back_as_they_were(tokens, sample, temperature, data):
    count = len(tokens)
    logprobs = data.draw(st.lists(st.floats(width=32, allow_nan=False), min_size=count, max_size=count))
    versions = data.draw(st.lists(st.integers(-1, 3), min_size=count, max_size=count))
    response = Response("a", 3, sample, tuple(tokens), tuple(logprobs), tuple(versions), "stop", temperature)
    assert not response.is_packed and response.num_tokens == count
    arrays = numbers_of(response.data)[2:]
    for values, want, dtype in zip(arrays, (tokens, logprobs, versions), ("i4", "f4", "i4"), strict=True):
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, np.array(want, dtype))
    written = bytes_of(sample, temperature, response.token_ids, response.logprobs, response.versions)
    assert written == response.data
    head = head_of(b"before" + written + b"behind", 6)
    assert (head.sample, head.tokens, head.size) == (sample, count, len(written))
    again = response_of(3, written).packed()
    assert (again.draw, again.sample, again.temperature) == (3, sample, temperature)
    assert (again.token_ids, again.versions) == (response.token_ids, response.versions)
    assert again.logprobs == response.logprobs and again.data == written
    assert response.version_span == again.version_span == (min(versions, default=-1), max(versions, default=-1))


def test_a_token_takes_six_bytes_or_eight():
    sizes = [len(bytes_of(0, None, [last] * 100, [-1.0] * 100, [7] * 100)) for last in (2**16 - 1, 2**16)]
    assert sizes[0] < 100 * 6 + 40 and sizes[1] == sizes[0] + 200


@pytest.mark.parametrize(("tokens", "logprobs"), [([2**31], [0.0]), ([1], [1e300])])
def test_numbers_that_are_none_are_named(tokens, logprobs):
    with pytest.raises(ValueError, match="numbers of a response"):
        bytes_of(0, None, tokens, logprobs, [1])


def test_bytes_that_are_no_response_are_named():
    data = bytes_of(0, 1.0, [1, 2, 3], [-1.0] * 3, [1, 1, 2])
    for end in range(len(data)):
        with pytest.raises(ValueError):
            numbers_of(data[:end])
    for at in (4, 8, 12):  # tokens, runs, bytes of a token
        for wrong in (-1, 1 << 30):
            with pytest.raises(ValueError):
                numbers_of(data[:at] + wrong.to_bytes(4, "little", signed=True) + data[at + 4 :])
    with pytest.raises(ValueError, match="runs"):
        numbers_of(data[:28] + b"\xff" * 4 + data[32:])  # a run of -1 tokens


def test_a_packed_response_keeps_its_bytes_only():
    response = Response("a", 3, 1, (5, 6, 70000), (-0.5, -1.0, 0.0), (1, 1, 2), "stop", 0.7)
    packed = dataclasses.replace(response).packed()
    assert not {"token_ids", "logprobs", "versions"} & vars(packed).keys()
    assert packed == response and packed.num_tokens == 3
    assert packed.is_packed and not response.is_packed
    assert dataclasses.replace(packed, versions=(2, 2, 2)).logprobs == response.logprobs
    assert pickle.loads(pickle.dumps(packed)) == response
    with pytest.raises(AttributeError, match="no 'tokens'"):
        _ = packed.tokens  # pyright: ignore[reportAttributeAccessIssue]


PROMPT = Prompt("p", "digits", "?", "7")


def response(sample: int, versions: tuple[int, ...]) -> Response:
    count = len(versions)
    return Response(
        f"00000000.00/{sample}", 0, sample, tuple(range(count)), (-0.5,) * count, versions, "stop", temperature=0.7
    )


def group(*versions: tuple[int, ...]) -> Group:
    samples = (Sample(response(k, own), Reward(float(k), False), k - 0.5) for k, own in enumerate(versions))
    return Group(PROMPT, tuple(samples))


def same(left: Columns, right: Columns) -> bool:
    return left.data == right.data and all(
        np.array_equal(a, b) and a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(left[1:3], right[1:3], strict=True)
    )


def test_an_episode_comes_back_from_json() -> None:
    """Observations know which media are theirs."""
    first, *others = media = tuple(Media(MediaKind.IMAGE, f"{n}.png") for n in range(3))
    episode = dataclasses.replace(
        response(1, (3, ENVIRONMENT, 3, ENVIRONMENT, 4)), media=media, rewards=(0.5, 0.0), media_counts=(1, 2)
    )
    saved = json.loads(json.dumps(episode.to_json()))
    assert Response.from_json(saved) == episode and Response.from_json(saved).observed_media == [(first,), (*others,)]
    del saved["media_counts"]
    assert Response.from_json(saved).observed_media == [], "as a run of an earlier state saved it"


def test_columns_are_those_of_the_responses() -> None:
    draw, numbers_G4, advantages_GU, data = group((3, 3), (), (2, 5, 4)).columns
    assert draw == 0
    assert numbers_G4.tolist() == [[0, 2, 3, 2], [1, 0, -1, 0], [2, 3, 5, 3]]
    assert advantages_GU.tolist() == [[-0.5], [0.5], [1.5]]
    assert [numbers_of(each).versions.tolist() for each in data] == [[3, 3], [], [2, 5, 4]]


@pytest.mark.parametrize("known", [True, False])
def test_other_advantages_change_nothing_else(known: bool) -> None:
    first = group((1,), (1, 2))
    if known:
        _ = first.columns
    second = first.with_advantages(np.array([2.0, -2.0]))
    assert ("columns" in vars(second)) == known, "responses were read again"
    assert [sample.advantage for sample in second.samples] == [2.0, -2.0]
    assert same(second.columns, Columns.of(second.samples))
    with pytest.raises(ValueError, match="zip"):
        first.with_advantages([1.0])


@pytest.mark.parametrize("packed", [True, False])
def test_a_scored_group_has_its_columns_where_responses_are_packed(packed: bool) -> None:
    """So that nobody waits for them when a step is planned; the same group is trained on, and found after a resume."""
    ledger = Ledger()
    ledger.draw([PROMPT], [])
    ledger.generate(Request(PROMPT, n=2, attempt=0), served=0)
    for k in range(2):
        came = response(k, (0, 0))
        ledger.finish(came.packed() if packed else came, newest_version=0)
        ledger.score(came)
        ledger.reward(came.rid, Reward(float(k), False))
    [entry] = ledger.at(PromptStage.SCORED)
    assert ("columns" in vars(entry.group())) == packed
    assert entry.group() is entry.group()
    resumed = Ledger()
    load_ledger_state(resumed, ledger_state(ledger), {0: PROMPT})
    [again] = resumed.at(PromptStage.SCORED)
    assert again.group() == dataclasses.replace(entry.group())
