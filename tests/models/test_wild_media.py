"""Media as found in the wild: each is read right, in each of the three ways of reading it, or refused by name with the
reason."""

import dataclasses
import fractions

import av
import numpy as np
import pytest
from media_files import ALL, CODECS, LAYOUT, PIXELS, exif_of, moving_frames, saved, whole
from PIL import Image, ImageCms
from wild_media import COUNT, TIMES, VIDEOS, encode, frames, x264

from models.processing import MediaError
from models.processing.images import load_image
from models.processing.media import MediaSettings
from models.processing.media_file import Medium
from models.processing.patches import arrange
from models.processing.settings import DecodeLimits, FrameSettings
from models.processing.videos import video_facts

SETTINGS = MediaSettings(LAYOUT, PIXELS, PIXELS, ALL)  # nothing here is resized, unless a test says so


def pictures_of(medium, patches):
    """The frames `[2 * pairs, height, width, 3]` of which these are the patches."""
    pairs, rows, columns = medium.grid
    arrangement = arrange([medium.grid], LAYOUT)
    pair, (row, column) = arrangement.frame_segments_P - 1, arrangement.positions_P2.T
    result = np.empty((pairs, rows, columns, 3, 2, 8, 8), np.uint8)
    result[pair, row, column] = patches.reshape(-1, 3, 2, 8, 8)
    return result.transpose(0, 4, 1, 5, 2, 6, 3).reshape(pairs * 2, rows * 8, columns * 8, 3)


def read(kind, path, using=SETTINGS):
    """A medium and its pictures, after a look whether all ways of reading the file agree."""
    medium, patches = using.load(kind, path)
    glanced, sure = using.glance(kind, path, count=True)
    assert sure and glanced.grid == medium.grid
    assert glanced.seconds_per_grid == pytest.approx(medium.seconds_per_grid, rel=1e-3)
    pairs, size = medium.grid[0], medium.grid[1] * medium.grid[2]
    for first, last in {(0, 1), (pairs // 2, pairs), (pairs - 1, pairs), (0, pairs)}:
        part = using.load_pairs(path, medium, first, last)
        np.testing.assert_array_equal(part, patches[first * size : last * size])
    return medium, pictures_of(medium, patches)


def refused(kind, path, reason, using=SETTINGS, once=None):
    """Loading and slicing the file are refused with the reason, and so is a glance, if a header doesn't do for it; also
    where it was a medium `once`, before it was damaged."""
    with pytest.raises(MediaError, match=reason) as error:
        using.load(kind, path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    try:
        medium, _ = using.glance(kind, path, count=True)
    except MediaError:
        medium = Medium(kind, (1, 2, 2))
    with pytest.raises(MediaError, match=reason):
        using.load_pairs(path, medium, 0, 1)
    if once is not None:
        with pytest.raises(MediaError, match=reason):
            using.load_pairs(path, once, once.grid[0] - 1, once.grid[0])


EVERY = list(range(COUNT))
# The frames that are there of those that were encoded; None where some are too damaged to compare.
THERE = {
    "edit list": EVERY[5:],
    "edit list beyond a group": EVERY[19:],
    "vp8, hidden frames": [n for n in EVERY if n % 8 != 5],
    "begins amid a group": EVERY[8:],
    "hevc begins with an open group": EVERY[8:],
    "packets are lost": None,
}
SECONDS = {"variable frame rate": (TIMES[-1] + 40) / 1000, "packets are lost": 4.0, "vp8, hidden frames": 4.0}
TURNED = {"turned by 90": -1, "turned by 180": 2}


@pytest.mark.parametrize("name", VIDEOS)
def test_a_video_is_what_a_plain_decoder_shows(tmp_path, name):
    path = str(VIDEOS[name](tmp_path))
    medium, pictures = read("video", path)
    with av.open(path) as container:
        plain = [np.rot90(frame.to_ndarray(format="rgb24"), TURNED.get(name, 0)) for frame in container.decode(video=0)]
    assert medium.grid[0] == -(-len(plain) // 2)
    for ours, theirs in zip(pictures, plain, strict=False):
        if ours.shape == theirs.shape:  # not those of a programme in another size, which are resized
            np.testing.assert_array_equal(ours, theirs)
    there = THERE.get(name, EVERY)
    if there is not None:
        assert len(plain) == len(there)
        sources = np.rot90(frames(), TURNED.get(name, 0), axes=(1, 2)).astype(np.int16)
        nearest = [int(np.abs(sources - picture).mean(axis=(1, 2, 3)).argmin()) for picture in pictures]
        if name != "size changes":
            assert nearest[: len(there)] == there, "each frame in its place"
    fps = 25 if "mpg" in name or "mpeg2" in name else 12
    seconds = SECONDS.get(name, len(plain) / fps)
    assert medium.seconds_per_grid == pytest.approx(2 * seconds / len(plain), rel=0.02)


@pytest.mark.parametrize("kind", [kind for kind in CODECS if kind != "asf"])
def test_a_video_that_was_cut_off_or_has_a_hole_is_refused(tmp_path, kind):
    data = whole(tmp_path, kind)
    once, _ = SETTINGS.load("video", data)
    path = tmp_path / f"b.{kind}"
    for stop in (len(data) // 3 + 5, len(data) * 3 // 5 + 5):
        for tail in (b"", bytes(len(data) - stop)):
            path.write_bytes(data[:stop] + tail)
            refused("video", str(path), "cut off|damaged|decoding fails|cannot be opened", once=once)


def test_videos_that_cannot_be_used(tmp_path):
    wide = str(encode(tmp_path / "wide.mkv", "ffv1", {}, pictures=moving_frames(4, 4, 1200)))
    refused("video", wide, r"the aspect ratio of 1200 x 4 pixels is above 200")
    path = str(x264(tmp_path / "a.mp4"))
    small = dataclasses.replace(SETTINGS, limits=DecodeLimits(pixels=64 * 96 - 1))
    refused("video", path, r"too many pixels: 96 x 64, at most 6143 are decoded", small)
    short = dataclasses.replace(SETTINGS, limits=DecodeLimits(frames=47))
    refused("video", path, r"too many frames: more than 47", short)
    many = dataclasses.replace(SETTINGS, frames=FrameSettings(num_frames=50))
    refused("video", path, r"has 48 frames, but 50 were asked for", many)
    for name, data in (("empty", b""), ("zeros", bytes(5000)), ("text", b"no medium at all\n" * 99)):
        (tmp_path / name).write_bytes(data)
        refused("video", str(tmp_path / name), "is empty|cannot be opened as a video")
        refused("image", str(tmp_path / name), "is empty|not an image in a known format")
    for kind in ("image", "video"):
        refused(kind, str(tmp_path / "gone"), "no such file")
        refused(kind, str(tmp_path), "is not a file")
        with pytest.raises(MediaError, match="the data is empty"):
            SETTINGS.load(kind, b"")
    refused("image", path, "not an image in a known format")


def test_files_that_other_programs_wrote(shared_cases):
    """As the README beside them says; they are not part of a user's clone."""
    settings, video = MediaSettings(), str(shared_cases / "models" / "title_gbk.avi")
    medium, _ = settings.load("video", video)
    assert (medium.grid[0], medium.seconds_per_grid * medium.grid[0]) == (2, 2.0)
    assert video_facts(video, settings.limits).frames == 16
    grey = np.asarray(load_image(str(shared_cases / "models" / "hopper_16bit.pgm")))
    assert (grey == grey[..., :1]).all() and 30 < grey.mean() < 220 and grey.std() > 20


def smooth(height, width):
    """A picture that lossy codecs keep nearly."""
    y, x = np.mgrid[:height, :width]
    return np.stack([255 * x // width, 255 * y // height, 128 + 0 * x], axis=-1).astype(np.uint8)


PICTURE = smooth(48, 64)
SOLID = Image.fromarray(PICTURE)
COARSE = np.repeat(np.repeat(PICTURE[::16, ::16], 16, axis=0), 16, axis=1)  # of twelve colours
RAMP = np.linspace(0, 65535, 48 * 64).reshape(48, 64).astype(np.uint16)


def oriented(format, orientation):
    """A picture that is upright once its orientation is heeded (EXIF 2.3, 4.6.4 A)."""
    undo = [
        None,
        lambda a: a,
        lambda a: a[:, ::-1],
        lambda a: a[::-1, ::-1],
        lambda a: a[::-1],
        lambda a: a.transpose(1, 0, 2),
        lambda a: np.rot90(a, 1),
        lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        lambda a: np.rot90(a, -1),
    ][orientation]
    options = {"quality": 95} if format == "JPEG" else {}
    return saved(Image.fromarray(np.ascontiguousarray(undo(PICTURE))), format, exif=exif_of(orientation), **options)


def half_clear(mode="RGBA"):
    """The picture, the lower half of which is clear, with a colour that must not show."""
    image = SOLID.convert(mode)
    alpha = np.full((48, 64), 255, np.uint8)
    alpha[24:] = 0
    image.putalpha(Image.fromarray(alpha))
    return image


def over_white(picture=PICTURE):
    result = picture.copy()
    result[24:] = 255
    return result


def png_of_sixteen_bits():
    """A PNG of 16 bits a colour, which Pillow doesn't write."""
    codec = av.CodecContext.create("png", "w")
    codec.width, codec.height, codec.pix_fmt, codec.time_base = 64, 48, "rgb48be", fractions.Fraction(1)
    values = PICTURE.astype(np.uint16) * np.uint16(256) + np.uint16(77)
    frame = av.VideoFrame.from_ndarray(values.astype(np.uint16), format="rgb48be")
    return bytes(codec.encode(frame)[0])


GREY = np.repeat((RAMP >> 8).astype(np.uint8)[..., None], 3, axis=2)
LOSSY = 6  # of 255, on average
OTHERS = [Image.fromarray(PICTURE[::-1].copy()), Image.fromarray(PICTURE[:, ::-1].copy())]
IMAGES = {  # what is in the file, what it shows, and how far from it the pixels may be on average
    **{f"jpeg, orientation {n}": (lambda n=n: oriented("JPEG", n), PICTURE, LOSSY) for n in range(1, 9)},
    **{f"webp, orientation {n}": (lambda n=n: oriented("WEBP", n), PICTURE, LOSSY) for n in (3, 6)},
    **{f"png, orientation {n}": (lambda n=n: oriented("PNG", n), PICTURE, 0) for n in (2, 5, 7, 8)},
    "progressive jpeg": (lambda: saved(SOLID, "JPEG", progressive=True, quality=95), PICTURE, LOSSY),
    "grey jpeg": (lambda: saved(Image.fromarray(GREY[..., 0]), "JPEG", quality=95), GREY, LOSSY),
    "cmyk jpeg": (lambda: saved(SOLID.convert("CMYK"), "JPEG", quality=95), PICTURE, LOSSY),
    "cmyk tiff": (lambda: saved(SOLID.convert("CMYK"), "TIFF"), PICTURE, 0),
    "jpeg with a profile": (
        lambda: saved(
            SOLID, "JPEG", quality=95, icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
        ),
        PICTURE,
        LOSSY,
    ),
    "palette png": (lambda: saved(Image.fromarray(COARSE).quantize(16), "PNG"), COARSE, 0),
    "palette gif": (lambda: saved(Image.fromarray(COARSE).quantize(16), "GIF"), COARSE, 0),
    "palette bmp": (lambda: saved(Image.fromarray(COARSE).quantize(16), "BMP"), COARSE, 0),
    "one bit": (
        lambda: saved(Image.fromarray(GREY[..., 0]).convert("1", dither=Image.Dither.NONE), "PNG"),
        (GREY > 127) * 255,
        0,
    ),
    "alpha png": (lambda: saved(half_clear(), "PNG"), over_white(), 0),
    "alpha webp": (lambda: saved(half_clear(), "WEBP", lossless=True, exact=True), over_white(), 0),
    "alpha tiff": (lambda: saved(half_clear(), "TIFF"), over_white(), 0),
    "grey with alpha": (
        lambda: saved(half_clear("L"), "PNG"),
        over_white(np.repeat(np.asarray(SOLID.convert("L"))[..., None], 3, axis=2)),
        0,
    ),
    "16 bits of grey, png": (lambda: saved(Image.fromarray(RAMP), "PNG"), GREY, 0),
    "16 bits of grey, tiff": (lambda: saved(Image.fromarray(RAMP), "TIFF"), GREY, 0),
    "16 bits of colour, png": (png_of_sixteen_bits, PICTURE, 1),
    "animated gif": (
        lambda: saved(Image.fromarray(COARSE), "GIF", save_all=True, append_images=OTHERS, duration=90),
        COARSE,
        0,
    ),
    "animated webp": (
        lambda: saved(SOLID, "WEBP", save_all=True, append_images=OTHERS, duration=90, lossless=True),
        PICTURE,
        0,
    ),
    "animated png": (lambda: saved(SOLID, "PNG", save_all=True, append_images=OTHERS, duration=90), PICTURE, 0),
    "several pictures in a tiff": (lambda: saved(SOLID, "TIFF", save_all=True, append_images=OTHERS), PICTURE, 0),
    "several pictures in a jpeg": (lambda: saved(SOLID, "MPO", save_all=True, append_images=OTHERS), PICTURE, LOSSY),
    "jpeg 2000": (lambda: saved(SOLID, "JPEG2000"), PICTURE, 0),
    "avif": (lambda: saved(SOLID, "AVIF", quality=95), PICTURE, LOSSY),
    "ppm": (lambda: saved(SOLID, "PPM"), PICTURE, 0),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_what_was_drawn(tmp_path, name):
    make, expected, far = IMAGES[name]
    (tmp_path / "a").write_bytes(make())
    medium, pictures = read("image", str(tmp_path / "a"))
    assert medium.grid == (1, 6, 8) and medium.seconds_per_grid == 0
    np.testing.assert_array_equal(pictures[0], pictures[1])
    distance = np.abs(pictures[0].astype(int) - expected)
    assert distance.mean() <= far and distance.max() <= (60 if far else 0)


@pytest.mark.medium
@pytest.mark.parametrize("format", ["WEBP", "AVIF"])  # JPEG: `test_bad_media.py`
def test_zeros_at_the_end_that_belong_there_are_no_hole(tmp_path, format):
    options = {"lossless": True} if format == "WEBP" else {}
    for image in (Image.new("RGB", (1200, 900), (255, 255, 255)), Image.fromarray(smooth(900, 1200))):
        for more in ({}, options):
            data = saved(image, format, **more)
            for padding in (0, 64, 5000, len(data)):
                (tmp_path / "a").write_bytes(data + bytes(padding))
                assert SETTINGS.load("image", str(tmp_path / "a"))[0].grid[0] == 1


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF", "JPEG2000", "PPM"])
def test_an_image_that_was_cut_off_or_has_a_hole_is_refused(tmp_path, format):
    picture = Image.fromarray(moving_frames(1, 64, 96)[0])
    data = saved(picture, format)
    (tmp_path / "a").write_bytes(data[: len(data) * 3 // 5])
    refused("image", str(tmp_path / "a"), "cannot be decoded as an image|not an image in a known format")
    if format in ("JPEG", "PNG", "WEBP", "GIF", "AVIF"):  # in the others zeros may be a part of a picture
        (tmp_path / "a").write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        refused("image", str(tmp_path / "a"), "cannot be decoded as an image|is damaged")


def test_images_that_cannot_be_used(tmp_path):
    cases = {
        "wide.png": (Image.new("RGB", (1200, 4)), r"the aspect ratio of 1200 x 4 pixels is above 200"),
        "high.jpg": (Image.new("RGB", (4, 1200)), r"the aspect ratio of 4 x 1200 pixels is above 200"),
        "bomb.png": (Image.new("1", (9000, 9000)), r"too many pixels: 9000 x 9000, at most \d+ are decoded"),
        "float.tiff": (Image.fromarray(np.full((48, 64), 3.5, np.float32)), "have no defined white"),
    }
    for name, (image, reason) in cases.items():
        image.save(tmp_path / name)
        refused("image", str(tmp_path / name), reason)
    assert (tmp_path / "bomb.png").stat().st_size < 100_000
    Image.new("RGB", (800, 4)).save(tmp_path / "long.png")  # its ratio is exactly 200
    assert SETTINGS.load("image", str(tmp_path / "long.png"))[1].size
