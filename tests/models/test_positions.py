"""Rotary positions against the authors' rule, window order against transformers' own functions, exactly (integers)."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import parity
from turns import third_of

from models.config import PatchLayout
from models.inputs import concatenate, pad
from models.processing.processor import pack_patches
from models.qwen2_5_vl.positions import rope_index

IMAGE, VIDEO, START, END = 900, 901, 902, 903
MERGE = 2
LAYOUT = PatchLayout(patch_size=14, spatial_merge_size=MERGE, window_size=112)

grids = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)).map(lambda g: (g[0], g[1] * 2, g[2] * 2))
media = st.lists(
    st.one_of(
        st.tuples(st.just("image"), grids.map(lambda g: (1, g[1], g[2])), st.just(0.0)),
        st.tuples(st.just("video"), grids, st.floats(0.05, 5.0)),
        st.tuples(st.just("text"), st.integers(1, 9), st.just(0.0)),
    ),
    min_size=1,
    max_size=7,
)


def prompt_of(items):
    """Token ids of a prompt with these parts, and the grids and times of its media."""
    ids, images, videos, seconds = [1], [], [], []
    for kind, what, time in items:
        if kind == "text":
            ids += range(2, 2 + what)
            continue
        ids += [START, *[IMAGE if kind == "image" else VIDEO] * (int(np.prod(what)) // MERGE**2), END]
        (images if kind == "image" else videos).append(what)
        if kind == "video":
            seconds.append(time)
    return np.array(ids, np.int32), images, videos, seconds


INDEX = functools.partial(rope_index, image_token_id=IMAGE, video_token_id=VIDEO, spatial_merge_size=MERGE)


def positions_of(items, tokens_per_second):
    return INDEX(*prompt_of(items), tokens_per_second=tokens_per_second)


def authors_rule(items, tokens_per_second):
    """Positions `[3, T]` and the next one, token by token as the authors' code defines them (transformers PR 35569).

    Every text token stands one behind the largest position before it, on all axes; a medium begins there, too.
    """
    places, largest = [], -1

    def text(count):
        nonlocal largest
        for _ in range(count):
            largest += 1
            places.append((largest, largest, largest))

    text(1)
    for kind, what, seconds in items:
        if kind == "text":
            text(what)
            continue
        text(1)
        first = largest + 1
        for pair in range(what[0]):
            tick = np.float32(pair) * np.float32(seconds if kind == "video" else 0) * np.float32(tokens_per_second)
            for row in range(what[1] // MERGE):
                for column in range(what[2] // MERGE):
                    places.append((first + int(tick), first + row, first + column))
                    largest = max(largest, *places[-1])
        text(1)
    return np.array(places).T, largest + 1


@settings(max_examples=third_of(150), deadline=None)
@given(items=media, tokens_per_second=st.sampled_from([1, 2, 4, 25]))
def test_rope_index_follows_the_authors_rule(items, tokens_per_second):
    positions, next_position = positions_of(items, tokens_per_second)
    expected, following = authors_rule(items, tokens_per_second)
    np.testing.assert_array_equal(positions, expected)
    assert next_position == following


@settings(max_examples=third_of(50), deadline=None)
@given(items=media)
def test_rope_index_equals_transformers_where_there_is_no_video(items):
    """Behind a video transformers 5.3 and later counts spatial sides only: `positions.py` says who does not."""
    qwen2_5_vl = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
    torch, modeling, transformers = parity("torch", qwen2_5_vl, "transformers")
    items = [item for item in items if item[0] != "video"]
    ids, images, _, _ = prompt_of(items)
    config = transformers.Qwen2_5_VLConfig(vision_config={"spatial_merge_size": MERGE})
    # only its methods are needed: no weights
    model = modeling.Qwen2_5_VLModel.__new__(modeling.Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = config
    expected, delta = model.get_rope_index(
        torch.tensor(ids, dtype=torch.long)[None],
        mm_token_type_ids=torch.tensor((ids == IMAGE) * 1)[None],
        image_grid_thw=torch.tensor(images) if images else None,
    )
    positions, next_position = positions_of(items, 2)
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert next_position == len(ids) + int(delta[0, 0])


def test_text_behind_a_long_video_continues_behind_its_time_axis():
    """The example of transformers issue 45381: 84 frame pairs of 4 ticks, 12 rows, 16 columns; 347 -> 348."""
    items = [("text", 13, 0.0), ("video", (84, 24, 32), 2.0), ("text", 9, 0.0)]
    positions, next_position = positions_of(items, tokens_per_second=2)
    assert positions.shape == (3, 15 + 16128 + 10)
    video, text = positions[:, 15:-10], positions[:, -10:]
    np.testing.assert_array_equal(video[:, 0], 15)
    np.testing.assert_array_equal(video[:, -1], [347, 26, 30])
    np.testing.assert_array_equal(text, [np.arange(348, 358)] * 3)
    assert next_position == 358


def test_a_video_at_the_end_of_a_prompt_is_followed_by_the_answer():
    ids = np.array([1, START, *[VIDEO] * 8], np.int32)
    assert INDEX(ids, [], [(8, 2, 2)], [3.0], tokens_per_second=2)[1] == 2 + 7 * 6 + 1


def test_ticks_are_rounded_as_the_authors_round_them():
    """Ticks are float32 products, the frame pair's time first: the other order differs in one case of some hundred."""
    torch = parity("torch")
    rng = np.random.default_rng(0)
    swapped = 0
    for seconds in np.concatenate([2 / rng.integers(1, 60, 200), rng.uniform(0.05, 2, 100)]).astype(np.float32):
        ticks = (torch.arange(96) * torch.tensor(seconds) * 25).long().numpy()
        positions, _ = positions_of([("video", (96, 2, 2), float(seconds))], tokens_per_second=25)
        np.testing.assert_array_equal(positions[0, 2:-1] - 2, ticks)
        swapped += np.count_nonzero(ticks != (torch.arange(96) * (25 * torch.tensor(seconds))).long().numpy())
    assert swapped, "else the order of factors is not tested"


@pytest.mark.parametrize(
    ("images", "videos", "seconds"),
    [([], [], []), ([(1, 4, 4), (1, 2, 2)], [], []), ([(1, 2, 2)], [], []), ([(1, 4, 4)], [(1, 2, 2)], [])],
)
def test_rope_index_refuses_grids_that_do_not_match(images, videos, seconds):
    ids, *_ = prompt_of([("image", (1, 4, 4), 0.0)])
    with pytest.raises(ValueError, match=r"placeholders|frame pair|seconds_per_grid"):
        INDEX(ids, images, videos, seconds, tokens_per_second=2)


@pytest.mark.medium
@settings(max_examples=third_of(100), deadline=None)
@given(sizes=st.lists(grids, min_size=1, max_size=4), window=st.sampled_from([28, 56, 84, 112]))
def test_window_order_equals_transformers(sizes, window):
    torch, vision = parity("torch", "transformers.vision_utils")
    layout = dataclasses.replace(LAYOUT, window_size=window)
    num_patches = sum(int(np.prod(size)) for size in sizes)
    patches = np.arange(num_patches, dtype=np.float32)[:, None]
    packed, feature_order = pack_patches(patches, sizes, layout)

    grid = torch.tensor(sizes)
    index, window_ends = vision.get_vision_window_index(grid, MERGE, window, layout.patch_size)
    frame_ends = vision.get_vision_cu_seqlens(grid)
    positions = vision.get_vision_position_ids(grid, MERGE).numpy()
    order = (index.numpy()[:, None] * MERGE**2 + np.arange(MERGE**2)).ravel()
    np.testing.assert_array_equal(packed.patches_PX[:, 0], order)
    np.testing.assert_array_equal(packed.positions_P2, positions[order])
    np.testing.assert_array_equal(feature_order, np.argsort(index.numpy()))
    rows = np.arange(num_patches)
    np.testing.assert_array_equal(packed.window_segments_P, np.searchsorted(window_ends.numpy(), rows, "right"))
    np.testing.assert_array_equal(packed.frame_segments_P, np.searchsorted(frame_ends.numpy(), rows, "right"))


@settings(max_examples=third_of(50), deadline=None)
@given(sizes=st.lists(grids, min_size=2, max_size=4), extra=st.integers(0, 9))
def test_concatenating_is_packing_together(sizes, extra):
    counts = [int(np.prod(size)) for size in sizes]
    patches = np.arange(sum(counts), dtype=np.float32)[:, None]
    together, _ = pack_patches(patches, sizes, LAYOUT)
    splits = np.split(patches, np.cumsum(counts)[:-1])
    joined = concatenate([pack_patches(p, [size], LAYOUT)[0] for p, size in zip(splits, sizes, strict=True)])
    for name in ("patches_PX", "positions_P2", "frame_segments_P", "window_segments_P"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(together, name))
        assert getattr(joined, name).dtype == getattr(together, name).dtype

    assert joined.frame_bound == together.frame_bound >= max(np.bincount(together.frame_segments_P))

    padded = pad(together, sum(counts) + extra)
    assert padded.num_patches == sum(counts) + extra
    assert not padded.frame_segments_P[sum(counts) :].any() and not padded.window_segments_P[sum(counts) :].any()
    # padding inside a part stays padding, and ids go on behind it
    again = concatenate([padded, together])
    assert again.frame_segments_P[-1] == 2 * together.frame_segments_P[-1]
    assert np.count_nonzero(again.window_segments_P == 0) == extra


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="hold 16"):
        pack_patches(np.zeros((12, 3), np.float32), [(1, 4, 4)], LAYOUT)
    with pytest.raises(ValueError, match="multiples of the merge size"):
        pack_patches(np.zeros((6, 3), np.float32), [(1, 2, 3)], LAYOUT)
    with pytest.raises(ValueError, match="do not fit into 3"):
        pad(pack_patches(np.zeros((4, 3), np.float32), [(1, 2, 2)], LAYOUT)[0], 3)
    with pytest.raises(ValueError, match="vision=None"):
        concatenate([])
