"""Encodes the media of observations without loss, and writes them to files that are named by their content."""

from __future__ import annotations

import contextlib
import fractions
import hashlib
import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
from av.codec.context import Flags
from PIL import Image

from models.processing.images import load_image
from models.processing.media_file import MediaError
from models.processing.settings import DecodeLimits
from models.processing.videos import video_facts

from ..config.data import EnvironmentLimits
from .observation import EnvironmentFailure, Fault, Observation, Picture, Video

_SIMPLER = {"CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB"}  # modes that PNG lacks


def stored(observation: Observation, folder: pathlib.Path, limits: EnvironmentLimits) -> list[tuple[str, str]]:
    """Writes the images and the videos of an observation to files in `folder`, and returns the (kind, name) of each.
    Raises EnvironmentFailure, and OSError if a file can't be written."""
    for name, media in (("images", observation.images), ("videos", observation.videos)):
        if not isinstance(media, Sequence) or isinstance(media, str | bytes):
            raise EnvironmentFailure(Fault.INVALID, f"{name} are of type {type(media).__name__}, not a list")
    if len(observation.images) + len(observation.videos) > limits.media:
        raise EnvironmentFailure(Fault.TOO_LARGE, f"more than {limits.media} media in an observation")
    try:
        files = [("image", _encoded_image(image, limits)) for image in observation.images]
        files += [("video", _encoded_video(video, observation.fps, limits)) for video in observation.videos]
    except (MediaError, OSError, ValueError, TypeError, SyntaxError) as error:  # Pillow raises SyntaxError, too
        reason = error.reason if isinstance(error, MediaError) else f"{type(error).__name__}: {error}"
        raise EnvironmentFailure(Fault.MEDIUM, f"a medium can't be used: {reason}") from None
    return [(kind, _written(folder, content)) for kind, content in files]


def _encoded_image(image: Picture, limits: EnvironmentLimits) -> bytes:
    """Encodes pixels as PNG. An encoded image stays as it is, once decoding has shown that it is complete."""
    if not isinstance(image, bytes):
        return _png(_rgb(image, limits))
    _check("bytes of an encoded medium", len(image), limits.encoded_bytes)
    load_image(image, DecodeLimits(limits.pixels))
    return image


def _rgb(picture: Any, limits: EnvironmentLimits) -> Image.Image:
    """Returns the pixels as an RGB image without further data, so that equal pixels get equal bytes."""
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.shape[2:] not in ((), (1,), (3,), (4,)):
            raise ValueError(f"an array of shape {picture.shape} and type {picture.dtype} is no image of uint8")
        picture = Image.fromarray(picture[..., 0] if picture.shape[2:] == (1,) else picture)
    if not isinstance(picture, Image.Image):
        raise EnvironmentFailure(Fault.INVALID, f"an image is of type {type(picture).__name__}")
    _check("pixels in an image", picture.width * picture.height, limits.pixels)
    picture.load()
    if picture.mode != "RGB" or "transparency" in picture.info:  # the reader of files decides how other modes look
        simple = picture.convert(_SIMPLER[picture.mode]) if picture.mode in _SIMPLER else picture
        picture = load_image(_png(simple), DecodeLimits(limits.pixels))
    return Image.fromarray(np.asarray(picture))


def _png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "png", compress_level=3)
    return content.getvalue()


def _encoded_video(video: Video, fps: float, limits: EnvironmentLimits) -> bytes:
    """Encodes frames as PNG images in a QuickTime file. An encoded video stays as it is."""
    if isinstance(video, bytes):
        _check("bytes of an encoded medium", len(video), limits.encoded_bytes)
        video_facts(video, DecodeLimits(limits.pixels, limits.frames), count=True)
        return video
    if not isinstance(video, np.ndarray | Sequence) or isinstance(video, str):
        raise EnvironmentFailure(Fault.INVALID, f"a video is of type {type(video).__name__}")
    _check("frames in a video", len(video), limits.frames)
    frames = [np.asarray(_rgb(frame, limits)) for frame in video]
    if len({frame.shape for frame in frames}) != 1:
        raise ValueError("a video needs frames, all of one size")
    content = io.BytesIO()
    with av.open(content, "w", format="mov", options={"fflags": "+bitexact"}) as container:  # without it: versions
        stream = container.add_stream("png", rate=fractions.Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "rgb24"
        stream.codec_context.flags |= Flags.bitexact
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    _check("bytes of an encoded medium", len(content.getvalue()), limits.encoded_bytes)
    return content.getvalue()


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise EnvironmentFailure(Fault.TOO_LARGE, f"more than {most} {what}")


def _written(folder: pathlib.Path, content: bytes) -> str:
    name = hashlib.sha256(content).hexdigest()
    if not (folder / name).exists():
        part = folder / f".{name}.{os.getpid()}.part"
        part.write_bytes(content)
        try:
            with contextlib.suppress(FileExistsError):  # `replace` would change the version of another process' file
                os.link(part, folder / name)
        except OSError:  # no hard links here
            os.replace(part, folder / name)
        part.unlink(missing_ok=True)
    return name
