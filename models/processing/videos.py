"""Decodes video files into sampled RGB frames and the time that they span, by PyAV, in one pass.

Headers lie (frame counts, frame rates), so a pass decodes on the header's word and is repeated with what it
counted if that was wrong. Only sampled frames are converted and resized; no other frame is kept.
"""

import dataclasses
import fractions
import itertools
import os
from collections.abc import Iterator

import av
import numpy as np
from av.container import InputContainer
from av.error import ArgumentError, FFmpegError
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from .containers import Ending, check_size, open_container, reason_of
from .images import target_size
from .media_file import MediaError, OpenFile, Source, opened, source_name
from .resize import resize_frame
from .settings import DecodeLimits, FrameSettings, PatchLayout, PixelSettings

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
    indices: np.ndarray  # of the sampled frames in the file

    def seconds_per_grid(self, temporal_patch: int) -> float:
        """The time that one frame pair stands for."""
        return temporal_patch * self.seconds / len(self.indices)


@dataclasses.dataclass
class _Pass:
    """The result of one pass over the file; `pixels` is None where no frame was asked for."""

    pixels: np.ndarray | None
    count: int
    seconds: float | None


def load_video(
    source: Source,
    layout: PatchLayout,
    pixels: PixelSettings,
    frames: FrameSettings,
    limits: DecodeLimits = DecodeLimits(),  # noqa: B008 (frozen)
) -> Video:
    """Decodes, samples and resizes a video.

    Raises MediaError for anything that keeps the result from being right, as a file that was cut off, and for what
    exceeds `limits`.
    """
    with opened(source) as file:
        return _Reader(file, source_name(source), layout, pixels, frames, limits).video()


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads one video from an open file."""

    file: OpenFile
    name: str  # for messages
    layout: PatchLayout
    settings: PixelSettings
    frames: FrameSettings
    limits: DecodeLimits

    def video(self) -> Video:
        total, seconds, decoded = 0, None, False
        for _ in range(MAX_PASSES):
            container, stream = open_container(self.file, self.name, self.limits)
            with container:
                if not decoded and stream.frames <= self.limits.frames:  # first the header's word
                    total, seconds = stream.frames, _rated(stream.frames, stream)
                try:
                    indices = self._sample(total, seconds)
                except ValueError as error:
                    if decoded:
                        raise MediaError(self.name, str(error)) from None
                    indices = np.zeros(0, np.int64)  # this pass only counts
                found = self._decode(container, stream, indices, total)
            if found.count == 0:
                raise MediaError(self.name, "no frame can be decoded")
            if found.pixels is not None and found.count == total:
                if found.seconds is None and total > self.layout.temporal_patch_size:
                    raise MediaError(self.name, "has neither timestamps nor a frame rate")
                if not self.frames.fps or np.array_equal(indices, self._sample(total, found.seconds)):
                    return Video(found.pixels, found.seconds or 1.0, indices)
            total, seconds, decoded = found.count, found.seconds, True
        raise MediaError(self.name, f"gives another number of frames each time it is decoded (last: {total})")

    def _sample(self, total: int, seconds: float | None) -> np.ndarray:
        return sample_indices(total, seconds, self.frames, self.layout.temporal_patch_size)

    def _decode(self, container: InputContainer, stream: VideoStream, indices: np.ndarray, total: int) -> _Pass:
        """Makes one pass: the frames at `indices`, resized, and the number of frames and their time span as decoded."""
        slots = {int(index): slot for slot, index in enumerate(indices)}
        pixels: np.ndarray | None = None
        times: list[int | None] = []  # one entry for every frame, as in the next two lists
        durations: list[int] = []
        damaged: list[int] = []
        base = None  # the time base of the last frame
        small = stream.width * stream.height * total < SMALL_VIDEO
        stream.codec_context.thread_count = 1 if small else min(MAX_THREADS, os.cpu_count() or 1)
        stream.thread_type = "SLICE" if small else "AUTO"
        reformatter = VideoReformatter()
        ending = Ending(container, stream)
        try:
            for frame in self._every_frame(container, stream, ending):
                index = len(times)
                if frame.is_corrupt:
                    damaged.append(index)
                if (slot := slots.get(index)) is not None:
                    if frame.is_corrupt:
                        raise MediaError(self.name, f"frame {index} is damaged")
                    rgb = reformatter.reformat(frame, format="rgb24", threads=1 if small else 0)
                    # Phones store portrait videos lying down, with a rotation. Both count counter-clockwise.
                    image = np.rot90(rgb.to_ndarray(), round(frame.rotation / 90) % 4)
                    if pixels is None:
                        bounds = _bounded(self.settings, self.frames, len(indices), self.layout)
                        size = target_size(self.name, image.shape[1], image.shape[0], self.layout.factor, bounds)
                        pixels = np.empty((len(indices), *size, 3), np.uint8)
                    pixels[slot] = resize_frame(image, pixels.shape[1], pixels.shape[2])
                times.append(frame.pts)
                durations.append(frame.duration or 0)
                base = frame.time_base
        except (FFmpegError, OSError) as error:
            reason = f"decoding fails after {len(times)} frames: {reason_of(error)}"
            if isinstance(error, ArgumentError):  # decoders answer so to a frame far beyond the bound
                reason += ", as for a frame of more than data.max_decoded_pixels"
            raise MediaError(self.name, reason) from error
        if reason := ending.cut_off(self.file, times, damaged):
            raise MediaError(self.name, f"is cut off: {reason}")
        ticks = fractions.Fraction(base.numerator, base.denominator) if base else None  # PyAV 19 has a class of its own
        return _Pass(pixels, len(times), _span(times, durations, ticks, _rated(len(times), stream)))

    def _every_frame(self, container: InputContainer, stream: VideoStream, ending: Ending) -> Iterator[av.VideoFrame]:
        """The decoded frames in order; `ending` is shown every packet."""
        count = 0
        for packet in container.demux():
            ending.saw(packet)
            for frame in packet.decode() if packet.stream_index == stream.index else ():
                assert isinstance(frame, av.VideoFrame)
                count += 1
                if count > self.limits.frames:
                    raise MediaError(
                        self.name,
                        f"too many frames: more than {self.limits.frames} are not decoded (data.max_decoded_frames)",
                    )
                check_size(frame.width, frame.height, self.name, self.limits)  # the size may change on the way
                yield frame


def _rated(count: int, stream: VideoStream) -> float | None:
    """The duration of `count` frames in seconds at the header's frame rate."""
    rate = stream.average_rate or stream.guessed_rate
    return float(count / rate) if rate else None


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
    """The seconds from the first frame's start to the last frame's end, or None where nothing tells.

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
