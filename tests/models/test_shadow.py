"""A shadow tensor is sliced, sharded and concatenated as the array that it stands for."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from models.inputs import ModelInput, OutlinedInput, VisionInput, blank, concatenate
from models.shadow import Rows, ShadowError, ShadowTensor

THERE = {
    f"t{k}": np.arange(k * 1000, k * 1000 + 3 * n, dtype=np.float32).reshape(n, 3) for k, n in enumerate([7, 1, 24])
}


def shadow(ticket):
    return ShadowTensor.of(ticket, THERE[ticket].shape, np.float32)


def fetch(wanted):
    return [THERE[rows.ticket][rows.start : rows.stop] for rows in wanted]


BOUND = st.none() | st.integers(-30, 30)


@pytest.mark.medium
@settings(max_examples=third_of(200), deadline=None)
@given(st.data())
def test_whatever_is_cut_and_joined_is_what_the_array_would_be(data):
    pairs: list[Any] = [(shadow(ticket), array) for ticket, array in THERE.items()]
    for _ in range(data.draw(st.integers(1, 6))):
        match data.draw(st.sampled_from(["slice", "concatenate", "pad"])):
            case "slice":
                tensor, array = pairs[data.draw(st.integers(0, len(pairs) - 1))]
                rows = slice(data.draw(BOUND), data.draw(BOUND))
                pairs.append((tensor[rows], array[rows]))
            case "shard":
                tensor, array = pairs[data.draw(st.integers(0, len(pairs) - 1))]
                count = data.draw(st.integers(1, 5))
                index = data.draw(st.integers(0, count - 1))
                pairs.append((tensor.shard(index, count), np.array_split(array, count)[index]))
            case "concatenate":
                chosen = [pairs[k] for k in data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=3))]
                pairs.append((np.concatenate([t for t, _ in chosen]), np.concatenate([a for _, a in chosen])))
            case "pad":
                tensor, array = pairs[data.draw(st.integers(0, len(pairs) - 1))]
                zeros = np.zeros((data.draw(st.integers(0, 3)), 3), np.float32)
                pairs.append((np.concatenate([zeros, tensor]), np.concatenate([zeros, array])))
    for tensor, array in pairs:
        assert (tensor.shape, tensor.nbytes, tensor.ndim) == (array.shape, array.nbytes, 2)
        np.testing.assert_array_equal(tensor.materialize(fetch), array)
        assert sum(map(len, tensor.elsewhere)) <= len(array)


def test_neighbours_of_one_tensor_are_fetched_as_one():
    tensor = shadow("t2")
    parts = [tensor[6 * k : 6 * (k + 1)] for k in range(4)]
    joined: Any = np.concatenate(parts)
    assert joined.elsewhere == (Rows("t2", 0, 24),)
    turned: Any = np.concatenate([parts[1], parts[0]])
    assert turned.elsewhere == (Rows("t2", 6, 12), Rows("t2", 0, 6))


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        jnp.asarray,
        np.sum,
        np.stack,
        lambda tensor: tensor + 1,
        lambda tensor: 2.0 * tensor,
        lambda tensor: np.float32(2) - tensor,
        lambda tensor: tensor > tensor,
        lambda tensor: tensor.shard(5, 4),
        lambda tensor: tensor.shard(-1, 4),
        lambda tensor: np.concatenate([tensor, tensor], axis=1),
        lambda tensor: tensor[0],
        lambda tensor: tensor[::2],
        lambda tensor: tensor[:, 0],
        lambda tensor: jax.jit(lambda x: x)(tensor),
        lambda tensor: jax.device_put(tensor),
        lambda tensor: jax.tree.map(np.asarray, {"a": tensor}),
    ],
)
def test_used_as_data_it_says_where_that_is(use):
    with pytest.raises((ShadowError, TypeError), match=r"ShadowTensor|rows 0 to 7 of t0"):
        use(shadow("t0"))


def test_parts_that_do_not_exist_are_named():
    with pytest.raises(ShadowError, match=r"part 5 of 4 .*; parts are 0 to 3, .*rows 0 to 7 of t0"):
        shadow("t0").shard(5, 4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="can't be concatenated with"):
        np.concatenate([shadow("t0"), np.zeros((1, 4), np.float32)])
    with pytest.raises(
        ShadowError, match=r"rows 0 to 7 of t0 were fetched as float32\[6, 3\], but must be float32\[7, 3\]"
    ):
        shadow("t0").materialize(lambda wanted: [np.zeros((6, 3), np.float32)])


def test_a_batch_of_patches_is_laid_out_before_they_are_there():
    def vision(patches_PX, frames):
        count = len(patches_PX)
        segments = np.repeat(np.arange(1, frames + 1, dtype=np.int32), count // frames)
        return VisionInput(patches_PX, np.zeros((count, 2), np.int32), segments, segments, frame_bound=8)

    names = {"t0": 1, "t2": 6}
    here = concatenate([*(vision(THERE[name], frames) for name, frames in names.items()), blank(5, 3)])
    there = concatenate([*(vision(shadow(name), frames) for name, frames in names.items()), blank(5, 3)])
    assert there.num_patches == 36 and pickle.loads(pickle.dumps(there)).patches_PX == there.patches_PX
    leaves = jax.tree.map(lambda x: x.materialize(fetch) if isinstance(x, ShadowTensor) else x, there)
    for ours, expected in zip(jax.tree.leaves(leaves), jax.tree.leaves(here), strict=True):
        np.testing.assert_array_equal(ours, expected)


# --- a prompt of which only sizes are kept says the same to a plan, and is the same when it is laid out


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
