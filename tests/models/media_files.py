"""Real media files made by real encoders, for tests."""

import contextlib
import dataclasses
import fractions
import io
import os
import pathlib
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from models.processing.media_file import Source, opened, source_name
from models.processing.patches import arrange
from models.processing.settings import DecodeLimits, FrameSettings, PatchLayout, PixelSettings
from models.processing.videos import VideoReader, seconds_per_grid

LAYOUT = PatchLayout(patch_size=8, window_size=32)
PIXELS = PixelSettings(min_pixels=256, max_pixels=64 * 96)
ALL = FrameSettings(num_frames=0, fps=0)
FOUR = FrameSettings(num_frames=4)
CODECS = {
    "mkv": "libx264",
    "webm": "libvpx-vp9",
    "ts": "libx264",
    "avi": "mpeg4",
    "flv": "libx264",
    "ivf": "libvpx-vp9",
    "mpg": "mpeg1video",
    "asf": "mpeg4",
    "h264": "libx264",
    "mp4": "libx264",
}


def parity(*modules: str) -> Any:
    """These modules, one or a list, of torch and transformers. Without the `parity` extra the test is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import, about other packages
        reason = "parity needs the `parity` extra"
        _, *found = (pytest.importorskip(module, reason=reason) for module in ("torch", *modules))
    return found if len(found) > 1 else found[0]


def moving_frames(count: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Frames `[count, height, width, 3]` of a window that pans over a smooth random picture."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 4 + 2, (width + 4 * count) // 4 + 2, 3)).astype(np.float32)
    picture = coarse.repeat(4, axis=0).repeat(4, axis=1).astype(np.uint8)
    return np.stack([picture[:height, 4 * i : 4 * i + width] for i in range(count)])


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@contextlib.contextmanager
def new_video(path: pathlib.Path, **container: Any) -> Iterator[Any]:
    """A container to write. Of all threads of a process of root's, SVT-AV1 makes real-time ones, and so of whatever
    that process starts later: they starve all other processes. So this thread is scheduled as it was afterwards."""
    schedule = (os.sched_getscheduler(0), os.sched_getparam(0)) if hasattr(os, "sched_getscheduler") else None
    try:
        with av.open(str(path), "w", **container) as output:
            yield output
    finally:
        if schedule:
            os.sched_setscheduler(0, *schedule)


def write_video(
    path: pathlib.Path,
    frames: np.ndarray,
    *,
    fps: int = 8,
    codec: str = "libx264",
    times: list[int] | None = None,
    pixel_format: str = "",
    title: str = "",
    **container,
) -> pathlib.Path:
    """Encodes the frames; `times` are their timestamps in 1/1000 s, where they are not evenly spaced."""
    with new_video(path, **container) as output:
        output.metadata["title"] = title
        stream: Any = output.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], pixel_format or "yuv420p"
        if codec == "libx264":
            stream.options = {"crf": "10", "bf": "0" if times else "2", "g": "4"}
        if times:
            stream.codec_context.time_base = fractions.Fraction(1, 1000)
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            if times:
                frame.pts, frame.time_base = times[index], fractions.Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


@dataclasses.dataclass(frozen=True)
class Video:
    frames: np.ndarray  # u8 [frames, height, width, 3], resized
    seconds: float | None  # the whole video's duration; None where nothing tells, of one frame pair
    indices: np.ndarray  # of the sampled frames in the file

    def seconds_per_grid(self, temporal_patch: int) -> float:
        """The time that one frame pair stands for."""
        return seconds_per_grid(self.seconds, len(self.indices), temporal_patch)


def load_video(
    source: Source,
    layout: PatchLayout,
    pixels: PixelSettings,
    frames: FrameSettings,
    limits: DecodeLimits = DecodeLimits(),  # noqa: B008 (frozen)
) -> Video:
    """Decodes, samples and resizes a video. Raises what `VideoReader.read` raises."""
    kept: dict[int, np.ndarray] = {}
    with opened(source) as file:
        reader = VideoReader(file, source_name(source), layout, pixels, frames, limits)
        sampling = reader.read(lambda slot, count, frame: kept.update({slot: frame}))
    whole = np.stack([kept[slot] for slot in range(len(sampling.indices))])
    return Video(whole, sampling.seconds, sampling.indices)


def decoded(path: pathlib.Path) -> np.ndarray:
    """All frames `[frames, height, width, 3]`, decoded plainly."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def load(source: pathlib.Path | str | bytes, frames: FrameSettings = FOUR, **limits: int) -> Any:
    """The video of a file or of bytes, as `LAYOUT` and `PIXELS` have it."""
    given = source if isinstance(source, bytes) else str(source)
    return load_video(given, LAYOUT, PIXELS, frames, DecodeLimits(**limits))


def whole(folder: pathlib.Path, kind: str, **options) -> bytes:
    """A video of a kind of `CODECS`: 24 frames of 64 x 96 pixels, 12 a second, but for MPEG 25."""
    form = {"format": "h264"} if kind == "h264" else {}
    fps = 25 if kind == "mpg" else 12
    path = write_video(folder / f"a.{kind}", moving_frames(24, 64, 96), fps=fps, codec=CODECS[kind], **form, **options)
    return path.read_bytes()


def turn(path: pathlib.Path, degrees: int) -> pathlib.Path:
    """Writes a display matrix into the track header of an MP4 file, as phones do: shown so far to the right."""
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    assert struct.unpack(">9i", data[matrix : matrix + 36])[0] == 0x10000
    cosine, sine = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    a, b = cosine * 0x10000, sine * 0x10000
    data[matrix : matrix + 36] = struct.pack(">9i", a, b, 0, -b, a, 0, 0, 0, 0x40000000)
    path.write_bytes(data)
    return path


def in_raster_order(settings, kind, path):
    """(the medium, its normalised patches `[P, X]` as Hugging Face's processors order them)."""
    medium, patches = settings.load(kind, path)
    order = arrange([medium.grid], settings.layout).feature_order
    return medium, settings.normalised(kind, patches).reshape(len(order), -1)[order].reshape(len(patches), -1)
