"""Image files to RGB pixels, and the sizes they are brought to."""

from __future__ import annotations

import io
import math
import os

import numpy as np
from PIL import Image, ImageOps

from .errors import MediaError
from .settings import PixelSettings

Source = str | bytes  # a local path, or an encoded file's content

MAX_ASPECT = 200  # beyond it the published processors refuse


def source_name(source: Source) -> str:
    return source if isinstance(source, str) else f"<{len(source)} bytes>"


def check_source(source: Source) -> str:
    """The name of a source for messages. Raises MediaError where there is nothing to decode."""
    name = source_name(source)
    if isinstance(source, bytes):
        if not source:
            raise MediaError(name, "the data is empty")
    elif not os.path.isfile(source):
        raise MediaError(name, "is not a file" if os.path.exists(source) else "no such file")
    elif os.path.getsize(source) == 0:
        raise MediaError(name, "the file is empty")
    return name


def load_image(source: Source) -> Image.Image:
    """The upright RGB image in a file; of an animation, the first frame. Raises MediaError.

    As in transformers, the EXIF orientation is applied and transparency is laid over white.
    """
    name = check_source(source)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            file.load()
            ImageOps.exif_transpose(file, in_place=True)
            return _to_rgb(file)
    except Image.UnidentifiedImageError:
        raise MediaError(name, "not an image in a known format") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever their format suggests
        raise MediaError(name, f"cannot be decoded as an image: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # plain conversion would clip everything above 255 to white; the high byte is the 8-bit grey value
        values = np.asarray(image)
        grey = (values >> 8).astype(np.uint8)
        if (transparent := image.info.get("transparency")) is not None:
            grey[values == transparent] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"{image.mode}-mode pixels (32 bits) have no defined white")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width as multiples of `factor`, the area within bounds, the aspect ratio nearly kept.

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
