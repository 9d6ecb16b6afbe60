"""Damaged, odd and missing media: the right pixels, or one clear `MediaError`; never a hang, never silently wrong."""

import io
import pickle
import struct
import wave

import av
import numpy as np
import pytest
from media_files import decoded, load_video, moving_frames, whole, write_video
from PIL import Image

from models.processing import MediaError, tiny
from models.processing.images import load_image
from models.processing.settings import FrameSettings, PatchLayout, PixelSettings

LAYOUT = PatchLayout(patch_size=8, window_size=32)
PIXELS = PixelSettings(min_pixels=256, max_pixels=64 * 96)
FRAMES = FrameSettings(num_frames=4)
KINDS = ["image", "video"]


@pytest.fixture(scope="module")
def processor():
    return tiny.build(["<image><video>?"], layout=LAYOUT)


def pixels_of(path):
    return np.asarray(load_image(str(path)))


@pytest.mark.parametrize("kind", KINDS)
def test_missing_empty_and_foreign_files(tmp_path, processor, kind):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"not a medium\n" * 50)
    cases = {"gone": "no such file", ".": "is not a file", "empty": "is empty", "text": "cannot be opened|known format"}
    for name, reason in cases.items():
        with pytest.raises(MediaError, match=reason) as error:
            processor.prepare(f"<{kind}>?", [(kind, str(tmp_path / name))])
        assert str(tmp_path / name) in str(error.value)
    with pytest.raises(MediaError, match="the data is empty"):
        processor.prepare(f"<{kind}>?", [(kind, b"")])


def test_media_errors_cross_process_boundaries():
    error = pickle.loads(pickle.dumps(MediaError("a.png", "no such file")))
    assert (error.path, error.reason, str(error)) == ("a.png", "no such file", "a.png: no such file")


def test_one_pixel(tmp_path, processor):
    Image.new("RGB", (1, 1), (255, 0, 0)).save(tmp_path / "a.png")
    prepared = processor.prepare("<image>?", [("image", str(tmp_path / "a.png"))])
    patches = prepared.vision.patches_PX.reshape(-1, 3, 2 * 64)
    assert len(patches) == 4  # 16 x 16 pixels, all of that colour
    expected = (np.array([1, 0, 0]) - processor.image.mean) / processor.image.std
    np.testing.assert_allclose(patches, np.broadcast_to(expected[:, None], patches.shape), rtol=1e-5)


def test_exif_rotated_jpeg_equals_transformers(tmp_path):
    image_utils = pytest.importorskip("transformers.image_utils", reason="parity needs the `parity` extra")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(moving_frames(1, 24, 40)[0]).save(tmp_path / "a.jpg", exif=exif)
    ours = pixels_of(tmp_path / "a.jpg")
    assert ours.shape == (40, 24, 3)
    np.testing.assert_array_equal(ours, np.asarray(image_utils.load_image(str(tmp_path / "a.jpg"))))


def test_extreme_aspect_ratio(tmp_path, processor):
    Image.new("RGB", (1000, 4)).save(tmp_path / "a.png")
    with pytest.raises(MediaError, match=r"a\.png: the aspect ratio of 1000 x 4 pixels is above 200"):
        processor.prepare("<image>?", [("image", str(tmp_path / "a.png"))])
    Image.new("RGB", (800, 4)).save(tmp_path / "b.png")  # exactly 200: allowed
    assert len(processor.prepare("<image>?", [("image", str(tmp_path / "b.png"))])) > 2


def test_mp4_cut_off_behind_its_index_fails_in_mid_decode(tmp_path):
    path = write_video(tmp_path / "a.mp4", moving_frames(16, 64, 96), options={"movflags": "faststart"})
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(MediaError, match=r"a\.mp4: .*(after \d+ frames|damaged)"):
        load_video(str(path), LAYOUT, PIXELS, FRAMES)


@pytest.mark.parametrize("promised", [2, 13])
def test_header_frame_count_differs_from_the_decoded_one(tmp_path, promised):
    """12 frames; an AVI header says otherwise. What counts is what decodes."""
    path = write_video(tmp_path / "a.avi", moving_frames(12, 32, 48), fps=12, codec="mpeg4")
    honest = load_video(str(path), LAYOUT, PIXELS, FRAMES)
    data = bytearray(path.read_bytes())
    stream_header = data.index(b"strh") + 8
    data[stream_header + 32 : stream_header + 36] = struct.pack("<I", promised)
    path.write_bytes(data)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == promised
    video = load_video(str(path), LAYOUT, PIXELS, FRAMES)
    np.testing.assert_array_equal(video.indices, [0, 3, 6, 9])
    np.testing.assert_array_equal(video.frames, honest.frames)
    assert video.seconds == pytest.approx(1.0, rel=1e-6)


def test_header_without_a_frame_count(tmp_path):
    path = write_video(tmp_path / "a.mkv", moving_frames(12, 32, 48), fps=12)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 0
    video = load_video(str(path), LAYOUT, PIXELS, FrameSettings(fps=2, min_frames=2))
    np.testing.assert_array_equal(video.indices, [0, 6])
    np.testing.assert_array_equal(video.frames, decoded(path)[[0, 6]])


def test_stream_without_timestamps_uses_its_frames_durations(tmp_path):
    """A bare H.264 stream has no timestamps; the demuxer claims 25 frames a second whatever the encoder said."""
    path = write_video(tmp_path / "a.h264", moving_frames(12, 32, 48), fps=12, format="h264")
    video = load_video(str(path), LAYOUT, PIXELS, FRAMES)
    assert len(video.frames) == 4 and video.seconds == pytest.approx(1.0, rel=0.01)


def test_neither_rate_nor_timestamps_is_an_error(tmp_path, monkeypatch):
    """No encoder here writes such a file, so the two readings are taken away."""
    path = write_video(tmp_path / "a.mp4", moving_frames(12, 32, 48))
    monkeypatch.setattr("models.processing.videos.rated", lambda count, stream: None)
    monkeypatch.setattr("models.processing.videos.span", lambda times, durations, base, at_rate: None)
    with pytest.raises(MediaError, match=r"a\.mp4: has neither timestamps nor a frame rate"):
        load_video(str(path), LAYOUT, PIXELS, FRAMES)
    with pytest.raises(MediaError, match=r"a\.mp4: has neither timestamps nor a frame rate"):
        load_video(str(path), LAYOUT, PIXELS, FrameSettings(fps=2))


def test_single_frame_and_sound_without_picture(tmp_path):
    path = write_video(tmp_path / "a.mp4", moving_frames(1, 32, 48))
    assert load_video(str(path), LAYOUT, PIXELS, FrameSettings(fps=2)).frames.shape[0] == 1
    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(16000))
    with pytest.raises(MediaError, match="cannot be opened as a video: it has none of the formats"):
        load_video(str(tmp_path / "a.wav"), LAYOUT, PIXELS, FRAMES)


# --- cut off, with holes, and whole though odd ----------------------------------------------------


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
