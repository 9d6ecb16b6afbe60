"""A prompt of which only sizes are kept says the same to a plan, and is the same when it is laid out."""

import gc

import numpy as np
import pytest

from models.inputs import ModelInput, OutlinedInput, VisionInput


def prompt(media: bool, features: int = 300) -> ModelInput:
    """Two frame pairs of unequal size behind a token of text."""
    tokens = np.arange(features + 2, dtype=np.int32)
    index = np.full(len(tokens), -1, np.int32)
    if not media:
        return ModelInput(tokens, np.tile(tokens, (3, 1)), index, len(tokens))
    index[1:-1] = np.arange(features)[::-1]
    patches = 4 * features
    frames = np.where(np.arange(patches) < 8, 1, 2).astype(np.int32)
    vision = VisionInput(np.zeros((patches, 3), np.float32), np.zeros((patches, 2), np.int32), frames, frames)
    return ModelInput(tokens, np.tile(tokens, (3, 1)), index, len(tokens), vision)


@pytest.mark.parametrize("media", [True, False])
def test_a_plan_reads_the_same_sizes(media):
    whole = prompt(media)
    outlined = OutlinedInput(whole, lambda: prompt(media))
    assert len(outlined) == len(whole) and outlined.frame_edges == whole.frame_edges
    assert outlined.frame_bound == whole.frame_bound == (2048 if media else 1)
    assert (outlined.patches_PX is None) == (not media)
    for got, want in zip(outlined.shown, whole.shown, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_it_is_laid_out_once_while_somebody_uses_it():
    calls: list[int] = []
    outlined = OutlinedInput(prompt(True), lambda: calls.append(1) or prompt(True))
    used = outlined.laid_out()
    assert outlined.laid_out() is used and len(calls) == 1
    np.testing.assert_array_equal(used.feature_index_T, prompt(True).feature_index_T)
    del used
    gc.collect()
    outlined.laid_out()
    assert len(calls) == 2
