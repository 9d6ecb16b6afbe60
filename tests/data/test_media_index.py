"""What is known of media is of one version of their files, and is what decoding shows."""

import sys

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from turns import third_of

from fluxjax.base.types import Media, MediaKind
from fluxjax.data import shadows
from fluxjax.data.loader import open_source
from fluxjax.data.shadows import MediaIndex
from fluxjax.data.tickets import MediaRef, StaleTicket, Ticket, check_ref, read_ref
from models.processing import MediaError
from models.processing.media import MediaSettings
from models.processing.media_file import Facts, MediaUnavailable, Medium
from models.processing.settings import DecodeLimits, FrameSettings, PixelSettings

sys.path.insert(0, str(ROOT / "tests/models"))
from media_files import CODECS, LAYOUT, PIXELS, moving_frames, saved, turn, whole, write_video

SETTINGS = MediaSettings(LAYOUT, PIXELS, PIXELS, FrameSettings(num_frames=4))
MEDIUM = Medium("image", (1, 4, 6))


def ref(number=0, stamp="1-2"):
    return MediaRef("image", f"/media/{number}.png", stamp)


def look(index, refs, settings=SETTINGS):
    """Decodes media, as a store does, and notes what they are."""
    found = []
    for each in refs:
        try:
            medium, _ = settings.load(each.kind, read_ref(each))
            check_ref(each)
            found.append(Ticket(each, settings.digest, medium))
        except MediaError as error:
            found.append(error)
    index.note_all(refs, settings.digest, found)
    return found


# --- values ---------------------------------------------------------------------------------------


def test_what_is_noted_is_known_of_this_version_of_the_file_only():
    index = MediaIndex()
    assert (index.facts(ref()), index.verdict(ref(), "s"), index.medium(ref(), SETTINGS)) == (None, None, None)
    index.note(ref(), Facts(40, 24))
    index.note_all([ref(), ref(1)], "s", [Ticket(ref(), "s", MEDIUM), MediaError("x", "is cut off")])
    assert index.facts(ref()) == Facts(40, 24) and index.verdict(ref(), "s") == MEDIUM
    assert index.verdict(ref(), "t") is None, "of other settings"
    error = index.verdict(ref(1), "s")
    assert isinstance(error, MediaError) and str(error) == "/media/1.png: is cut off"
    cell = MediaRef("image", ref().path, "1-2", "c/0/0")
    for other in (ref(2), ref(stamp="1-3"), MediaRef("video", ref().path, "1-2"), cell):
        assert index.facts(other) is None and index.verdict(other, "s") is None
    index.note(ref(stamp="1-3"), Facts(1, 1))
    assert index.facts(ref()) is None and index.verdict(ref(), "s") is None, "one version of a file is known"
    assert index.facts(ref(stamp="1-3")) == Facts(1, 1)
    index.forget(ref())
    assert index.facts(ref(stamp="1-3")) is None and index.verdict(ref(1), "s") is not None


def test_counted_frames_are_not_forgotten_for_a_headers_word():
    index, counted = MediaIndex(), Facts(8, 8, 9, 1.0)
    for facts in (Facts(8, 8, 7, 1.0, counted=False), counted, Facts(8, 8, 7, 1.0, counted=False)):
        index.note(ref(), facts)
    assert index.facts(ref()) == counted


def test_errors_that_another_time_may_not_have_are_not_kept():
    index = MediaIndex()
    index.note_all([ref()], "s", [MediaUnavailable("x", "no such file")])
    assert index.verdict(ref(), "s") is None
    index.note_all([ref()], "s", [Ticket(ref(), "s", MEDIUM)])
    index.note_all([ref()], "s", [MediaUnavailable("x", "no such file")])
    assert index.verdict(ref(), "s") == MEDIUM
    index.note_all([ref()], "s", [StaleTicket("x", "has changed")])
    assert index.verdict(ref(), "s") is None


def test_media_that_were_not_asked_for_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr(shadows, "KNOWN", 3)
    index = MediaIndex()
    for number in (0, 1, 2, 0, 3):
        index.note(ref(number), Facts(number + 1, 1))
    assert [index.facts(ref(number)) is not None for number in range(4)] == [True, False, True, True]


# --- files --------------------------------------------------------------------------------------------


def encoded(width, height, format):
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    return saved(Image.fromarray(pixels), format)


def test_a_known_file_is_not_looked_at_until_it_is_forgotten(tmp_path):
    index, file = MediaIndex(), tmp_path / "a.png"
    file.write_bytes(encoded(40, 24, "PNG"))
    medium = Media(MediaKind.IMAGE, str(file))
    there = index.ref(medium)
    assert isinstance(look(index, [there])[0], Ticket)
    file.write_bytes(b"other pixels")
    assert index.ref(medium) == there
    with pytest.raises(StaleTicket, match="has changed"):
        read_ref(there)
    index.forget(there)
    assert index.ref(medium).stamp != there.stamp


def test_a_missing_file_is_an_error_and_urls_are_believed():
    index = MediaIndex()
    with pytest.raises(MediaUnavailable, match=r"gone.png: no such file"):
        index.ref(Media(MediaKind.IMAGE, "/gone.png"))
    url = "memory://index/a.png"
    fsspec.filesystem("memory").pipe_file("/index/a.png", encoded(40, 24, "PNG"))
    there = index.ref(Media(MediaKind.IMAGE, url))
    look(index, [there])
    fsspec.filesystem("memory").rm("/index", recursive=True)
    assert index.ref(Media(MediaKind.IMAGE, url)) == there
    assert index.medium(there, SETTINGS) == (SETTINGS.load("image", encoded(40, 24, "PNG"))[0], True)


# --- sizes from facts ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory):
    """Media of many formats: as files, as cells of a parquet file, and by URL."""
    folder = tmp_path_factory.mktemp("kinds")
    images = {f"{format}.x": encoded(50, 31, format) for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")}
    videos = {f"{kind}.y": whole(folder, kind) for kind in CODECS}
    turned = turn(write_video(folder / "turned.mp4", moving_frames(7, 32, 64)), 90)
    videos["turned.y"] = turned.read_bytes()
    rows = []
    for name, data in {**images, **videos, "bad.x": b"no picture", "bad.y": b"no video"}.items():
        (folder / name).write_bytes(data)
        fsspec.filesystem("memory").pipe_file(f"/kinds/{name}", data)
        column = "image" if name.endswith("x") else "video"
        rows += [{column: data}, {column: str(folder / name)}, {column: f"memory://kinds/{name}"}]
    for column in ("image", "video"):
        for form in (bytes, str):
            values = [row[column] for row in rows if isinstance(row.get(column), form)]
            table = pa.table({column: values, "problem": ["?"] * len(values), "answer": ["1"] * len(values)})
            pq.write_table(table, folder / f"{column}-{form.__name__}.parquet", row_group_size=2)
    paths = sorted(folder.glob("*.parquet"))
    sources = [open_source(path, "s") for path in paths]
    yield [medium for source in sources for row in range(len(source)) for medium in source[row].media]
    fsspec.filesystem("memory").rm("/kinds", recursive=True)


@pytest.mark.slow
@settings(max_examples=third_of(25), deadline=None)
@given(
    frames=st.sampled_from([FrameSettings(num_frames=4), FrameSettings(num_frames=30), FrameSettings(fps=2.7)]),
    budget=st.sampled_from([0, 30]),
    most=st.sampled_from([1024, 6144]),
    limits=st.sampled_from([DecodeLimits(), DecodeLimits(pixels=1600), DecodeLimits(frames=8)]),
    data=st.data(),
)
def test_what_facts_tell_is_what_decoding_shows(every_kind, frames, budget, most, limits, data):
    """By whatever settings: facts are noted once."""
    index = MediaIndex()
    pixels = PixelSettings(min_pixels=256, max_pixels=most)
    chosen = MediaSettings(LAYOUT, pixels, pixels, FrameSettings(frames.num_frames, frames.fps), limits)
    for each in data.draw(st.lists(st.sampled_from(every_kind), min_size=1, max_size=4)):
        there = index.ref(each)
        try:
            index.note(there, SETTINGS.facts(there.kind, read_ref(there), count=True))
        except MediaError:
            assert "bad" in there.name or there.cell
            assert index.medium(there, chosen) is None
            continue
        try:
            medium, _ = chosen.load(there.kind, read_ref(there))
        except MediaError as error:
            with pytest.raises(MediaError) as caught:
                index.medium(there, chosen)
            if limits == DecodeLimits():  # others are noticed by FFmpeg, too, which has words of its own
                assert caught.value.reason == error.reason
            continue
        assert index.medium(there, chosen) == (medium, True)


def test_a_headers_word_is_not_the_last():
    index = MediaIndex()
    video = MediaRef("video", "/a.mp4", "1-2")
    index.note(video, Facts(64, 32, 9, 1.0, counted=False))
    assert index.medium(video, SETTINGS) == (Medium("video", (2, 4, 8), 0.5), False)
    index.note(video, Facts(64, 32, 3, 1.0, counted=False))
    assert index.medium(video, SETTINGS) is None, "a count may tell otherwise"
    index.note(video, Facts(64, 32, 3, 1.0))
    with pytest.raises(MediaError, match=r"/a.mp4: .*3 frames"):
        index.medium(video, SETTINGS)
