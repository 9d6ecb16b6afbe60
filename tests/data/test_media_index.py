"""What is known of media outlives a run, damage and killed processes, and is never wrong."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

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
from fluxjax.data import media_index
from fluxjax.data.media_index import MediaIndex
from fluxjax.data.media_refs import check_ref, read_ref
from fluxjax.data.sources import open_source
from fluxjax.data.tickets import MediaRef, StaleTicket, Ticket
from models.processing import MediaError
from models.processing.facts import Facts
from models.processing.media import MediaSettings
from models.processing.media_file import MediaUnavailable
from models.processing.outline import Medium
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


@pytest.fixture
def at_once(monkeypatch):
    """Folders are believed as soon as they are written."""
    monkeypatch.setattr(media_index, "SETTLED", 0.0)


# --- values ---------------------------------------------------------------------------------------


def test_what_is_noted_is_known_to_the_next_run(tmp_path):
    index = MediaIndex(tmp_path)
    assert (index.facts(ref()), index.verdict(ref(), "s"), index.medium(ref(), SETTINGS)) == (None, None, None)
    index.note(ref(), facts=Facts(40, 24), settings="s", verdict=MEDIUM)
    index.note(ref(1), facts=Facts(40, 24, 9, 1.5, counted=False), settings="s", verdict=MediaError("x", "is cut off"))
    index.note(ref(1), settings="t", verdict=Medium("video", (2, 4, 6), 0.7))
    again = MediaIndex(tmp_path)
    for known in (index, again):
        assert known.facts(ref()) == Facts(40, 24) and known.verdict(ref(), "s") == MEDIUM
        assert known.verdict(ref(), "t") is None, "of other settings"
        assert known.facts(ref(1)) == Facts(40, 24, 9, 1.5, counted=False)
        assert known.verdict(ref(1), "t") == Medium("video", (2, 4, 6), 0.7)
        error = known.verdict(ref(1), "s")
        assert isinstance(error, MediaError) and str(error) == "/media/1.png: is cut off"
        for other in (
            ref(2),
            ref(stamp="1-3"),
            MediaRef("video", ref().path, "1-2"),
            MediaRef("image", ref().path, "1-2", "c/0/0"),
        ):
            assert known.facts(other) is None and known.verdict(other, "s") is None
    again.note(ref(stamp="1-3"), facts=Facts(1, 1))
    assert index.facts(ref()) is None and index.verdict(ref(), "s") is None, "one version of a file is known"
    assert index.facts(ref(stamp="1-3")) == Facts(1, 1)
    index.forget(ref())
    assert again.facts(ref(stamp="1-3")) is None and again.facts(ref(1)) is not None


def test_counted_frames_are_not_forgotten_for_a_headers_word(tmp_path):
    index, counted = MediaIndex(tmp_path), Facts(8, 8, 9, 1.0)
    for facts in (Facts(8, 8, 7, 1.0, counted=False), counted, Facts(8, 8, 7, 1.0, counted=False)):
        index.note(ref(), facts=facts)
    assert index.facts(ref()) == counted


def test_errors_that_another_time_may_not_have_are_not_kept(tmp_path):
    index = MediaIndex(tmp_path)
    index.note(ref(), settings="s", verdict=MediaUnavailable("x", "no such file"))
    assert index.verdict(ref(), "s") is None
    index.note(ref(), settings="s", verdict=MEDIUM)
    index.note_all([ref()], "s", [MediaUnavailable("x", "no such file")])
    assert index.verdict(ref(), "s") == MEDIUM
    index.note_all([ref()], "s", [StaleTicket("x", "has changed")])
    assert index.verdict(ref(), "s") is None


def test_a_medium_takes_about_a_hundred_bytes_whatever_is_noted(tmp_path):
    index = MediaIndex(tmp_path)
    refs = [MediaRef("image", f"/{'long/' * 300}{i}.png", f"{10**6 + i}-{10**18 + i}") for i in range(400)]
    index.note_all(refs, SETTINGS.digest, [Ticket(each, SETTINGS.digest, MEDIUM) for each in refs])
    index.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 200 * len(refs)
    for number in range(10):
        index.note(ref(), settings=f"{number:016}", verdict=MediaError("x", "long " * 1000))
    index.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 200 * len(refs)
    assert [bool(index.verdict(ref(), f"{number:016}")) for number in range(4, 10)] == [False] * 2 + [True] * 4


# --- files --------------------------------------------------------------------------------------------


def encoded(width, height, format):
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    return saved(Image.fromarray(pixels), format)


@pytest.fixture
def media(tmp_path):
    """A folder of an image, a video, a file that is neither, and their media."""
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a.png").write_bytes(encoded(40, 24, "PNG"))
    (folder / "b.jpg").write_bytes(b"no picture")
    write_video(folder / "c.mp4", moving_frames(9, 32, 64))
    kinds = {"a.png": MediaKind.IMAGE, "b.jpg": MediaKind.IMAGE, "c.mp4": MediaKind.VIDEO}
    return [Media(kind, str(folder / name)) for name, kind in kinds.items()]


def told(said):
    return str(said) if isinstance(said, MediaError) else said.medium if isinstance(said, Ticket) else said


@contextlib.contextmanager
def touched(monkeypatch):
    """The files that are opened, and those of which the size and times are asked."""
    names, listening = [], [True]
    sys.addaudithook(lambda event, args: listening and event == "open" and names.append(str(args[0])))
    stat = os.stat
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path, **options: names.append(str(path)) or stat(path, **options))
        yield names
    listening.clear()


def test_a_second_start_touches_no_file(tmp_path, media, at_once, monkeypatch):
    first = MediaIndex(tmp_path / "index")
    refs = [first.ref(each) for each in media]
    found = look(first, refs)
    first.close()
    assert [type(said) for said in found] == [Ticket, MediaError, Ticket]
    # Whoever looked at these files would see that they have changed.
    for each in media:
        with open(each.path, "r+b") as file:
            file.write(b"other pixels")
    second = MediaIndex(tmp_path / "index")
    with touched(monkeypatch) as names:
        assert [second.ref(each) for each in media] == refs
        assert [told(second.verdict(each, SETTINGS.digest)) for each in refs] == [told(said) for said in found]
    assert {name for name in names if "/media" in name} == {str(tmp_path / "media")}, "the folder, and no file"
    # Whoever decodes them finds out, and then the next look is at what is there.
    for each in refs:
        with pytest.raises(StaleTicket, match="has changed"):
            read_ref(each)
        second.forget(each)
        assert second.ref(Media(MediaKind(each.kind), each.path)).stamp != each.stamp


def test_a_file_that_was_replaced_is_noticed_by_its_folder(tmp_path, media, at_once):
    first = MediaIndex(tmp_path / "index")
    refs = [first.ref(each) for each in media]
    look(first, refs)
    size, times = os.path.getsize(media[0].path), os.stat(tmp_path / "media")
    (tmp_path / "new").write_bytes(encoded(80, 24, "PNG")[:size].ljust(size))
    os.replace(tmp_path / "new", media[0].path)
    os.utime(tmp_path / "media", ns=(times.st_atime_ns, times.st_mtime_ns))  # as tar and rsync do
    second = MediaIndex(tmp_path / "index")
    again = [second.ref(each) for each in media]
    assert again[0].stamp != refs[0].stamp and second.verdict(again[0], SETTINGS.digest) is None
    assert again[1:] == refs[1:] and second.verdict(again[2], SETTINGS.digest) is not None
    for each in media[1:]:  # they were looked at again, and are believed from now on
        os.unlink(each.path)
    third = MediaIndex(tmp_path / "index")
    third._folders[str(tmp_path / "media")] = second._folders[str(tmp_path / "media")]
    assert [third.ref(each) for each in media[1:]] == refs[1:]


def test_a_folder_that_changed_just_now_is_not_believed(tmp_path, media):
    """Its clock may stand still while a file is replaced."""
    first = MediaIndex(tmp_path / "index")
    refs = [first.ref(each) for each in media]
    look(first, refs)
    os.truncate(media[0].path, 3)
    assert MediaIndex(tmp_path / "index").ref(media[0]).stamp.startswith("3-")


def test_a_missing_file_is_an_error_and_urls_are_believed(tmp_path, at_once):
    index = MediaIndex(tmp_path / "index")
    with pytest.raises(MediaUnavailable, match=r"gone.png: no such file"):
        index.ref(Media(MediaKind.IMAGE, str(tmp_path / "gone.png")))
    url = "memory://index/a.png"
    fsspec.filesystem("memory").pipe_file("/index/a.png", encoded(40, 24, "PNG"))
    there = index.ref(Media(MediaKind.IMAGE, url))
    look(index, [there])
    fsspec.filesystem("memory").rm("/index", recursive=True)
    again = MediaIndex(tmp_path / "index")
    assert again.ref(Media(MediaKind.IMAGE, url)) == there
    assert again.medium(there, SETTINGS) == (SETTINGS.load("image", encoded(40, 24, "PNG"))[0], True)


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
def test_what_facts_tell_is_what_decoding_shows(every_kind, tmp_path_factory, frames, budget, most, limits, data):
    """By whatever settings: facts are noted once."""
    index = MediaIndex(tmp_path_factory.mktemp("index"))
    pixels = PixelSettings(min_pixels=256, max_pixels=most)
    chosen = MediaSettings(LAYOUT, pixels, pixels, FrameSettings(frames.num_frames, frames.fps), limits)
    for each in data.draw(st.lists(st.sampled_from(every_kind), min_size=1, max_size=4)):
        there = index.ref(each)
        try:
            index.note(there, facts=SETTINGS.facts(there.kind, read_ref(there), count=True))
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


def test_a_headers_word_is_not_the_last(tmp_path):
    index = MediaIndex(tmp_path)
    video = MediaRef("video", "/a.mp4", "1-2")
    index.note(video, facts=Facts(64, 32, 9, 1.0, counted=False))
    assert index.medium(video, SETTINGS) == (Medium("video", (2, 4, 8), 0.5), False)
    index.note(video, facts=Facts(64, 32, 3, 1.0, counted=False))
    assert index.medium(video, SETTINGS) is None, "a count may tell otherwise"
    index.note(video, facts=Facts(64, 32, 3, 1.0))
    with pytest.raises(MediaError, match=r"/a.mp4: .*3 frames"):
        index.medium(video, SETTINGS)


# --- damage -------------------------------------------------------------------------------------------


def content(index, numbers):
    return {number: index.facts(ref(number)) for number in numbers}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The files of 80 entries, as they are left by a process that ended and by one that was killed: with its log."""
    folder = tmp_path_factory.mktemp("written")
    index = MediaIndex(folder)
    for number in range(80):
        index.note(ref(number), facts=Facts(number, 1))
    logged = {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-shm")}
    index.close()
    closed = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert len(closed) == 1 and len(logged) == 2
    return closed, logged


@pytest.mark.long
@settings(max_examples=third_of(40), deadline=None)
@given(
    killed=st.booleans(),
    log=st.booleans(),
    place=st.floats(0, 1, exclude_max=True) | st.floats(0, 0.01),
    damage=st.integers(1, 255) | st.sampled_from(["cut", "page"]),
)
def test_a_damaged_index_is_rebuilt_and_never_wrong(written, tmp_path_factory, killed, log, place, damage):
    folder = tmp_path_factory.mktemp("damaged")
    for name, kept in written[killed].items():
        damaged = bytearray(kept)
        begin = int(place * len(kept))
        if name.endswith("-wal") == (log and killed):
            if damage == "cut":
                del damaged[begin:]
            elif damage == "page":
                damaged[begin : begin + 4096] = np.random.default_rng(begin).bytes(4096)
            else:
                damaged[begin] ^= damage
        (folder / name).write_bytes(damaged)
    index = MediaIndex(folder)
    assert all(facts in (None, Facts(number, 1)) for number, facts in content(index, range(80)).items())
    for number in range(60, 100):
        index.note(ref(number), facts=Facts(number, 2))
    for each in (index, MediaIndex(folder)):
        assert content(each, range(60, 100)) == {number: Facts(number, 2) for number in range(60, 100)}
        each.close()


def test_a_rebuilt_index_says_so_once(written, tmp_path, caplog):
    ((name, kept),) = written[0].items()
    (tmp_path / name).write_bytes(b"x" * len(kept))
    index = MediaIndex(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert set(content(index, range(80)).values()) == {None}
        index.note(ref(), facts=Facts(1, 1))
        assert index.facts(ref()) == Facts(1, 1)
    (record,) = caplog.records
    assert "media1-0.sqlite: the index of media is damaged" in record.getMessage()
    assert MediaIndex(tmp_path).facts(ref()) == Facts(1, 1)


def test_a_value_with_any_wrong_byte_is_not_believed(written, tmp_path, caplog):
    ((name, kept),) = written[0].items()
    value = media_index._Entry("1-2", facts=Facts(7, 1)).pack()
    begin = kept.index(value)
    for place in range(begin - 4, begin + len(value)):  # the checksum stands in front
        folder = tmp_path / str(place)
        folder.mkdir()
        (folder / name).write_bytes(kept[:place] + bytes([kept[place] ^ 1]) + kept[place + 1 :])
        caplog.clear()
        assert MediaIndex(folder).facts(ref(7)) is None and "another checksum" in caplog.text


def test_processes_that_have_a_damaged_file_open_do_no_harm(written, tmp_path):
    ((name, kept),) = written[0].items()
    (tmp_path / name).write_bytes(kept)
    old = MediaIndex(tmp_path)
    assert old.facts(ref(7)) == Facts(7, 1)
    with open(tmp_path / name, "r+b") as file:
        file.write(b"x" * 100)
    new = MediaIndex(tmp_path)
    assert new.facts(ref(7)) is None
    new.note(ref(7), facts=Facts(7, 3))
    for number in range(50):
        old.note(ref(number), facts=Facts(number, 1))
    old.close()
    assert new.facts(ref(7)) == Facts(7, 3) == MediaIndex(tmp_path).facts(ref(7))


# --- processes ------------------------------------------------------------------------------------------


WRITER = """
    import resource
    import sys
    from fluxjax.data.media_index import MediaIndex
    from fluxjax.data.tickets import MediaRef
    from models.processing.facts import Facts
    from models.processing.outline import Medium
    folder, who, first, last, most = *sys.argv[1:3], *map(int, sys.argv[3:])
    if most:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    index = MediaIndex(folder)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(first, last):
        ref = MediaRef("image", f"/media/{number}.png", "1-2")
        index.note(ref, facts=Facts(number, 1), settings=who, verdict=Medium("image", (1, 1, number)))
        print(number, flush=True)
"""


@contextlib.contextmanager
def writer(folder, first, last, who, most=0):
    """A process that notes media when it is told to; it can write files of `most` bytes."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), who, *map(str, (first, last, most))]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            yield process
        finally:
            process.kill()


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
def test_processes_write_at_once_and_lose_nothing(tmp_path):
    with writer(tmp_path, 0, 600, "one") as one, writer(tmp_path, 300, 900, "two") as two:
        go(one)
        go(two)
        index = MediaIndex(tmp_path)
        while two.poll() is None and two.stdout.readline():
            assert content(index, range(0, 900, 100))
        outputs = [process.communicate(timeout=120) for process in (one, two)]
        assert [process.returncode for process in (one, two)] == [0, 0], outputs
        assert not any(errors for _, errors in outputs)
    assert content(index, range(900)) == {number: Facts(number, 1) for number in range(900)}
    for number in range(900):
        for who, there in (("one", number < 600), ("two", number >= 300)):
            assert index.verdict(ref(number), who) == (Medium("image", (1, 1, number)) if there else None)


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_that_it_had_noted(tmp_path):
    for round in range(4):
        with writer(tmp_path, 10000 * round, 10000 * (round + 1), "one") as process:
            go(process)
            last = 10000 * round - 1
            deadline = time.monotonic() + 0.1 + 0.05 * round
            while time.monotonic() < deadline:
                last = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.returncode == -signal.SIGKILL
        index = MediaIndex(tmp_path)
        numbers = range(10000 * round, last + 1)
        assert numbers and content(index, numbers) == {number: Facts(number, 1) for number in numbers}
        index.close()


@pytest.mark.slow
def test_a_full_disk_costs_a_warning(tmp_path):
    """Files may not grow beyond 100 kB: the operating system refuses to write more, as to a full disk."""
    index = MediaIndex(tmp_path)
    index.note(ref(), facts=Facts(5, 5))
    index.close()
    with writer(tmp_path, 1, 3000, "one", most=100_000) as process:
        go(process)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and output.split()[-1] == "2999"
    assert errors.count("\n") == 1 and "the index of media can't be written" in errors, errors
    index = MediaIndex(tmp_path)
    assert index.facts(ref()) == Facts(5, 5) and index.facts(ref(1)) in (None, Facts(1, 1))


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    index = MediaIndex(tmp_path / "file" / "index")
    with caplog.at_level(logging.WARNING):
        index.note(ref(), facts=Facts(5, 5))
        assert index.facts(ref()) == Facts(5, 5), "known in this run"
    assert [record.getMessage() for record in caplog.records] == [caplog.records[0].getMessage()]
    assert f"{tmp_path}/file/index: the index of media can't be written" in caplog.text
