"""Packing prompts and begun responses into prefill batches: nothing lost, nothing seen that should not be."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import LONGEST, media_prompt, text_prompt

from rollout.slots import doubling, geometric
from rollout.turns import Place, Prefix, plan

IMAGES = (("image", (1, 4, 4)), ("image", (1, 4, 8)), ("video", (2, 4, 4)))


# kind of prompt, its length if text, its seed, and the lengths of the samples' responses so far
described = st.tuples(
    st.integers(0, len(IMAGES)),
    st.integers(1, 30),
    st.integers(0, 9),
    st.lists(st.integers(0, LONGEST - 30), min_size=1, max_size=6),
)


def build(kind, length, seed, lengths):
    prompt = text_prompt(length, seed) if kind == len(IMAGES) else media_prompt(2, IMAGES[kind], 3, seed=seed)
    return Prefix(prompt, tuple(np.arange(n, dtype=np.int32) + 7 * i for i, n in enumerate(lengths)))


def entries(place: Place) -> np.ndarray:
    """The index in the row of each of the sample's cache entries."""
    response = np.arange(place.response_start, place.response_start + place.response_tokens)
    return np.concatenate([np.arange(place.prompt_tokens), response])


@settings(deadline=None)
@given(st.lists(described, max_size=7), st.integers(1, 1024), st.integers(1, 200))
def test_every_sample_finds_its_own_entries(descriptions, batch_tokens, batch_patches):
    items = [build(*each) for each in descriptions]
    batches = list(
        plan(items, row_tokens=LONGEST, batch_tokens=batch_tokens, batch_patches=batch_patches, merge_unit=4)
    )
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
        assert inputs.tokens_BT.shape[1] <= LONGEST
        if len(members) > 1:
            assert inputs.tokens_BT.size <= batch_tokens and patches <= batch_patches
        assert (inputs.vision is None) == (patches == 0)
        if patches:
            assert inputs.vision.num_patches >= patches
            assert (inputs.vision.frame_segments_P[patches:] == 0).all()


def test_a_prompt_stands_once_in_a_row_of_many_samples():
    prompt = text_prompt(10)
    responses = tuple(np.zeros(length, np.int32) for length in (0, 5, 0, 7))
    ((_, batch),) = plan([Prefix(prompt, responses)], row_tokens=64, batch_tokens=64, batch_patches=1, merge_unit=1)
    assert batch.tokens == 10 + 12
    long = (np.zeros(40, np.int32),) * 3
    ((_, batch),) = plan([Prefix(prompt, long)], row_tokens=64, batch_tokens=64, batch_patches=1, merge_unit=1)
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
