"""Video files to sampled RGB frames and the time they span, by PyAV, in one decoding pass.

Headers lie (frame counts, frame rates), so a pass decodes on the header's word and is repeated with what it
counted if that was wrong. Only sampled frames are converted and resized; no other frame is kept.
"""

from __future__ import annotations

import dataclasses
import fractions
import io
import itertools
import os

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from .errors import MediaError
from .images import Source, check_source, target_size
from .resize import resize_frame
from .settings import FrameSettings, PatchLayout, PixelSettings

MAX_PASSES = 4
SMALL_VIDEO = 640 * 360 * 120  # pixels in all; below it, starting threads costs more than they save
MAX_THREADS = 4


def sample_indices(total: int, seconds: float | None, frames: FrameSettings, temporal_patch: int) -> np.ndarray:
    """Indices of the frames to read of `total` that last `seconds`, spread as `Qwen2VLVideoProcessor` spreads them.

    Raises ValueError where the setting asks for more frames than there are, or for a rate where time is unknown.
    """
    if total < 1:
        raise ValueError("has no frames")
    if frames.num_frames:
        count = max(temporal_patch, round(frames.num_frames / temporal_patch) * temporal_patch)
    elif frames.fps:
        if seconds is None:
            raise ValueError("has neither timestamps nor a frame rate, so that it can't be sampled by time")
        most = min(frames.max_frames, total) // temporal_patch * temporal_patch
        count = int(min(max(seconds * frames.fps, frames.min_frames), most, total)) // temporal_patch * temporal_patch
        count = max(count, 1)  # a single frame: transformers divides by zero here; it becomes a pair of equals
    else:
        count = total
    if count > total:
        raise ValueError(f"has {total} frames, {count} were asked for")
    # exact; transformers computes the same in float32, which from about 17,000 frames on can be one frame off
    return np.arange(count) * total // count


@dataclasses.dataclass(frozen=True)
class Video:
    frames: np.ndarray  # u8 [frames, height, width, 3], resized
    seconds: float  # the whole video's duration
    indices: np.ndarray  # of the sampled frames

    def seconds_per_grid(self, temporal_patch: int) -> float:
        """The time that one frame pair stands for."""
        return temporal_patch * self.seconds / len(self.indices)


@dataclasses.dataclass
class _Pass:
    """What one pass over the file found; `pixels` is None if it only counted."""

    pixels: np.ndarray | None
    count: int
    seconds: float | None


def load_video(source: Source, layout: PatchLayout, pixels: PixelSettings, frames: FrameSettings) -> Video:
    """Decodes, samples and resizes. Raises MediaError for anything that keeps the result from being right."""
    name = check_source(source)
    total, seconds, decoded = 0, None, False
    for _ in range(MAX_PASSES):
        with _open(source, name) as container:
            stream = container.streams.video[0]
            if not decoded:  # first the header's word
                total, seconds = stream.frames, _rated(stream.frames, stream)
            try:
                indices = sample_indices(total, seconds, frames, layout.temporal_patch_size)
            except ValueError as error:
                if decoded:
                    raise MediaError(name, str(error)) from None
                indices = np.zeros(0, np.int64)  # this pass only counts
            found = _decode(container, stream, name, indices, total, layout, pixels, frames)
        if found.count == 0:
            raise MediaError(name, "no frame can be decoded")
        if found.pixels is not None and found.count == total:
            if found.seconds is None and total > layout.temporal_patch_size:
                raise MediaError(name, "has neither timestamps nor a frame rate")
            if not frames.fps or np.array_equal(
                indices, sample_indices(total, found.seconds, frames, layout.temporal_patch_size)
            ):
                return Video(found.pixels, found.seconds or 1.0, indices)
        total, seconds, decoded = found.count, found.seconds, True
    raise MediaError(name, f"gives another number of frames each time it is decoded (last: {total})")


def _open(source: Source, name: str) -> InputContainer:
    try:
        # "file:" keeps a colon in a path from being read as a protocol; the whitelist keeps playlists off the net
        if isinstance(source, bytes):
            container = av.open(io.BytesIO(source), "r")
        else:
            container = av.open(
                f"file:{os.path.abspath(source)}", "r", container_options={"protocol_whitelist": "file"}
            )
    except (FFmpegError, OSError, ValueError) as error:
        raise MediaError(name, f"cannot be opened as a video: {_reason(error)}") from error
    assert isinstance(container, InputContainer)
    if not container.streams.video:
        container.close()
        raise MediaError(name, "has no video stream")
    return container


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _rated(count: int, stream: VideoStream) -> float | None:
    """Duration of `count` frames at the header's frame rate."""
    rate = stream.average_rate or stream.guessed_rate
    return float(count / rate) if rate else None


def _decode(
    container: InputContainer,
    stream: VideoStream,
    name: str,
    indices: np.ndarray,
    total: int,
    layout: PatchLayout,
    settings: PixelSettings,
    frames: FrameSettings,
) -> _Pass:
    """One pass: the frames at `indices`, resized, and the number of frames and their time span as decoded."""
    slots = {int(index): slot for slot, index in enumerate(indices)}
    pixels: np.ndarray | None = None
    count, times, durations, base = 0, [], [], None
    small = stream.width * stream.height * total < SMALL_VIDEO
    stream.codec_context.thread_count = 1 if small else min(MAX_THREADS, os.cpu_count() or 1)
    stream.thread_type = "SLICE" if small else "AUTO"
    reformatter = VideoReformatter()
    try:
        for frame in container.decode(stream):
            if (slot := slots.get(count)) is not None:
                if frame.is_corrupt:
                    raise MediaError(name, f"frame {count} is damaged")
                image = _upright(reformatter.reformat(frame, format="rgb24", threads=1 if small else 0), frame.rotation)
                if pixels is None:
                    limited = _bounded(settings, frames, len(indices), layout)
                    height, width = target_size(name, image.shape[1], image.shape[0], layout.factor, limited)
                    pixels = np.empty((len(indices), height, width, 3), np.uint8)
                pixels[slot] = resize_frame(image, pixels.shape[1], pixels.shape[2])
            times.append(frame.pts)
            durations.append(frame.duration or 0)
            base = frame.time_base
            count += 1
    except (FFmpegError, OSError) as error:
        raise MediaError(name, f"decoding fails after {count} frames: {_reason(error)}") from error
    ticks = fractions.Fraction(base.numerator, base.denominator) if base else None  # PyAV 19 has a class of its own
    return _Pass(pixels, count, _span(times, durations, ticks, _rated(count, stream)))


def _upright(frame: av.VideoFrame, rotation: int) -> np.ndarray:
    """An RGB frame turned as its display matrix says (phones store portrait videos lying down)."""
    return np.rot90(frame.to_ndarray(), round(rotation / 90) % 4)  # both count counter-clockwise


def _bounded(settings: PixelSettings, frames: FrameSettings, count: int, layout: PatchLayout) -> PixelSettings:
    """The pixel bounds with a whole-video budget shared between `count` frames, if there is one."""
    if not frames.max_video_tokens:
        return settings
    budget = int(frames.max_video_tokens * layout.factor**2 * 0.9)
    share = min(settings.max_pixels, budget * layout.temporal_patch_size // count)
    return dataclasses.replace(settings, max_pixels=max(share, int(settings.min_pixels * 1.05)))


def _span(
    times: list[int | None], durations: list[int], base: fractions.Fraction | None, rated: float | None
) -> float | None:
    """Seconds from the first frame's start to the last one's end, or None where nothing tells.

    Timestamps count where they are complete and increasing; else the frames' own durations, which a bare stream has
    from its parameter sets; else the header's rate (`rated`), which for a bare stream is the demuxer's guess.
    """
    known = [time for time in times if time is not None]
    if base and known and len(known) == len(times) and all(a < b for a, b in itertools.pairwise(known)):
        span = known[-1] - known[0]
        if durations[-1]:
            return float((span + durations[-1]) * base)
        if span:
            return float(span * base) * len(known) / (len(known) - 1)
    if base and durations and all(durations):
        return float(sum(durations) * base)
    return rated
