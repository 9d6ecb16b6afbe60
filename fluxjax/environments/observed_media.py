"""Encodes the media of observations without loss, and writes them to files that are named by their content."""

from __future__ import annotations

import dataclasses
import fractions
import hashlib
import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
from PIL import Image

from models.processing.images import FORMATS, load_image
from models.processing.media_file import MediaError
from models.processing.settings import DecodeLimits
from models.processing.videos import video_facts

from ..config.bounds import positive
from .observation import EnvironmentFailure, Fault, Observation, Picture, Video


@dataclasses.dataclass(frozen=True)
class ObservationLimits:
    """The bounds of one observation. An observation beyond a bound fails its episode."""

    text_bytes: int = positive(1 << 20)  # of the text in UTF-8, and of `info` in JSON
    media: int = positive(16)  # images and videos together
    pixels: int = positive(1 << 24)  # of an image or of a frame
    frames: int = positive(1024)  # of a video
    encoded_bytes: int = positive(1 << 26)  # of an encoded medium, and of a snapshot

    @property
    def decoding(self) -> DecodeLimits:
        return DecodeLimits(self.pixels, self.frames)


def stored(observation: Observation, folder: pathlib.Path, limits: ObservationLimits) -> list[tuple[str, str]]:
    """Writes the images and the videos of an observation to files in `folder`, and returns the (kind, name) of each.
    Raises EnvironmentFailure, and OSError if a file can't be written."""
    for name, media in (("images", observation.images), ("videos", observation.videos)):
        if not isinstance(media, Sequence) or isinstance(media, str | bytes):
            raise EnvironmentFailure(Fault.INVALID, f"{name} are of type {type(media).__name__}, not a list")
    if len(observation.images) + len(observation.videos) > limits.media:
        raise EnvironmentFailure(Fault.TOO_LARGE, f"more than {limits.media} media in an observation")
    try:
        images = [_image_file(image, limits) for image in observation.images]
        videos = [_video_file(video, float(observation.fps), limits) for video in observation.videos]
    except (MediaError, OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
        reason = error.reason if isinstance(error, MediaError) else f"{type(error).__name__}: {error}"
        raise EnvironmentFailure(Fault.MEDIUM, f"a medium can't be used: {reason}") from None
    return [("image", _written(folder, *file)) for file in images] + [
        ("video", _written(folder, *file)) for file in videos
    ]


def _image_file(image: Picture, limits: ObservationLimits) -> tuple[bytes, str]:
    """Returns an encoded image and the ending of its file's name. Encoded images stay as they are, once decoding has
    shown that they are whole."""
    if not isinstance(image, bytes):
        return _png(_rgb(image, limits)), "png"
    _check_size(len(image), limits)
    load_image(image, limits.decoding)
    with Image.open(io.BytesIO(image), formats=FORMATS) as file:
        return image, (file.format or "").lower()


def _rgb(picture: Any, limits: ObservationLimits) -> Image.Image:
    """Returns the pixels as an RGB image without further data, so that equal pixels get equal bytes."""
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.shape[2:] not in ((), (1,), (3,), (4,)):
            raise ValueError(f"an array of shape {picture.shape} and type {picture.dtype} is no image of uint8")
        _check_pixels(picture.shape[1], picture.shape[0], limits)
        picture = Image.fromarray(picture[..., 0] if picture.shape[2:] == (1,) else picture)
    if not isinstance(picture, Image.Image):
        raise EnvironmentFailure(Fault.INVALID, f"an image is of type {type(picture).__name__}")
    _check_pixels(*picture.size, limits)
    picture.load()
    if picture.mode != "RGB" or "transparency" in picture.info:
        # The project's reader decides how other modes look, as it does for files.
        mode = {"CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB", "PA": "RGBA"}.get(picture.mode)
        picture = load_image(_png(picture.convert(mode) if mode else picture), limits.decoding)
    return Image.fromarray(np.asarray(picture))


def _png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "png", compress_level=3)
    return content.getvalue()


def _video_file(video: Video, fps: float, limits: ObservationLimits) -> tuple[bytes, str]:
    """Returns an encoded video and the ending of its file's name. Frames become PNG images in a QuickTime file."""
    if isinstance(video, bytes):
        _check_size(len(video), limits)
        video_facts(video, limits.decoding, count=True)
        return video, "video"
    if not isinstance(video, np.ndarray | Sequence) or isinstance(video, str):
        raise EnvironmentFailure(Fault.INVALID, f"a video is of type {type(video).__name__}")
    if len(video) > limits.frames:
        raise EnvironmentFailure(Fault.TOO_LARGE, f"more than {limits.frames} frames in a video")
    frames = [np.asarray(_rgb(frame, limits)) for frame in video]
    if len({frame.shape for frame in frames}) != 1:
        raise ValueError("a video needs frames, all of one size")
    content = io.BytesIO()
    # Without `bitexact` the file has a random number, and equal videos get different names.
    with av.open(content, "w", format="mov", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("png", rate=fractions.Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "rgb24"
        stream.codec_context.flags |= av.codec.context.Flags.bitexact
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    _check_size(len(content.getvalue()), limits)
    return content.getvalue(), "mov"


def _check_pixels(width: int, height: int, limits: ObservationLimits) -> None:
    if width * height > limits.pixels:
        raise EnvironmentFailure(Fault.TOO_LARGE, f"an image has more than {limits.pixels} pixels")
    if not width * height:
        raise ValueError("an image has no pixels")


def _check_size(size: int, limits: ObservationLimits) -> None:
    if size > limits.encoded_bytes:
        raise EnvironmentFailure(Fault.TOO_LARGE, f"an encoded medium has more than {limits.encoded_bytes} bytes")


def _written(folder: pathlib.Path, content: bytes, ending: str) -> str:
    name = f"{hashlib.sha256(content).hexdigest()}.{ending}"
    if not (folder / name).exists():
        part = folder / f".{name}.{os.getpid()}.part"
        part.write_bytes(content)
        os.replace(part, folder / name)
    return name
