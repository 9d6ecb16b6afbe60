"""Damaged, odd and missing media: the right pixels, or one clear `MediaError`; never a hang, never silently wrong."""

import pickle
import struct
import wave

import av
import numpy as np
import pytest
from media_files import decoded, moving_frames, write_video
from PIL import Image

from models.processing import MediaError, tiny
from models.processing.images import load_image
from models.processing.settings import FrameSettings, PatchLayout, PixelSettings
from models.processing.videos import load_video

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
