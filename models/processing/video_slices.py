"""Decodes some of a video's sampled frames, beginning at the nearest entry point before them.

Frames are identified by their times. All packets are read first, without decoding. Their sorted times are the frames'
times, as a complete decoding has shown (`Medium.seekable`). Then the packets from an entry point on (`EntryPoints`) go
to a decoder, until the last requested frame is there. Each packet must equal that of the first reading, and each
frame must have the next time of the list. A decoding from the start would then give the same frames. If a packet or
frame differs after seeking, the packets are read without seeking. If a packet or frame differs again, `slice` returns
None, and the caller decodes the complete file."""

import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from .containers import EntryPoints, check_size, is_shown, open_container
from .media_file import Medium
from .patches import resize_frame
from .videos import VideoReader, duration_of, increasing, seconds_per_grid, too_many_frames, upright


@dataclasses.dataclass(frozen=True)
class Slice:
    frames: np.ndarray  # u8 [frames, height, width, 3], resized; the last pair may lack frames
    decoded: int  # number of frames decoded to get `frames`


class _Note(NamedTuple):
    """Facts of a packet that was read and not decoded."""

    time: int | None  # time of the packet's frame, in the stream's time base
    begin: int | None  # time of the frame's decoding
    duration: int
    place: int | None  # byte offset in the file; None: unknown
    size: int
    shown: bool
    entry: bool  # whether decoding can begin here

    def fits(self, packet: Packet, codec: str) -> bool:
        same = (packet.pts, packet.pos, packet.size) == (self.time, self.place, self.size)
        return same and is_shown(packet, codec) == self.shown


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The packets and frames to decode."""

    notes: list[_Note]  # notes of all packets, in file order
    first: int  # number of the first packet that is decoded
    expected: list[int]  # the times of the frames from that packet on
    wanted: list[int]  # indices in `expected` of the requested frames
    count: int  # number of sampled frames in the video


class _Unexpected(Exception):
    """A stream differs from what was expected, so that the requested frames can't be identified in it."""


@dataclasses.dataclass(frozen=True)
class VideoSlicer(VideoReader):
    """Reads frame pairs from an open file of a video that became `medium` by these settings."""

    medium: Medium

    def slice(self, pairs: range) -> Slice | None:
        """The sampled frames of the frame pairs `pairs`. None if the file has changed, or if only a complete decoding
        can identify the frames. Raises MediaError for a file that can't be used."""
        with contextlib.suppress(_Unexpected, FFmpegError, OSError):
            container, stream = open_container(self.file, self.name, self.limits)
            with container:
                plan = self._plan(container, stream, pairs)
                with contextlib.suppress(_Unexpected, FFmpegError):
                    return self._slice(_sought(container, stream, plan), stream, plan)
            container, stream = open_container(self.file, self.name, self.limits)
            with container:  # not every format supports seeking
                return self._slice(_checked(container.demux(stream), stream, plan, 0), stream, plan)
        return None

    def _plan(self, container: InputContainer, stream: VideoStream, pairs: range) -> _Plan:
        notes = self._notes(container, stream)
        shown = sorted((note.time, note.duration) for note in notes if note.shown and note.time is not None)
        times = [time for time, _ in shown]
        if not increasing(times) or any(note.shown and note.time is None for note in notes):
            raise _Unexpected
        indices = self._indices(stream, times, [duration for _, duration in shown])
        patch = self.layout.temporal_patch_size
        wanted = indices[pairs.start * patch : pairs.stop * patch]
        before = (n for n, note in enumerate(notes) if note.entry and (note.time or 0) <= times[wanted[0]])
        first = max(before, default=0)
        start = bisect.bisect_left(times, notes[first].time or 0) if first else 0
        return _Plan(notes, first, times[start:], (wanted - start).tolist(), len(indices))

    def _notes(self, container: InputContainer, stream: VideoStream) -> list[_Note]:
        notes: list[_Note] = []
        points, codec, count = EntryPoints(stream), stream.codec.canonical_name, 0
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            shown, entry = is_shown(packet, codec), points.saw(packet)
            count += shown
            if count > self.limits.frames:
                raise too_many_frames(self.name, self.limits)
            entry &= packet.pts is not None
            begin = packet.pts if packet.dts is None else packet.dts
            notes.append(_Note(packet.pts, begin, packet.duration or 0, packet.pos, packet.size, shown, entry))
        return notes

    def _indices(self, stream: VideoStream, times: list[int], durations: list[int]) -> np.ndarray:
        """The indices of the sampled frames. Raises _Unexpected if the indices don't fit the medium."""
        seconds = duration_of(times, durations, stream.time_base, stream)
        patch = self.layout.temporal_patch_size
        try:
            indices = self._sample(len(times), seconds)
        except ValueError:
            raise _Unexpected from None
        found = -(-len(indices) // patch), seconds_per_grid(seconds, len(indices), patch)
        if found != (self.medium.grid[0], self.medium.seconds_per_grid):
            raise _Unexpected
        return indices

    def _slice(self, packets: Iterator[Packet], stream: VideoStream, plan: _Plan) -> Slice:
        stream.codec_context.thread_count = 1  # many slices are decoded at a time; one thread decodes no frame ahead
        reformatter = VideoReformatter()
        wanted, result, place, decoded = set(plan.wanted), [], 0, 0
        for frame in itertools.chain.from_iterable(packet.decode() for packet in packets):
            assert isinstance(frame, av.VideoFrame)
            decoded += 1
            check_size(frame.width, frame.height, self.name, self.limits)
            if place == 0 and frame.pts is not None and frame.pts < plan.expected[0]:
                continue  # a frame that precedes the entry point may refer to frames that were not decoded
            if frame.is_corrupt or [frame.pts] != plan.expected[place : place + 1]:
                raise _Unexpected
            if place in wanted:
                result.append(self._fitted(upright(frame, reformatter, threads=1), plan))
            if len(result) == len(wanted):
                return Slice(np.stack(result), decoded)
            place += 1
        raise _Unexpected

    def _fitted(self, image: np.ndarray, plan: _Plan) -> np.ndarray:
        """The frame resized to the medium's size. Raises _Unexpected if the frame's own size leads to another grid."""
        height, width, _ = image.shape
        size = self.size(width, height, plan.count)
        if (size[0] // self.layout.patch_size, size[1] // self.layout.patch_size) != self.medium.grid[1:]:
            raise _Unexpected
        return resize_frame(image, *size)


def _sought(container: InputContainer, stream: VideoStream, plan: _Plan) -> Iterator[Packet]:
    """Yields the packets from the plan's first one on, found by its time, or raises _Unexpected or FFmpegError."""
    note, codec = plan.notes[plan.first], stream.codec.canonical_name
    if plan.first == 0 or note.begin is None:
        raise _Unexpected
    container.seek(note.begin, stream=stream)
    packets = container.demux(stream)
    head = next(packets)
    number = next((n for n in range(plan.first, -1, -1) if plan.notes[n].fits(head, codec)), None)
    if number is None:
        raise _Unexpected
    yield from _checked(itertools.chain([head], packets), stream, plan, number)


def _checked(packets: Iterable[Packet], stream: VideoStream, plan: _Plan, number: int) -> Iterator[Packet]:
    """Yields the packets from the plan's first packet on. `packets` begins with the packet of number `number`. Raises
    _Unexpected for a packet that does not fit its note."""
    codec = stream.codec.canonical_name
    for packet in packets:
        if packet.size:
            if number >= len(plan.notes) or not plan.notes[number].fits(packet, codec):
                raise _Unexpected
            number += 1
        if number > plan.first:
            yield packet
