"""Reads image files as RGB pixels, and computes the sizes that images and frames are resized to."""

import contextlib
import math
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps

from .containers import check_size
from .holes import refuse_holes
from .media_file import MediaError, OpenFile, Source, opened, source_name
from .settings import DecodeLimits, PixelSettings

MAX_ASPECT = 200  # the published processors refuse larger ratios
# Pillow's names of the formats in which pictures are published. Formats are left out that run another program (EPS runs
# Ghostscript), that only some systems' Pillow can read, or that hold files of a size they don't declare (ICO).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
BAND_PIXELS = 1 << 20  # pixels converted at once


@contextlib.contextmanager
def open_image(source: Source, limits: DecodeLimits) -> Iterator[tuple[Image.Image, OpenFile]]:
    """Yields the image in a file, with only its header read, and the open file.

    Raises MediaError, also for an image of more pixels than `limits` or Pillow's own bound
    (`PIL.Image.MAX_IMAGE_PIXELS`) allow, and for any error inside the `with` block but MemoryError.
    """
    name = source_name(source)
    with opened(source) as content:
        try:
            with Image.open(content, formats=FORMATS) as file:
                check_size(*file.size, name, limits)
                yield file, content
        except Image.UnidentifiedImageError:
            raise MediaError(name, f"not an image in a known format ({', '.join(FORMATS)})") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # where warnings are errors
            raise MediaError(name, f"too many pixels: {error} (PIL.Image.MAX_IMAGE_PIXELS)") from None
        except (MediaError, MemoryError):
            raise
        except Exception as error:  # Pillow's decoders raise whatever their format suggests
            raise MediaError(name, f"cannot be decoded as an image: {error}") from error


def load_image(source: Source, limits: DecodeLimits = DecodeLimits()) -> Image.Image:  # noqa: B008 (frozen)
    """The upright RGB image in a file; of an animation, the first frame. Raises what `open_image` raises.

    As in transformers, the EXIF orientation is applied and transparency is laid over white.
    """
    with open_image(source, limits) as (file, content):
        file.load()
        refuse_holes(content, file.format or "", source_name(source), limits)
        ImageOps.exif_transpose(file, in_place=True)
        # Pillow reads 16-bit grey values as 32-bit ones for this format alone
        return _to_rgb(file.convert("I;16") if (file.format, file.mode) == ("PPM", "I") else file)


def _to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB. It is converted band by band: the steps between take four times the memory of an image."""
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
        # plain conversion would clip everything above 255 to white; the high byte is the 8-bit grey value
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


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width as multiples of `factor`, the area within bounds, the aspect ratio nearly unchanged.

    Rounds exactly like the published processors. Raises ValueError for an aspect ratio above 200.
    """
    aspect = max(height, width) / min(height, width)
    if aspect > MAX_ASPECT:
        raise ValueError(f"the aspect ratio of {width} x {height} pixels is above {MAX_ASPECT}")
    rows, columns = round(height / factor), round(width / factor)
    area = rows * columns * factor * factor
    if area > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor)
        columns = math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def target_size(name: str, width: int, height: int, factor: int, pixels: PixelSettings) -> tuple[int, int]:
    """The (height, width) that a frame is resized to. Raises MediaError."""
    try:
        return smart_resize(height, width, factor, pixels.min_pixels, pixels.max_pixels)
    except ValueError as error:
        raise MediaError(name, str(error)) from None


def resized(image: Image.Image, height: int, width: int, resample: int) -> np.ndarray:
    """The pixels `[height, width, 3]` (uint8) of the image at that size."""
    if image.size == (width, height):
        return np.asarray(image)
    return np.asarray(image.resize((width, height), Image.Resampling(resample)))
