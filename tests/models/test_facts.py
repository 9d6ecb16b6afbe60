"""What headers and packets say of a medium equals what decoding it shows."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import ALL, CODECS, LAYOUT, exif_of, load_video, moving_frames, saved, turn, whole, write_video
from PIL import Image
from turns import third_of

from models.processing import MediaError, tiny
from models.processing.images import image_facts, load_image
from models.processing.media_file import Facts
from models.processing.settings import DecodeLimits, FrameSettings, PixelSettings
from models.processing.videos import video_facts
from models.shadow import ShadowTensor

LIMITS = DecodeLimits()
FORMATS = ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "GIF", "BMP", "PPM", "JPEG2000"]


def encoded(width, height, format, orientation=None):
    turned = orientation is not None and format in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")
    options = {"exif": exif_of(orientation or 0)} if turned else {}
    return saved(Image.fromarray(moving_frames(1, height, width)[0]), format, **options)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=third_of(12), deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.none() | st.integers(0, 9))
def test_an_image_is_as_large_as_its_header_says(format, width, height, orientation):
    data = encoded(width, height, format, orientation)
    assert image_facts(data, LIMITS) == Facts(*load_image(data).size)


@pytest.mark.parametrize("orientation", [1, 6])
def test_an_orientation_behind_the_pixels_counts(orientation):
    png = encoded(40, 24, "PNG", orientation)
    place = png.index(b"eXIf") - 4  # behind its size
    stop = place + 12 + int.from_bytes(png[place : place + 4])
    moved = png[:place] + png[stop:-12] + png[place:stop] + png[-12:]  # the last chunk, IEND, has 12 bytes
    assert image_facts(moved, LIMITS) == Facts(*load_image(moved).size)
    assert image_facts(moved, LIMITS).width == (24 if orientation == 6 else 40)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP"])
def test_no_pixel_is_decoded(format, monkeypatch):
    data = encoded(40, 24, format, 6)
    expected = image_facts(data, LIMITS)

    def load(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    monkeypatch.setattr("PIL.WebPImagePlugin.WebPImageFile.load", load)
    assert image_facts(data, LIMITS) == expected


def test_an_image_beyond_the_limit_is_refused_by_its_header():
    with pytest.raises(MediaError, match="too many pixels: 40 x 24"):
        image_facts(encoded(40, 24, "PNG"), DecodeLimits(pixels=959))
    with pytest.raises(MediaError, match="not an image in a known format"):
        image_facts(b"nothing", LIMITS)


def decoded_facts(data):
    """Size, number and duration of all frames, as decoding shows them; sides are multiples of 16."""
    video = load_video(data, LAYOUT, PixelSettings(min_pixels=1, max_pixels=1 << 30), ALL)
    _, height, width, _ = video.frames.shape
    return Facts(width, height, len(video.frames), video.seconds)


@pytest.mark.parametrize("kind", CODECS)
def test_the_packets_of_a_video_say_what_decoding_shows(tmp_path, kind):
    data = whole(tmp_path, kind)
    assert video_facts(data, LIMITS, count=True) == decoded_facts(data)
    by_header = video_facts(data, LIMITS)
    if not by_header.counted:
        assert (by_header.frames, by_header.seconds) == (24, pytest.approx(decoded_facts(data).seconds, rel=0.05))


@settings(max_examples=third_of(15), deadline=None)
@given(st.lists(st.integers(10, 900), min_size=1, max_size=12))
def test_frames_at_any_times_last_as_long(tmp_path_factory, gaps):
    times = np.cumsum([0, *gaps]).tolist()
    path = write_video(tmp_path_factory.mktemp("times") / "a.mkv", moving_frames(len(times), 32, 48), times=times)
    assert video_facts(str(path), LIMITS, count=True) == decoded_facts(str(path))


def test_a_header_without_a_count_is_not_asked(tmp_path):
    assert video_facts(whole(tmp_path, "h264"), LIMITS).counted
    with pytest.raises(MediaError, match="too many frames: more than 23"):
        video_facts(whole(tmp_path, "ivf"), DecodeLimits(frames=23), count=True)
    with pytest.raises(MediaError, match="cannot be opened as a video"):
        video_facts(b"nothing", LIMITS)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "a.png").write_bytes(encoded(200, 40, "PNG"))
    (folder / "b.jpg").write_bytes(encoded(33, 90, "JPEG", 6))
    write_video(
        folder / "c.mkv", moving_frames(11, 48, 96), times=[0, 40, 90, 400, 410, 800, 900, 930, 1500, 2000, 2100]
    )
    turn(write_video(folder / "d.mp4", moving_frames(9, 32, 64)), 90)
    write_video(folder / "e.mpg", moving_frames(7, 64, 48), fps=25, codec="mpeg1video")
    return folder


@pytest.mark.medium
@settings(max_examples=third_of(40), deadline=None)
@given(
    names=st.lists(st.sampled_from(["a.png", "b.jpg", "c.mkv", "d.mp4", "e.mpg"]), max_size=4),
    frames=st.sampled_from(
        [FrameSettings(num_frames=4), FrameSettings(num_frames=7), FrameSettings(fps=2.7), FrameSettings(fps=40), ALL]
    ),
    budget=st.sampled_from([0, 30]),
    most=st.sampled_from([1024, 6144]),
)
def test_an_outline_is_the_prompt_without_pixels(files, names, frames, budget, most):
    pixels = PixelSettings(min_pixels=256, max_pixels=most)
    processor = dataclasses.replace(
        tiny.build(["<image><video>?"], layout=LAYOUT),
        image=pixels,
        video=pixels,
        frames=dataclasses.replace(frames, max_video_tokens=budget),
    )
    media = [("image" if name < "c" else "video", str(files / name)) for name in names]
    ids = processor.tokenise("".join(f"<{kind}>" for kind, _ in media) + "?", media)
    try:
        prompt = processor.prepare_ids(ids, media)
    except MediaError as error:  # too few frames
        with pytest.raises(MediaError, match=re.escape(str(error))):
            processor.outline(ids, media, count=True)
        return
    sizes = processor.outline(ids, media, count=True)
    patches = [] if prompt.vision is None else np.bincount(prompt.vision.frame_segments_P)
    assert sizes.certain
    assert (len(sizes), sizes.num_patches) == (len(prompt), sum(patches))
    assert sizes.largest_frame == max(patches, default=0)
    laid_out = processor.lay_out(sizes, ShadowTensor.of("there", (sizes.num_patches, 384), np.float32))
    for field in ("token_ids_T", "positions_3T", "feature_index_T", "next_position"):
        np.testing.assert_array_equal(getattr(laid_out, field), getattr(prompt, field), err_msg=field)
    if prompt.vision is not None:
        assert laid_out.vision.patches_PX.shape == prompt.vision.patches_PX.shape
        for field in ("positions_P2", "frame_segments_P", "window_segments_P", "frame_bound"):
            np.testing.assert_array_equal(getattr(laid_out.vision, field), getattr(prompt.vision, field))


def test_a_header_that_says_too_few_frames_is_counted(files, monkeypatch):
    """`num_frames` can't be had of what it says."""
    processor = tiny.build(["<video>?"], layout=LAYOUT)
    asked = []

    def lying(source, limits, *, count=False):
        asked.append(count)
        facts = video_facts(source, limits, count=count)
        return facts if count else Facts(facts.width, facts.height, 1, 0.1, counted=False)

    monkeypatch.setattr("models.processing.media.video_facts", lying)
    media = [("video", str(files / "d.mp4"))]
    sizes = processor.configured(num_frames=4).outline(processor.tokenise("<video>?", media), media)
    assert asked == [False, True] and sizes.grids[0][0] == 2 and sizes.certain
