"""Files that were cut off or have holes are refused by name; odd files that are whole are not."""

import io

import av
import numpy as np
import pytest
from media_files import moving_frames, whole, write_video
from PIL import Image

from models.processing import MediaError
from models.processing.images import load_image
from models.processing.settings import FrameSettings, PatchLayout, PixelSettings
from models.processing.videos import load_video

LAYOUT = PatchLayout(patch_size=8, window_size=32)
PIXELS = PixelSettings(min_pixels=256, max_pixels=64 * 96)
FRAMES = FrameSettings(num_frames=4)


def load(data):
    return load_video(data, LAYOUT, PIXELS, FRAMES)


@pytest.mark.parametrize(("kind", "reason"), [("mkv", r"of 2\.00 seconds are there"), ("ts", "is damaged|within a")])
def test_matroska_and_transport_streams_say_that_they_were_cut_off(tmp_path, kind, reason):
    """Decoders report nothing in either: 13 of 24 frames come out, and the file seems shorter."""
    data = whole(tmp_path, kind)
    (tmp_path / f"b.{kind}").write_bytes(data[: len(data) * 6 // 10])
    with pytest.raises(MediaError, match=rf"b\.{kind}: (is cut off: .*)?({reason})"):
        load_video(str(tmp_path / f"b.{kind}"), LAYOUT, PIXELS, FRAMES)
    with av.open(str(tmp_path / f"b.{kind}")) as container:
        assert 0 < len(list(container.decode(video=0))) < 24


def test_a_transport_stream_is_refused_wherever_a_packet_is_cut(tmp_path):
    data = whole(tmp_path, "ts")
    for stop in range(len(data) // 3, len(data), 997):
        if stop % 188:
            with pytest.raises(MediaError):
                load(data[:stop])


def test_matroska_misses_little_more_than_the_longest_frame(tmp_path):
    data = whole(tmp_path, "mkv")
    refused = []
    for stop in range(len(data) // 3, len(data), 499):
        with av.open(io.BytesIO(data[:stop]), "r") as container:
            frames = len(list(container.decode(video=0)))
        try:
            load(data[:stop])
        except MediaError:
            refused.append(frames)
        else:
            assert frames >= 22
    assert min(refused) < 10 and max(refused) >= 20


# --- whole, though odd --------------------------------------------------------------------------


def test_foreign_bytes_behind_a_recording_do_not_matter(tmp_path):
    data = whole(tmp_path, "ts")
    expected = load(data).frames
    np.testing.assert_array_equal(load(data + b"GPS track of a dashboard camera"[1:]).frames, expected)
    assert load(data + data).indices.tolist() == [0, 12, 24, 36]  # two recordings joined


def test_a_live_recording_declares_no_length(tmp_path):
    data = whole(tmp_path, "mkv", options={"live": "1"})
    with av.open(io.BytesIO(data), "r") as container:
        assert container.duration is None
    assert load(data).indices.tolist() == [0, 6, 12, 18]


def test_sound_may_go_on_when_the_picture_ends(tmp_path):
    with av.open(str(tmp_path / "a.mkv"), "w") as output:
        video, audio = output.add_stream("libx264", rate=12), output.add_stream("aac", rate=8000)
        video.height, video.width, video.pix_fmt = 64, 96, "yuv420p"
        for pixels in moving_frames(12, 64, 96):
            output.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(video.encode())
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 40_000), np.float32), format="fltp", layout="mono")
        sound.rate = 8000
        output.mux(audio.encode(sound))
        output.mux(audio.encode())
    with av.open(str(tmp_path / "a.mkv"), "r") as container:
        assert container.duration and container.duration > 4_900_000
    video = load_video(str(tmp_path / "a.mkv"), LAYOUT, PIXELS, FRAMES)
    assert video.indices.tolist() == [0, 3, 6, 9] and video.seconds == pytest.approx(1.0, abs=0.01)


def test_the_last_frame_may_stand_for_long(tmp_path):
    """As in a recorded lecture: frames come when something changes."""
    times = [0, 40, 80, 3000, 3040, 6000]
    path = write_video(tmp_path / "a.mkv", moving_frames(6, 64, 96), fps=25, times=times)
    data = path.read_bytes()
    declared = data.index(b"\x44\x89\x88") + 3  # the duration's element: eight bytes of float follow
    data = data[:declared] + np.array(8500.0, ">f8").tobytes() + data[declared + 8 :]
    with av.open(io.BytesIO(data), "r") as container:
        assert container.duration == 8_500_000
    assert load(data).indices.tolist() == [0, 1, 3, 4]


# --- JPEG ---------------------------------------------------------------------------------------


def photograph(**options):
    file = io.BytesIO()
    Image.fromarray(moving_frames(1, 480, 640)[0]).save(file, "JPEG", quality=90, **options)
    return file.getvalue()


VARIANTS = [{}, {"optimize": True}, {"progressive": True}, {"restart_marker_rows": 2}, {"subsampling": 0}]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_jpeg_with_a_hole_is_refused(tmp_path, options):
    """Pillow decodes it without a word, and what stands behind the hole is garbled."""
    data = photograph(**options)
    for at in (len(data) // 3, len(data) // 2, len(data) * 2 // 3):
        damaged = data[:at] + bytes(4096) + data[at + 4096 :]
        with Image.open(io.BytesIO(damaged)) as image:
            image.load()
        (tmp_path / "a.jpg").write_bytes(damaged)
        for source in (damaged, str(tmp_path / "a.jpg")):
            with pytest.raises(MediaError, match="is damaged: zeros stand where its picture should be"):
                load_image(source)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_a_jpeg_that_was_cut_off_is_refused(options):
    data = photograph(**options)
    for percent in (20, 50, 90):
        with pytest.raises(MediaError, match="truncated"):
            load_image(data[: len(data) * percent // 100])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_zeros_that_belong_there_are_no_hole(options):
    even = io.BytesIO()
    Image.new("RGB", (2000, 1500), (255, 255, 255)).save(even, "JPEG", **options)
    exif = Image.Exif()
    exif[0x9286] = bytes(2000)  # a comment, as cameras reserve it
    for data in (even.getvalue(), photograph(exif=exif, **options), photograph(**options) + bytes(2000)):
        padded = data + bytes(64)  # it is looked at in every case
        np.testing.assert_array_equal(np.asarray(load_image(padded)), np.asarray(Image.open(io.BytesIO(data))))


def test_two_pictures_in_one_file_are_no_hole():
    file, first = io.BytesIO(), Image.fromarray(moving_frames(1, 48, 64)[0])
    first.save(file, "MPO", save_all=True, append_images=[first.resize((16, 16))])
    assert load_image(file.getvalue() + bytes(64)).size == (64, 48)
