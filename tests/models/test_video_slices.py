"""A slice of a video is, bit for bit, that part of the whole, and takes little more decoding than it has frames."""

import dataclasses
import tracemalloc

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import ALL, LAYOUT, PIXELS, moving_frames, write_video
from PIL import Image
from wild_media import VIDEOS, frames, remux, x264

from fluxjax.data.decoders import DecodeJob
from fluxjax.data.tickets import MediaRef, Ticket
from models.processing import MediaError
from models.processing.containers import EntryPoints
from models.processing.media import MediaSettings
from models.processing.media_file import Medium, opened
from models.processing.settings import FrameSettings, PixelSettings
from models.processing.video_slices import VideoSlicer

SETTINGS = MediaSettings(LAYOUT, video=PIXELS, frames=ALL)
CHOICES = [
    ALL,
    FrameSettings(num_frames=19),
    FrameSettings(fps=2.7),
    FrameSettings(num_frames=16, max_video_tokens=60),
]
# Kinds that are decoded as a whole: times of packets are missing or wrong, or some frames are not decoded.
WHOLE = {"libx264 in h264", "h264 in avi, times of packets wrong", "begins amid a group"}
WHOLE |= {"hevc begins with an open group"}
# Frames that the last pair takes, at most. From the start come those of which no group but the first begins anew, or of
# a codec that is not known well enough; from the place of a change, those that don't repeat what has changed.
FROM_START = {"h264, open groups", "h264, open groups, ts", "h264, refreshed bit by bit", "h264, one group"}
FROM_START |= {"gif", "mjpeg", "wmv2", "flv1"}
MOST = {**dict.fromkeys(FROM_START, 48), "size changes": 32, "told once": 24}


def slice_of(path, medium, first, last, using=SETTINGS):
    with opened(path) as file:
        return VideoSlicer(file, path, *using._of_videos, medium).slice(range(first, last))


@pytest.fixture(scope="module", params=VIDEOS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def path(kind, tmp_path_factory):
    return str(VIDEOS[kind](tmp_path_factory.mktemp("kind")))


@pytest.fixture(scope="module")
def wholes(path):
    return [(using, *using.load("video", path)) for using in (dataclasses.replace(SETTINGS, frames=f) for f in CHOICES)]


@settings(max_examples=8, deadline=None)
@given(choice=st.sampled_from(range(len(CHOICES))), data=st.data())
def test_a_slice_is_that_part_of_the_whole(path, wholes, choice, data):
    using, medium, whole = wholes[choice]
    pairs, rows, columns = medium.grid
    first = data.draw(st.integers(0, pairs), label="first")
    last = data.draw(st.integers(first, pairs), label="last")
    part = using.load_pairs(path, medium, first, last)
    np.testing.assert_array_equal(part, whole[first * rows * columns : last * rows * columns])
    assert part.dtype == np.uint8


def test_each_kind_is_sliced_with_as_little_decoding_as_its_codec_allows(kind, path):
    medium, whole = SETTINGS.load("video", path)
    pairs, rows, columns = medium.grid
    assert medium.seekable == (kind not in WHOLE)
    if not medium.seekable:
        return
    part = slice_of(path, medium, pairs - 1, pairs)
    assert part is not None
    np.testing.assert_array_equal(SETTINGS._patches(part.frames)[0], whole[-rows * columns :])
    assert part.decoded <= MOST.get(kind, 16)


def test_the_end_of_a_long_video_takes_one_group(tmp_path):
    pictures = np.tile(moving_frames(60, 32, 48), (10, 1, 1, 1))
    path = str(x264(tmp_path / "a.mp4", "keyint=24", pictures=pictures))
    medium, whole = SETTINGS.load("video", path)
    size = medium.grid[1] * medium.grid[2]
    assert medium.grid[0] == 300
    for first, last in ((290, 300), (299, 300), (0, 3), (150, 151)):
        part = slice_of(path, medium, first, last)
        assert part is not None and part.decoded <= 2 * (last - first) + 24 + 2
        np.testing.assert_array_equal(SETTINGS.load_pairs(path, medium, first, last), whole[first * size : last * size])


def test_bytes_and_images(tmp_path):
    data = x264(tmp_path / "a.mp4").read_bytes()
    medium, whole = SETTINGS.load("video", data)
    size = medium.grid[1] * medium.grid[2]
    np.testing.assert_array_equal(SETTINGS.load_pairs(data, medium, 20, 22), whole[20 * size : 22 * size])
    path = str(tmp_path / "a.png")
    Image.fromarray(moving_frames(1, 40, 60)[0]).save(path)
    medium, whole = SETTINGS.load("image", path)
    np.testing.assert_array_equal(SETTINGS.load_pairs(path, medium, 0, 1), whole)


def test_what_is_not_there_and_what_has_changed(tmp_path):
    path = str(x264(tmp_path / "a.mp4"))
    medium, _ = SETTINGS.load("video", path)
    for first, last in ((-1, 2), (3, 2), (0, 25)):
        with pytest.raises(ValueError, match=f"frame pairs {first} to {last} were asked for, but there are 24"):
            SETTINGS.load_pairs(path, medium, first, last)
    assert SETTINGS.load_pairs(path, medium, 7, 7).shape == (0, 3, 128)
    for changed in (frames()[:46], frames(96, 64), frames(48, 80)):  # fewer, turned, smaller
        x264(tmp_path / "a.mp4", pictures=changed)
        with pytest.raises(MediaError, match=r"a\.mp4: has changed since it was preprocessed"):
            SETTINGS.load_pairs(path, medium, 20, 22)
    (tmp_path / "a.mp4").write_bytes(b"nothing")
    with pytest.raises(MediaError, match=r"a\.mp4: cannot be opened"):
        SETTINGS.load_pairs(path, medium, 20, 22)
    (tmp_path / "a.mp4").unlink()
    with pytest.raises(MediaError, match=r"a\.mp4: no such file"):
        SETTINGS.load_pairs(path, medium, 20, 22)


def test_a_frame_that_is_damaged_and_not_sampled_keeps_the_whole_together(tmp_path):
    """What stands in for its parts may come from frames of long before."""
    path = x264(tmp_path / "a.mkv", "keyint=16")
    few = dataclasses.replace(SETTINGS, frames=FrameSettings(num_frames=4))
    intact, _ = few.load("video", str(path))

    def damaged(number, packet):
        if number != 17:
            return packet
        data = bytes(packet)
        result = av.Packet(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        result.pts, result.dts, result.time_base = packet.pts, packet.dts, packet.time_base
        return result

    hurt = str(remux(path, tmp_path / "b.mkv", damaged))
    with av.open(hurt) as container:
        assert any(frame.is_corrupt for frame in container.decode(video=0))
    try:
        medium, patches = few.load("video", hurt)
    except MediaError as error:
        assert "damaged" in str(error) or "decoding fails" in str(error)
        return
    assert intact.seekable and not medium.seekable
    size = medium.grid[1] * medium.grid[2]
    np.testing.assert_array_equal(few.load_pairs(hurt, medium, 1, 2), patches[size : 2 * size])


def test_a_mark_where_refreshing_begins_is_not_gone_by(tmp_path):
    with av.open(str(VIDEOS["h264, refreshed bit by bit"](tmp_path))) as container:
        stream = container.streams.video[0]
        points = EntryPoints(stream)
        packets = [packet for packet in container.demux(stream) if packet.size]
        assert [number for number, packet in enumerate(packets) if points.saw(packet)] == [0]
    assert sum(packet.is_keyframe for packet in packets) > 3


@pytest.mark.parametrize("name", ["h264, refreshed bit by bit", "h264, open groups"])
def test_were_it_gone_by_it_would_show_by_the_times(tmp_path, monkeypatch, name):
    """The decoder gives no frame until one is whole."""
    path = str(VIDEOS[name](tmp_path))
    medium, whole = SETTINGS.load("video", path)
    size = medium.grid[1] * medium.grid[2]
    monkeypatch.setattr(EntryPoints, "saw", lambda self, packet: packet.is_keyframe)
    for first in range(24):
        part = SETTINGS.load_pairs(path, medium, first, first + 1)
        np.testing.assert_array_equal(part, whole[first * size : (first + 1) * size])


def test_tickets_carry_how_a_medium_can_be_read():
    medium = Medium("video", (4, 8, 8), 0.5, seekable=True)
    ticket = Ticket(MediaRef("video", "a.mp4", "1-2"), "0123", medium)
    assert Ticket.parse(str(ticket)).medium.seekable
    timed = dataclasses.replace(medium, times=(0.2, 1.0, 1.8, 12.5))
    assert Ticket.parse(str(dataclasses.replace(ticket, medium=timed))).medium == timed != medium
    job = DecodeJob("a.mp4", "video", "a.mp4", timed, 1, 2)
    assert DecodeJob.of_message(job.to_message()) == job
    assert medium == Medium("video", (4, 8, 8), 0.5), "it is the same medium"


def peak_of(function):
    """The bytes that are held at a time while it runs, at most."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_whole_is_held_once(tmp_path):
    path = str(write_video(tmp_path / "a.mp4", moving_frames(64, 128, 192)))
    using = dataclasses.replace(SETTINGS, video=PixelSettings(256, 128 * 192))
    whole = using.load("video", path)[1].nbytes
    assert peak_of(lambda: using.load("video", path)) < 1.6 * whole
