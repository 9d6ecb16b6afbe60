"""Reads the pixels of image files, or only their sizes; computes the sizes that images and frames are resized to.

Files with zeros in the place of their picture, as unfinished downloads and bad disks leave them, are refused: decoders
turn the zeros into pixels of some colour. Only JPEG, WebP and AVIF files are searched. Formats with checksums need no
search, and zeros are black where pixels are stored uncompressed.
"""

import contextlib
import math
import os
import struct
from collections.abc import Iterator

import av
import numpy as np
from av.error import FFmpegError, InvalidDataError
from PIL import ExifTags, Image, ImageOps

from .containers import CODED, check_size
from .media_file import Facts, MediaError, OpenFile, Source, opened, source_name
from .settings import DecodeLimits, PixelSettings

MAX_ASPECT = 200  # the published processors refuse larger ratios
# Pillow's names of the formats in which pictures are published. The list leaves out formats that run another program
# (EPS runs Ghostscript), that only some systems' Pillow can read, or whose files don't declare their size (ICO).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
BAND_PIXELS = 1 << 20  # pixels converted at once
ORIENTATION = ExifTags.Base.Orientation
LYING = range(5, 9)  # EXIF orientations that exchange width and height
PNG_SIGNATURE, PNG_CHECKSUM = 8, 4  # bytes
PNG_NOTES = {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}  # chunks that may hold an EXIF orientation
# These zeros in a JPEG file may be a hole, and the file is examined. Encoders with fixed Huffman tables never write as
# many zeros in a row. Encoders with fitted tables may write them for an area of one colour.
HOLE = bytes(64)
SCAN, END = b"\xff\xda", b"\xff\xd9"  # JPEG's markers
# A coded picture may end in zeros, up to 1 / SHARE of its bytes. In libwebp's pictures of one colour, 0.05 of the bytes
# are zeros at the end.
SHARE = 8


@contextlib.contextmanager
def open_image(source: Source, limits: DecodeLimits) -> Iterator[tuple[Image.Image, OpenFile]]:
    """Yields the image in a file, with only its header read, and the open file. Raises MediaError, also for more pixels
    than `limits` or `PIL.Image.MAX_IMAGE_PIXELS` allow, and for any error inside the `with` block but MemoryError."""
    name = source_name(source)
    with opened(source) as content:
        try:
            with Image.open(content, formats=FORMATS) as file:
                check_size(*file.size, name, limits)
                yield file, content
        except Image.UnidentifiedImageError:
            raise MediaError(name, f"not an image in a known format ({', '.join(FORMATS)})") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # if warnings are errors
            raise MediaError(name, f"too many pixels: {error} (PIL.Image.MAX_IMAGE_PIXELS)") from None
        except (MediaError, MemoryError):
            raise
        except Exception as error:  # Pillow's decoders raise errors of many types
            raise MediaError(name, f"cannot be decoded as an image: {error}") from error


def load_image(source: Source, limits: DecodeLimits = DecodeLimits()) -> Image.Image:  # noqa: B008 (frozen)
    """The upright RGB image in a file; of an animation, the first frame. Raises what `open_image` raises. As in
    transformers, the EXIF orientation is applied and transparency is laid over white."""
    with open_image(source, limits) as (file, content):
        file.load()
        refuse_holes(content, file.format or "", source_name(source), limits)
        ImageOps.exif_transpose(file, in_place=True)
        # Pillow reads 16-bit grey values as 32-bit values for this format alone
        return _to_rgb(file.convert("I;16") if (file.format, file.mode) == ("PPM", "I") else file)


def _to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, converted band by band. A conversion takes four times the memory of the converted pixels."""
    if image.mode in ("I", "F"):
        raise ValueError(f"{image.mode}-mode pixels (32 bits) have no defined white")
    if image.mode == "RGB" and image.info.get("transparency") is None:
        return image
    result = Image.new("RGB", image.size)
    rows = max(1, BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        result.paste(_band_to_rgb(band), (0, top))
    return result


def _band_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow's conversion would clip all values above 255 to white; the high byte is the 8-bit grey value.
        values = np.asarray(image)
        grey = (values >> 8).astype(np.uint8)
        if (transparent := image.info.get("transparency")) is not None:
            grey[values == transparent] = 255
        return Image.fromarray(grey).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def image_facts(source: Source, limits: DecodeLimits) -> Facts:
    """The facts of an image, from its header. Raises MediaError if the header shows that the image can't be used."""
    with open_image(source, limits) as (file, content):
        width, height = file.size
        if width != height and _orientation(file, content) in LYING:
            width, height = height, width
        return Facts(width, height)


def _orientation(file: Image.Image, content: OpenFile) -> int:
    """The EXIF orientation; 1 for TIFF files, whose size in Pillow is that of the upright picture already."""
    if file.format == "TIFF":
        return 1
    if file.format == "PNG" and "exif" not in file.info and not _notes_behind_pixels(content):
        return Image.Image.getexif(file).get(ORIENTATION, 1)  # PNG's own `getexif` decodes all pixels
    return file.getexif().get(ORIENTATION, 1)


def _notes_behind_pixels(png: OpenFile) -> bool:
    there = png.tell()
    png.seek(PNG_SIGNATURE)
    behind = found = False
    while not found and len(head := png.read(8)) == 8:
        size, name = struct.unpack(">I4s", head)
        behind |= name == b"IDAT"
        found = behind and name in PNG_NOTES
        png.seek(size + PNG_CHECKSUM, os.SEEK_CUR)
    png.seek(there)
    return found


def refuse_holes(content: OpenFile, format: str, name: str, limits: DecodeLimits) -> None:
    """Raises MediaError if zeros stand in the place of the picture's data. `format` is Pillow's name of the format."""
    if format not in ("JPEG", "MPO", "WEBP", "AVIF"):
        return
    content.seek(0)
    data = content.read()
    if format == "WEBP":
        damaged = _ends_in_zeros(data[: 8 + int.from_bytes(data[4:8], "little")])
    elif format == "AVIF":
        damaged = _ends_in_zeros(_media_data(data))
    else:
        damaged = _jpeg_has_hole(data, limits)
    if damaged:
        raise MediaError(name, "is damaged: zeros stand where its picture should be")


def _jpeg_has_hole(jpeg: bytes, limits: DecodeLimits) -> bool:
    """Says whether the last scan of a JPEG file ends in zeros, or FFmpeg's strict decoder finds bytes that can't end a
    scan. libjpeg only counts such bytes as a warning, and Pillow has no way to read the warning. Small holes are often
    missed. Holes whose zeros decode to the right number of blocks are always missed."""
    if HOLE not in jpeg:
        return False
    there = jpeg.rstrip(b"\0")
    if len(jpeg) - len(there) >= len(HOLE) and there.rfind(END) < there.rfind(SCAN):
        return True
    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.thread_count = 1  # one thread holds no frame back
    decoder.options = {"err_detect": "explode", "max_pixels": str(CODED * limits.pixels)}
    try:
        decoder.decode(av.Packet(jpeg))
    except FFmpegError as error:  # other errors: FFmpeg does not know this kind of JPEG
        return isinstance(error, InvalidDataError)
    return False


def _ends_in_zeros(coded: bytes) -> bool:
    zeros = len(coded) - len(coded.rstrip(b"\0"))
    return zeros >= max(len(HOLE), len(coded) // SHARE)


def _media_data(avif: bytes) -> bytes:
    """The last box with coded pictures; files have one such box (ISO/IEC 14496-12, 4.2 and 8.1.1)."""
    place, found = 0, b""
    while place + 8 <= len(avif):
        size, kind = struct.unpack(">I4s", avif[place : place + 8])
        if size < 8:  # 0: the box extends to the end of the file; 1: its size has 64 bits
            return avif[place:] if kind == b"mdat" else found
        if kind == b"mdat":
            found = avif[place : place + size]
        place += size
    return found


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, frames: int = 1, patch: int = 1
) -> tuple[int, int]:
    """Height and width as multiples of `factor`, the area within bounds, the aspect ratio nearly unchanged. The bounds
    hold for the area of all `frames` frames together; the number of frames is rounded to a multiple of `patch`. Rounds
    exactly like the published processors. Raises ValueError for an aspect ratio above 200."""
    aspect = max(height, width) / min(height, width)
    if aspect > MAX_ASPECT:
        raise ValueError(f"the aspect ratio of {width} x {height} pixels is above {MAX_ASPECT}")
    rows, columns = round(height / factor), round(width / factor)
    area = round(frames / patch) * patch * rows * columns * factor * factor
    if area > max_pixels:
        shrink = math.sqrt((frames * height * width) / max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows = math.ceil(height * grow / factor)
        columns = math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def target_size(
    name: str, width: int, height: int, factor: int, pixels: PixelSettings, frames: int = 1, patch: int = 1
) -> tuple[int, int]:
    """The (height, width) that a frame is resized to; see `smart_resize`. Raises MediaError."""
    try:
        return smart_resize(height, width, factor, pixels.min_pixels, pixels.max_pixels, frames, patch)
    except ValueError as error:
        raise MediaError(name, str(error)) from None


def resized(image: Image.Image, height: int, width: int, resample: int) -> np.ndarray:
    """The pixels `[height, width, 3]` (uint8) of the image, resized to that height and width."""
    if image.size == (width, height):
        return np.asarray(image)
    return np.asarray(image.resize((width, height), Image.Resampling(resample)))
