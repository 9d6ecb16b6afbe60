"""Media files that mean harm: nothing but the file is opened, no external program runs, and memory stays bounded."""

import contextlib
import fractions
import io
import os
import pathlib
import struct
import subprocess
import sys
import textwrap
import zlib
from concurrent.futures import ThreadPoolExecutor

import av
import numpy as np
import pytest
from av.stream import Disposition
from media_files import LAYOUT, load, moving_frames, saved, write_video
from PIL import Image

from models.processing import MediaError, tiny
from models.processing.images import load_image
from models.processing.patches import resize_frame
from models.processing.settings import DecodeLimits

SESSION = (  # of two streams; a player binds their ports and waits
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 38004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)


def as_given(kind, path):
    return path if kind == "path" else path.read_bytes()


GIVEN = pytest.mark.parametrize("given", ["path", "bytes"])


def open_sockets():
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return count


@GIVEN
def test_a_session_description_opens_no_socket(tmp_path, given):
    (tmp_path / "a.sdp").write_bytes(SESSION)
    before = open_sockets()
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load, as_given(given, tmp_path / "a.sdp"))
        while not loading.done():
            assert open_sockets() <= before, "the description's ports are bound"
    with pytest.raises(MediaError, match="it has none of the formats"):
        loading.result()


SCRIPTS = {
    "playlist.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nvictim.ts\n#EXT-X-ENDLIST\n",
    "script.ffconcat": "ffconcat version 1.0\nfile victim.ts\n",
    "manifest.mpd": '<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
    'mediaPresentationDuration="PT2S" profiles="urn:mpeg:dash:profile:isoff-main:2011"><Period><AdaptationSet '
    'mimeType="video/mp2t"><Representation id="0" bandwidth="9"><BaseURL>victim.ts</BaseURL></Representation>'
    "</AdaptationSet></Period></MPD>\n",
    "subtitles.idx": "# VobSub index file, v7 (do not modify this line!)\nid: en, index: 0\n",
}


@GIVEN
@pytest.mark.parametrize("name", SCRIPTS)
def test_files_that_name_other_files_are_refused(tmp_path, monkeypatch, given, name):
    write_video(tmp_path / "victim.ts", moving_frames(8, 32, 48))
    (tmp_path / name).write_text(SCRIPTS[name])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MediaError, match="cannot be opened as a video"):
        load(as_given(given, tmp_path / name))


def test_a_pattern_in_a_name_is_no_sequence_of_pictures(tmp_path):
    for index in range(8):
        Image.fromarray(moving_frames(8, 32, 48)[index]).save(tmp_path / f"a{index}.png")
    (tmp_path / "a0.png").rename(tmp_path / "a%d.png")
    with pytest.raises(MediaError, match="none of the formats"):
        load(tmp_path / "a%d.png")


@GIVEN
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "AVIF"])
def test_a_picture_is_no_video(tmp_path, given, kind):
    Image.fromarray(moving_frames(1, 32, 48)[0]).save(tmp_path / "a", kind)
    with pytest.raises(MediaError, match=r"none of the formats|is a picture"):
        load(as_given(given, tmp_path / "a"))


def write_music(path, cover=None):
    with av.open(str(path), "w", format="mp4") as output:
        sound = output.add_stream("aac", rate=8000)
        if cover:
            picture = output.add_stream("mjpeg")
            picture.width, picture.height, picture.pix_fmt = 48, 32, "yuvj420p"
            picture.disposition = Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        output.mux(sound.encode(frame))
        output.mux(sound.encode())
        if cover:
            packet = av.Packet(cover)
            packet.stream, packet.pts, packet.dts, packet.is_keyframe = picture, 0, 0, True
            output.mux(packet)


@GIVEN
def test_music_is_no_video_even_with_a_cover(tmp_path, given):
    write_music(tmp_path / "plain.m4a")
    write_music(tmp_path / "cover.m4a", saved(Image.fromarray(moving_frames(1, 32, 48)[0]), "JPEG"))
    with av.open(str(tmp_path / "cover.m4a")) as container:
        assert len(container.streams.video) == 1
    for name in ("plain.m4a", "cover.m4a"):
        with pytest.raises(MediaError, match="has no video stream"):
            load(as_given(given, tmp_path / name))


def test_postscript_never_reaches_an_interpreter(tmp_path, monkeypatch):
    """Pillow runs whatever is called `gs`: here a script that leaves a trace."""
    (tmp_path / "bin").mkdir()
    ghost = tmp_path / "bin" / "gs"
    ghost.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho 10.0\n")
    ghost.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # not looked for yet
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    (tmp_path / "a.eps").write_bytes(content)
    for source in (content, str(tmp_path / "a.eps")):
        with pytest.raises(MediaError, match="not an image in a known format"):
            load_image(source)
    assert not (tmp_path / "ran").exists()


def palette_png(side, alpha=128):
    """A PNG of `side` x `side` pixels, all of one colour that is half transparent: some kilobytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    compressor, row = zlib.compressobj(9), bytes(1 + -(-side // 8))
    pixels = b"".join(compressor.compress(row) for _ in range(side)) + compressor.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 3, 0, 0, 0))
    palette = chunk(b"PLTE", bytes([255, 0, 0, 0, 255, 0])) + chunk(b"tRNS", bytes([alpha, 255]))
    return b"\x89PNG\r\n\x1a\n" + header + palette + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def peak_of(tmp_path, statement, data=b""):
    """The output of a fresh process, and the MiB by which its largest size grows over `statement`."""
    (tmp_path / "data").write_bytes(data)
    program = f"""
        import pathlib, resource, sys
        import numpy as np
        from models.processing import MediaError
        from models.processing.images import load_image
        from models.processing.patches import resize_frame
        from models.processing.settings import VIDEO_PIXELS, FrameSettings, PatchLayout
        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        from media_files import load_video
        data = pathlib.Path(sys.argv[1]).read_bytes()
        frame = np.full((6000, 6000, 3), 7, np.uint8) if not data else None
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            {statement}
        except MediaError as error:
            print(error, end=" ")
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "data")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    text, _, grown = result.stdout.strip().rpartition(" ")
    return text, float(grown)


@pytest.mark.slow
def test_a_transparent_palette_takes_little_more_memory_than_its_pixels(tmp_path):
    data = palette_png(8000)  # 64 Mpx: a byte each, and four as RGB, are 305 MiB; it took 1,070
    assert len(data) < 20_000
    text, grown = peak_of(tmp_path, "load_image(data)", data)
    assert text == "" and grown < 500


@pytest.mark.slow
def test_frames_are_resized_in_strips(tmp_path):
    """36 Mpx as floats at once are 412 MiB."""
    _, grown = peak_of(tmp_path, "resize_frame(frame, 56, 56)")
    assert grown < 200


@pytest.mark.slow
@pytest.mark.parametrize("side", [9000, 20000])
def test_larger_pictures_are_refused_before_they_are_decoded(tmp_path, side):
    """Sizes above our bound are refused by it, also where Pillow warns, and where Pillow refuses."""
    text, grown = peak_of(tmp_path, "load_image(data)", palette_png(side))
    assert "too many pixels: " in text and ("MAX_IMAGE_PIXELS" in text) == (side > 15000)
    assert grown < 100


def test_pillows_warning_made_an_error_is_a_skip_as_well(monkeypatch):
    """Warnings are errors in this process, as they may be in a user's."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for side in (40, 50):  # up to twice the bound it warns
        with pytest.raises(MediaError, match=r"too many pixels: .*MAX_IMAGE_PIXELS"):
            load_image(palette_png(side))


def test_the_bound_is_the_last_size_that_is_decoded(tmp_path):
    data = palette_png(64)
    assert load_image(data, DecodeLimits(pixels=64 * 64)).size == (64, 64)
    with pytest.raises(MediaError, match=r"64 x 64, at most 4095 are decoded"):
        load_image(data, DecodeLimits(pixels=64 * 64 - 1))
    path = write_video(tmp_path / "a.mp4", moving_frames(8, 64, 96))
    assert load(path, pixels=64 * 96).frames.shape == (4, 64, 96, 3)
    with pytest.raises(MediaError, match=r"a\.mp4: too many pixels: 96 x 64, at most 6143"):
        load(path, pixels=64 * 96 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("declared", [64, 12000])
def test_a_huge_frame_of_a_video_is_not_decoded(tmp_path, declared):
    """71 kB of a MOV file with PNG frames, as screen recorders write it, took 6 GB, some of it while it was opened."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as output:
        stream = output.add_stream("png", rate=2)
        stream.width = stream.height = declared
        stream.pix_fmt = "rgb24"
        for index in range(4):
            packet = av.Packet(palette_png(12000))
            packet.stream, packet.pts, packet.dts, packet.is_keyframe = stream, index, index, True
            packet.time_base = fractions.Fraction(1, 2)
            output.mux(packet)
    text, grown = peak_of(tmp_path, "load_video(data, PatchLayout(), VIDEO_PIXELS, FrameSettings())", file.getvalue())
    assert "pixels" in text and grown < 200


@pytest.mark.parametrize(
    ("height", "width", "reason"),
    [(96, 112, "too many pixels: 112 x 96"), (128, 192, r"decoding fails after \d+ frames")],
)
def test_frames_that_grow_on_the_way_are_refused(tmp_path, height, width, reason):
    """Two bare streams in a row: the first frames are within the bound. Far beyond it, none is even decoded."""
    small = write_video(tmp_path / "a.h264", moving_frames(8, 32, 48), format="h264")
    large = write_video(tmp_path / "b.h264", moving_frames(8, height, width), format="h264")
    with pytest.raises(MediaError, match=reason):
        load(small.read_bytes() + large.read_bytes(), pixels=64 * 96)


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "I;16", "CMYK", "L", "1", "RGB keyed"])
def test_bands_are_converted_as_the_whole(monkeypatch, mode):
    """Transformers converts the whole picture (`test_images.py`); here many bands stand against one."""
    base = Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 23, 4), dtype=np.uint8), "RGBA")
    options = {}
    if mode == "P":
        image, options = base.convert("RGB").quantize(16), {"transparency": 3}
    elif mode == "I;16":
        image = Image.fromarray(np.arange(37 * 23, dtype=np.uint16).reshape(37, 23) * 70)
    elif mode == "RGB keyed":
        image, options = base.convert("RGB"), {"transparency": base.convert("RGB").getpixel((3, 3))}
    else:
        image = base.convert(mode)
    data = saved(image, "TIFF" if mode == "CMYK" else "PNG", **options)
    whole = np.asarray(load_image(data))
    monkeypatch.setattr("models.processing.images.BAND_PIXELS", 5 * 23)
    np.testing.assert_array_equal(np.asarray(load_image(data)), whole)


def test_strips_are_resized_as_the_whole(monkeypatch):
    frame = np.random.default_rng(0).integers(0, 256, (41, 53, 3), dtype=np.uint8)
    whole = resize_frame(frame, 24, 32)
    monkeypatch.setattr("models.processing.patches.STRIP_PIXELS", 7 * 53)
    np.testing.assert_array_equal(resize_frame(frame, 24, 32), whole)


def test_the_bounds_can_be_changed():
    processor = tiny.build(["<image>?"], layout=LAYOUT).configured(limits=DecodeLimits(pixels=100))
    with pytest.raises(MediaError, match="at most 100 are decoded"):
        processor.prepare("<image>?", [("image", palette_png(11))])
    assert Image.MAX_IMAGE_PIXELS  # beyond which Pillow warns: later than we refuse
    assert DecodeLimits().pixels < Image.MAX_IMAGE_PIXELS
