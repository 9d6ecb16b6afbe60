"""Damaged, odd and missing media: the right pixels, or one clear `MediaError`; never a hang, never silently wrong."""

import io
import pickle

import av
import numpy as np
import pytest
from media_files import ALL, FOUR, LAYOUT, decoded, load, moving_frames, saved, whole, write_video
from PIL import Image
from wild_media import frames, promising, x264

from models.processing import MediaError, tiny
from models.processing.images import load_image
from models.processing.settings import FrameSettings


def test_media_errors_cross_process_boundaries():
    error = pickle.loads(pickle.dumps(MediaError("a.png", "no such file")))
    assert (error.path, error.reason, str(error)) == ("a.png", "no such file", "a.png: no such file")


def test_one_pixel(tmp_path):
    processor = tiny.build(["<image>?"], layout=LAYOUT)
    Image.new("RGB", (1, 1), (255, 0, 0)).save(tmp_path / "a.png")
    prepared = processor.prepare("<image>?", [("image", str(tmp_path / "a.png"))])
    patches = prepared.vision.patches_PX.reshape(-1, 3, 2 * 64)
    assert len(patches) == 4  # 16 x 16 pixels, all of that colour
    expected = (np.array([1, 0, 0]) - processor.image.mean) / processor.image.std
    np.testing.assert_allclose(patches, np.broadcast_to(expected[:, None], patches.shape), rtol=1e-5)


def test_mp4_cut_off_behind_its_index_fails_in_mid_decode(tmp_path):
    path = write_video(tmp_path / "a.mp4", moving_frames(16, 64, 96), options={"movflags": "faststart"})
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(MediaError, match=r"a\.mp4: .*(after \d+ frames|damaged)"):
        load(path)


@pytest.mark.parametrize("promised", [2, 49, 2**32 - 1])
def test_header_frame_count_differs_from_the_decoded_one(tmp_path, promised):
    """48 frames; an AVI header says otherwise. What counts is what decodes; a list of as many frames as the last one
    says would take 34 GB."""
    path = promising(tmp_path / "a.avi", promised)
    video = load(path)
    np.testing.assert_array_equal(video.indices, [0, 12, 24, 36])
    np.testing.assert_array_equal(video.frames, decoded(path)[::12])
    assert video.seconds == pytest.approx(4.0, rel=1e-6)
    assert load(path, ALL).indices.tolist() == list(range(48))


def test_neither_rate_nor_timestamps_is_an_error(tmp_path, monkeypatch):
    """No encoder here writes such a file, so the two readings are taken away."""
    path = write_video(tmp_path / "a.mp4", moving_frames(12, 32, 48))
    monkeypatch.setattr("models.processing.videos.rated", lambda count, stream: None)
    monkeypatch.setattr("models.processing.videos.duration_of", lambda times, durations, base, stream: None)
    for chosen in (FOUR, FrameSettings(fps=2)):
        with pytest.raises(MediaError, match=r"a\.mp4: has neither timestamps nor a frame rate"):
            load(path, chosen)


def test_a_single_frame(tmp_path):
    path = write_video(tmp_path / "a.mp4", moving_frames(1, 32, 48))
    assert load(path, FrameSettings(fps=2)).frames.shape[0] == 1


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


def test_foreign_bytes_behind_a_recording_do_not_matter(tmp_path):
    data = whole(tmp_path, "ts")
    expected = load(data).frames
    np.testing.assert_array_equal(load(data + b"GPS track of a dashboard camera"[1:]).frames, expected)
    assert load(data + data).indices.tolist() == [0, 12, 24, 36]  # two recordings joined


def test_sound_may_go_on_when_the_picture_ends(tmp_path):
    path = x264(tmp_path / "a.mkv", pictures=frames()[:12], sound=True)
    with av.open(str(path), "r") as container:
        assert container.duration and container.duration > 3_900_000
    video = load(path)
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


def photograph(**options):
    return saved(Image.fromarray(moving_frames(1, 480, 640)[0]), "JPEG", quality=90, **options)


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
    even = saved(Image.new("RGB", (2000, 1500), (255, 255, 255)), "JPEG", **options)
    exif = Image.Exif()
    exif[0x9286] = bytes(2000)  # a comment, as cameras reserve it
    for data in (even, photograph(exif=exif, **options), photograph(**options) + bytes(2000)):
        padded = data + bytes(64)  # it is looked at in every case
        np.testing.assert_array_equal(np.asarray(load_image(padded)), np.asarray(Image.open(io.BytesIO(data))))


def test_two_pictures_in_one_file_are_no_hole():
    first = Image.fromarray(moving_frames(1, 48, 64)[0])
    data = saved(first, "MPO", save_all=True, append_images=[first.resize((16, 16))])
    assert load_image(data + bytes(64)).size == (64, 48)
