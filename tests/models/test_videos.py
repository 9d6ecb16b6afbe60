"""Videos to patches, equal to transformers' to the last bit.

`Qwen2VLVideoProcessor` (transformers 5.23) needs torchvision, which is not installed here. So real files are compared
with the steps that class runs, written out in torch (`expected_patches`: torchvision's resize of bytes is
`torch.nn.functional.interpolate`), on frames decoded by transformers' own reader; and a golden file holds what
the class itself returned (`make_video_golden.py`) for generated frames.
"""

import hashlib
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import load_video, moving_frames, parity, write_video
from turns import third_of

from models.processing.images import smart_resize
from models.processing.patches import normalise, patchify, resize_frame
from models.processing.settings import VIDEO_PIXELS, FrameSettings, PatchLayout, PixelSettings, read_frames
from models.processing.videos import sample_indices

GOLDEN = json.loads((pathlib.Path(__file__).parent / "goldens" / "video_processor.json").read_text())
SMALL = PatchLayout(patch_size=4)
SMALL_PIXELS = PixelSettings(min_pixels=16 * 16, max_pixels=24 * 32)
ALL = FrameSettings(num_frames=0, fps=0)


def expected_patches(frames, layout, pixels):
    """The published steps in torch: fixed-point bicubic resize, fused rescale and normalise, raster patches."""
    torch = parity("torch")
    height, width = smart_resize(frames.shape[1], frames.shape[2], layout.factor, pixels.min_pixels, pixels.max_pixels)
    video = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
    video = torch.nn.functional.interpolate(video, (height, width), mode="bicubic", antialias=True)
    mean, std = torch.tensor(pixels.mean) * 255.0, torch.tensor(pixels.std) * 255.0
    video = (video.float() - mean[:, None, None]) / std[:, None, None]
    time, patch, merge = layout.temporal_patch_size, layout.patch_size, layout.spatial_merge_size
    if missing := -len(video) % time:
        video = torch.cat([video, video[-1:].expand(missing, -1, -1, -1)])
    grid = (len(video) // time, height // patch, width // patch)
    blocks = video.view(grid[0], time, 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch)
    return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(np.prod(grid), -1).numpy(), grid


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1.mp4", "2.avi"])
@pytest.mark.parametrize(
    ("pixels", "frames"),
    [
        (VIDEO_PIXELS, FrameSettings()),
        (PixelSettings(min_pixels=3136, max_pixels=50176), FrameSettings(num_frames=5)),
        (PixelSettings(min_pixels=3136, max_pixels=50176), FrameSettings(fps=0.3)),
    ],
)
def test_real_videos_equal_transformers(shared, name, pixels, frames):
    video_utils = parity("transformers.video_utils")
    path, layout = str(shared / "data" / "media" / name), PatchLayout()
    every, metadata = video_utils.load_video(path, backend="pyav")
    metadata.frames_indices = sample_indices(len(every), len(every) / metadata.fps, frames, 2)

    video = load_video(path, layout, pixels, frames)
    np.testing.assert_array_equal(video.indices, metadata.frames_indices)
    assert video.seconds_per_grid(2) == pytest.approx(2 / metadata.sampled_fps, rel=1e-12)
    expected, grid = expected_patches(every[video.indices], layout, pixels)
    patches, own_grid = patchify(video.frames, layout)
    assert own_grid == grid
    np.testing.assert_array_equal(normalise(patches, pixels, fused=True), expected)


@pytest.mark.parametrize("case", GOLDEN["pixels"], ids=lambda case: str(case["setting"]))
def test_pixels_equal_the_published_class(case):
    every = moving_frames(7, 30, 44)
    frames = read_frames(case["setting"]) if case["setting"] else ALL
    chosen = every[sample_indices(7, 3.5, frames, 2)]
    height, width = smart_resize(30, 44, SMALL.factor, SMALL_PIXELS.min_pixels, SMALL_PIXELS.max_pixels)
    patches, grid = patchify(np.stack([resize_frame(frame, height, width) for frame in chosen]), SMALL)
    assert list(grid) == case["grid"]
    assert hashlib.sha256(normalise(patches, SMALL_PIXELS, fused=True).tobytes()).hexdigest() == case["sha256"]


@pytest.mark.parametrize("case", GOLDEN["sampling"], ids=lambda case: f"{case['total']} {case['setting']}")
def test_sampling_equals_the_published_class(case):
    indices = sample_indices(case["total"], case["total"] / case["fps"], read_frames(case["setting"]), 2)
    assert indices.tolist() == case["indices"]


@settings(max_examples=third_of(200), deadline=None)
@given(total=st.integers(1, 3000), seconds=st.floats(0.01, 500.0), fps=st.floats(0.1, 60.0), patch=st.integers(1, 3))
def test_sampled_frames_exist_and_fill_patches(total, seconds, fps, patch):
    frames = FrameSettings(fps=fps, max_frames=64)
    indices = sample_indices(total, seconds, frames, patch)
    assert indices[0] >= 0 and indices[-1] < total and np.all(np.diff(indices) > 0)
    assert len(indices) % patch == 0 or (len(indices) == 1 and total < patch)
    assert len(indices) <= 64


@settings(max_examples=third_of(60), deadline=None)
@given(
    source=st.tuples(st.integers(2, 90), st.integers(2, 90)),
    target=st.tuples(st.integers(8, 60), st.integers(8, 60)),  # torch's own kernel fails at a single pixel
    seed=st.integers(0, 99),
)
def test_resizing_equals_torch(source, target, seed):
    torch = parity("torch")
    frame = np.random.default_rng(seed).integers(0, 256, (*source, 3), dtype=np.uint8)
    planes = torch.from_numpy(frame).permute(2, 0, 1)[None].contiguous()
    expected = torch.nn.functional.interpolate(planes, target, mode="bicubic", antialias=True)
    np.testing.assert_array_equal(resize_frame(frame, *target), expected[0].permute(1, 2, 0).numpy())


def test_threads_of_large_videos_decode_the_same(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", moving_frames(24, 64, 96))
    frames = FrameSettings(num_frames=8)
    single = load_video(str(path), SMALL, SMALL_PIXELS, frames)
    monkeypatch.setattr("models.processing.videos.SMALL_VIDEO", 0)
    threaded = load_video(str(path), SMALL, SMALL_PIXELS, frames)
    np.testing.assert_array_equal(single.frames, threaded.frames)


def test_a_video_budget_bounds_many_frames(tmp_path):
    """`cap_pixels_per_frame`: an even share of the budget, but never below 1.05 times `min_pixels`."""
    path = write_video(tmp_path / "a.mp4", moving_frames(8, 64, 96))
    pixels = PixelSettings(min_pixels=256, max_pixels=64 * 96)
    plain = load_video(str(path), SMALL, pixels, FrameSettings(num_frames=8))
    capped = load_video(str(path), SMALL, pixels, FrameSettings(num_frames=8, max_video_tokens=100))
    assert plain.frames.shape[1:3] == (64, 96)
    height, width = capped.frames.shape[1:3]
    assert (height, width) == smart_resize(64, 96, 8, 256, int(100 * 64 * 0.9) * 2 // 8)


@pytest.mark.parametrize("ending", ["avi", "mp4", "mkv"])
@pytest.mark.parametrize("encoding", ["gbk", "cp1251", "shift_jis"])
def test_titles_in_any_encoding_do_no_harm(tmp_path, ending, encoding):
    titles = {"gbk": "\u89c6\u9891", "cp1251": "\u0412\u0438\u0434\u0435", "shift_jis": "\u52d5\u753b"}
    title = titles[encoding].encode(encoding)
    path = write_video(tmp_path / f"a.{ending}", moving_frames(4, 16, 24), title="T" * len(title))
    named, whole = load_video(str(path), SMALL, SMALL_PIXELS, ALL), path.read_bytes()
    assert whole.count(b"T" * len(title)) == 1
    path.write_bytes(whole.replace(b"T" * len(title), title))
    np.testing.assert_array_equal(load_video(str(path), SMALL, SMALL_PIXELS, ALL).frames, named.frames)


def test_frames_are_not_chosen_where_a_checkpoint_says_so():
    for more in ({}, {"fps": 2}, {"num_frames": 4}):
        frames = read_frames({"do_sample_frames": False} | more)
        assert len(sample_indices(100, 4.0, frames, 2)) == 100
    for config in ({"do_sample_frames": True}, {"do_sample_frames": None}, {}):
        assert len(sample_indices(100, 4.0, read_frames(config), 2)) == 8
