"""Decodes video files by PyAV: into sampled RGB frames and the time that the frames span, or into the video's facts.

The first pass samples by the header's number and rate of frames. If the header is wrong, another pass samples by
counted numbers. Only sampled frames are converted and resized; no frame is kept.
"""

import contextlib
import dataclasses
import fractions
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import av
import numpy as np
from av.container import InputContainer
from av.error import ArgumentError, FFmpegError
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from .containers import Ending, check_size, is_shown, open_container, reason_of
from .images import target_size
from .media_file import Facts, MediaError, OpenFile, Source, opened, source_name
from .patches import resize_frame
from .settings import DecodeLimits, FrameSettings, PatchLayout, PixelSettings

MAX_PASSES = 4
UNKNOWN_RATE = 24.0  # frames per second, if a video does not say its rate; as in transformers
SMALL_VIDEO = 640 * 360 * 120  # pixels of all frames; for fewer pixels, threads cost more than they save
MAX_THREADS = 4
# Gets (number of a sampled frame, count of sampled frames, the frame as `[height, width, 3]`, uint8, upright, resized).
Keep: TypeAlias = Callable[[int, int, np.ndarray], object]


def sample_indices(
    total: int, seconds: float | None, frames: FrameSettings, temporal_patch: int, *, timed: bool = False
) -> np.ndarray:
    """Indices of the frames to sample among `total` frames that last `seconds`, spread as in `Qwen2VLVideoProcessor` or
    (`timed`) `Qwen3VLVideoProcessor`, which also samples the last frame, and allows any number of frames. Raises
    ValueError for no frames, for more than `total`, and for a rate while `seconds` is None."""
    if total < 1:
        raise ValueError("has no frames")
    if frames.num_frames and timed:
        count = frames.num_frames
    elif frames.num_frames:
        count = max(temporal_patch, round(frames.num_frames / temporal_patch) * temporal_patch)
    elif frames.fps:
        if seconds is None:
            raise ValueError("has neither timestamps nor a frame rate, so that it can't be sampled by time")
        most = min(frames.max_frames, total)
        if timed:
            count = min(max(int(total / (total / seconds) * frames.fps), frames.min_frames), most)
        else:
            most = most // temporal_patch * temporal_patch
            count = int(min(max(seconds * frames.fps, frames.min_frames), most)) // temporal_patch * temporal_patch
            count = max(count, 1)  # a single frame becomes a pair of equal frames, while transformers divides by zero
    else:
        count = total
    if count > total:
        raise ValueError(f"has {total} frames, but {count} were asked for")
    if timed:
        return np.linspace(0, total - 1, count).round().astype(np.int64)
    # exact; transformers computes the same in float32, which from about 17,000 frames on can be one frame off
    return np.arange(count) * total // count


def pair_times(indices: np.ndarray, total: int, seconds: float | None, temporal_patch: int) -> tuple[float, ...]:
    """The time of each frame pair in seconds, rounded to tenths: the mean of the times of the pair's first and last
    frames, as in `Qwen3VLProcessor`. The frames `indices` were sampled among `total` frames that last `seconds`."""
    rate = total / seconds if seconds else UNKNOWN_RATE
    filled = np.append(indices, np.repeat(indices[-1:], -len(indices) % temporal_patch)).tolist()
    times = [index / rate for index in filled]
    return tuple(
        round((times[first] + times[first + temporal_patch - 1]) / 2, 1)
        for first in range(0, len(times), temporal_patch)
    )


def seconds_per_grid(seconds: float | None, frames: int, temporal_patch: int) -> float:
    """The seconds that a frame pair spans, if `frames` were sampled. The value doesn't matter for a single pair."""
    return temporal_patch * (seconds or 1.0) / frames


@dataclasses.dataclass(frozen=True)
class Sampling:
    indices: np.ndarray  # indices of the sampled frames in the file
    total: int  # the number of frames in the file
    seconds: float | None  # duration of the video; None (unknown) only if the video has at most one frame pair
    seekable: bool  # whether the packets have the times of exactly the frames that decoding gave


@dataclasses.dataclass(frozen=True)
class VideoReader:
    """Reads one video from an open file."""

    file: OpenFile
    name: str  # for messages
    layout: PatchLayout
    settings: PixelSettings
    frames: FrameSettings
    limits: DecodeLimits

    def read(self, keep: Keep) -> Sampling:
        """Decodes, samples and resizes the video, and gives `keep` one sampled frame after the other. If the header is
        wrong about the frames, sampling begins anew with the first frame, and all earlier frames are void. Raises
        MediaError for a video beyond `limits`, and for a damaged or cut-off file. All frames are void then."""
        total, seconds, decoded = 0, None, False
        for _ in range(MAX_PASSES):
            container, stream = open_container(self.file, self.name, self.limits)
            with container:
                if not decoded and stream.frames <= self.limits.frames:  # the first pass goes by the header
                    total, seconds = stream.frames, rated(stream.frames, stream)
                try:
                    indices = self._sample(total, seconds)
                except ValueError as error:
                    if decoded:
                        raise MediaError(self.name, str(error)) from None
                    indices = np.zeros(0, np.int64)  # this pass only counts
                count, duration, seekable = self._decode(container, stream, indices, total, keep)
            if count == 0:
                raise MediaError(self.name, "no frame can be decoded")
            if len(indices) and count == total:
                if duration is None and total > self.layout.temporal_patch_size:
                    raise MediaError(self.name, "has neither timestamps nor a frame rate")
                if not self.frames.fps or np.array_equal(indices, self._sample(total, duration)):
                    return Sampling(indices, total, duration, seekable)
            total, seconds, decoded = count, duration, True
        raise MediaError(self.name, f"gives another number of frames each time it is decoded (last: {total})")

    def _sample(self, total: int, seconds: float | None) -> np.ndarray:
        patch = self.layout.temporal_patch_size
        return sample_indices(total, seconds, self.frames, patch, timed=self.layout.timed)

    def size(self, width: int, height: int, count: int) -> tuple[int, int]:
        """The (height, width) that `count` sampled frames of this size are resized to. Raises MediaError."""
        return video_size(self.name, width, height, count, self.layout, self.settings, self.frames)

    def _decode(
        self, container: InputContainer, stream: VideoStream, indices: np.ndarray, total: int, keep: Keep
    ) -> tuple[int, float | None, bool]:
        """Gives `keep` the frames of these indices. Returns the number of all frames, their duration in seconds, and
        whether a frame can be found again by its time."""
        slots = {int(index): slot for slot, index in enumerate(indices)}
        size: tuple[int, int] | None = None
        times: list[int | None] = []  # one entry for every frame, as in `durations`
        durations: list[int] = []
        damaged: list[int] = []  # indices of damaged frames
        told: list[int | None] = []  # the times of shown packets
        base = None  # the time base of the last frame
        small = stream.width * stream.height * total < SMALL_VIDEO
        stream.codec_context.thread_count = 1 if small else min(MAX_THREADS, os.cpu_count() or 1)
        stream.thread_type = "SLICE" if small else "AUTO"
        reformatter = VideoReformatter()
        ending = Ending(container, stream)
        try:
            for frame in self._every_frame(container, stream, ending, told):
                index = len(times)
                if frame.is_corrupt:
                    damaged.append(index)
                if (slot := slots.get(index)) is not None:
                    if frame.is_corrupt:
                        raise MediaError(self.name, f"frame {index} is damaged")
                    image = upright(frame, reformatter, threads=1 if small else 0)
                    if size is None:
                        size = self.size(image.shape[1], image.shape[0], len(indices))
                    keep(slot, len(indices), resize_frame(image, *size))
                times.append(frame.pts)
                durations.append(frame.duration or 0)
                base = frame.time_base
        except (FFmpegError, OSError) as error:
            reason = f"decoding fails after {len(times)} frames: {reason_of(error)}"
            if isinstance(error, ArgumentError):  # decoders raise this for a frame far beyond the bound
                reason += ", as for a frame with more pixels than the bound"
            raise MediaError(self.name, reason) from error
        if reason := ending.cut_off(self.file, times, damaged):
            raise MediaError(self.name, f"is cut off: {reason}")
        seekable = not damaged and base == stream.time_base and increasing(times)
        seekable &= len(told) == len(times) and {*told} == {*times}  # packets are in the order of decoding
        return len(times), duration_of(times, durations, base, stream), seekable

    def _every_frame(
        self, container: InputContainer, stream: VideoStream, ending: Ending, told: list[int | None]
    ) -> Iterator[av.VideoFrame]:
        """Yields decoded frames in order. `ending` sees every packet; `told` gets the times of shown packets."""
        count, codec = 0, stream.codec.canonical_name
        for packet in container.demux():
            ending.saw(packet)
            if packet.stream_index != stream.index:
                continue
            if is_shown(packet, codec):
                told.append(packet.pts)
            for frame in packet.decode():
                assert isinstance(frame, av.VideoFrame)
                count += 1
                if count > self.limits.frames:
                    raise too_many_frames(self.name, self.limits)
                check_size(frame.width, frame.height, self.name, self.limits)  # the size may change within a video
                yield frame


def upright(frame: av.VideoFrame, reformatter: VideoReformatter, threads: int) -> np.ndarray:
    """The pixels `[height, width, 3]` (uint8) of a decoded frame."""
    rgb = reformatter.reformat(frame, format="rgb24", threads=threads)
    # Phones store portrait videos lying down, with a rotation. PyAV and numpy count angles counter-clockwise.
    return np.rot90(rgb.to_ndarray(), round(frame.rotation / 90) % 4)


def too_many_frames(name: str, limits: DecodeLimits) -> MediaError:
    return MediaError(name, f"too many frames: more than {limits.frames}")


def rated(count: int, stream: VideoStream) -> float | None:
    """The duration of `count` frames in seconds at the header's frame rate; None if the header has no rate."""
    rate = stream.average_rate or stream.guessed_rate
    return float(count / rate) if rate else None


def video_size(
    name: str, width: int, height: int, count: int, layout: PatchLayout, settings: PixelSettings, frames: FrameSettings
) -> tuple[int, int]:
    """The (height, width) that `count` sampled frames of a video are resized to. Raises MediaError."""
    factor, patch = layout.factor, layout.temporal_patch_size
    bounds = bounded(settings, frames, count, layout)
    if not layout.timed:
        return target_size(name, width, height, factor, bounds)
    if min(width, height) < factor:
        scale = max(factor / height, factor / width)
        width, height = int(width * scale), int(height * scale)
    return target_size(name, width, height, factor, bounds, max(count, patch), patch)


def bounded(settings: PixelSettings, frames: FrameSettings, count: int, layout: PatchLayout) -> PixelSettings:
    """The pixel bounds of a frame or, in a timed layout, of all frames, by `FrameSettings.max_video_tokens`."""
    if not frames.max_video_tokens:
        return settings
    if layout.timed:
        share = min(frames.max_video_tokens * layout.factor**2, settings.max_pixels // count)
        return dataclasses.replace(settings, max_pixels=max(share, int(settings.min_pixels * 1.05)) * count)
    budget = int(frames.max_video_tokens * layout.factor**2 * 0.9)
    share = min(settings.max_pixels, budget * layout.temporal_patch_size // count)
    return dataclasses.replace(settings, max_pixels=max(share, int(settings.min_pixels * 1.05)))


def increasing(times: Sequence[int | None]) -> bool:
    """Says whether every frame has a time, and the times increase."""
    known = [time for time in times if time is not None]
    return 0 < len(known) == len(times) and all(a < b for a, b in itertools.pairwise(known))


def duration_of(times: Sequence[int | None], durations: Sequence[int], base: Any, stream: VideoStream) -> float | None:
    """The seconds from the first frame's start to the last frame's end; None if the seconds are unknown. `times` and
    `durations` of frames are in ticks of `base`. Timestamps count if they are complete and increasing, else the frames'
    own durations (of a bare stream, those of its parameter sets), else the header's rate."""
    base = fractions.Fraction(base.numerator, base.denominator) if base else None  # PyAV 19 has its own class
    if base and increasing(times):
        known = [time for time in times if time is not None]
        ticks = known[-1] - known[0]
        if durations[-1]:
            return float((ticks + durations[-1]) * base)
        if ticks:
            return float(ticks * base) * len(known) / (len(known) - 1)
    if base and durations and all(durations):
        return float(sum(durations) * base)
    return rated(len(times), stream)


def video_facts(source: Source, limits: DecodeLimits, *, count: bool = False) -> Facts:
    """The facts of a video. Reads all packets with `count`, or if the header has no credible number of frames. Raises
    MediaError for a file that can't be used, as far as packets and the first frame tell."""
    name = source_name(source)
    with opened(source) as file:
        container, stream = open_container(file, name, limits)
        with container, _errors(name):
            stream.codec_context.thread_count = 1  # threads do not speed up a single frame
            if (frame := next(iter(container.decode(stream)), None)) is None:
                raise MediaError(name, "no frame can be decoded")
            check_size(frame.width, frame.height, name, limits)
            sides = (frame.width, frame.height)
            width, height = sides[::-1] if round(frame.rotation / 90) % 2 else sides
            begin = frame.pts
            said, seconds = stream.frames, rated(stream.frames, stream)
        if 0 < said <= limits.frames and not count:
            return Facts(width, height, said, seconds, counted=False)
        container, stream = open_container(file, name, limits)
        with container, _errors(name):
            frames, seconds = _count(container, stream, begin, name, limits)
    return Facts(width, height, frames, seconds)


def _count(
    container: InputContainer, stream: VideoStream, begin: int | None, name: str, limits: DecodeLimits
) -> tuple[int, float | None]:
    """Returns (number of frames, their duration in seconds), by the packets of the stream. Frames before the tick
    `begin` do not count, since these refer to frames that a recording may lack."""
    shown: list[tuple[int | None, int]] = []  # time and duration in ticks
    for packet in container.demux(stream):
        if is_shown(packet, stream.codec.canonical_name):
            shown.append((packet.pts, packet.duration or 0))
            if len(shown) > limits.frames:
                raise too_many_frames(name, limits)
    if all(time is not None for time, _ in shown):
        shown.sort()  # packets are in the order of decoding
        shown = [frame for frame in shown if begin is None or frame[0] is None or frame[0] >= begin]
    times, durations = [time for time, _ in shown], [duration for _, duration in shown]
    return len(shown), duration_of(times, durations, stream.time_base, stream)


@contextlib.contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except (FFmpegError, OSError) as error:
        raise MediaError(name, f"cannot be read: {reason_of(error)}") from error
