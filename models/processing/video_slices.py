"""Decodes some of a video's sampled frames and little else: from the nearest frame before them that needs no other.

Which frame is which is told by time. All packets are read first, undecoded: their times in order are those of the
frames, which holds for files of which one decoding of the whole has shown it (`Medium.seekable`). Then the packets from
an entry point on (`EntryPoints`) go to a decoder, each checked to be the one that was read before, until the last
wanted frame is there; every frame must have the time that is next. So the decoder gets what it would have got, had it
begun at the start. Where anything isn't as expected, nothing is returned, and whoever asked decodes the whole.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import fractions
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

from .containers import check_size, open_container
from .images import target_size
from .media_file import OpenFile, Source, opened, source_name
from .outline import Medium
from .packets import EntryPoints, is_shown
from .resize import resize_frame
from .settings import DecodeLimits, FrameSettings, PatchLayout, PixelSettings
from .videos import bounded, increasing, rated, sample_indices, seconds_per_grid, span, too_many_frames, upright


@dataclasses.dataclass(frozen=True)
class Slice:
    frames: np.ndarray  # u8 [frames, height, width, 3], resized; of the last pair, as many as there are
    decoded: int  # frames that were decoded for them


class _Note(NamedTuple):
    """The notes that are taken of a packet."""

    time: int | None  # of its frame
    begin: int | None  # when decoding it begins
    duration: int
    place: int | None  # in the file, where it is known
    size: int
    shown: bool
    entry: bool  # whether decoding can begin here

    def fits(self, packet: Packet, codec: str) -> bool:
        """Says whether a packet is the one that was noted."""
        same = (packet.pts, packet.pos, packet.size) == (self.time, self.place, self.size)
        return same and is_shown(packet, codec) == self.shown


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The packets and frames to decode."""

    notes: list[_Note]  # of all packets
    first: int  # packet that is decoded
    expected: list[int]  # the times of the frames from it on
    wanted: list[int]  # places among them of those that were sampled and asked for
    bounds: PixelSettings


class _Unexpected(Exception):
    """A stream differs from what was expected, so that it can't be told which of its frames are the wanted ones."""


def load_slice(
    source: Source,
    medium: Medium,
    pairs: range,
    layout: PatchLayout,
    pixels: PixelSettings,
    frames: FrameSettings,
    limits: DecodeLimits,
) -> Slice | None:
    """The sampled frames of neighbouring frame pairs, at least one, of a video that became `medium` by these settings.

    None where they can't be told without decoding the whole, also where the file is not what it was. Raises MediaError
    for a file that can't be used.
    """
    with opened(source) as file, contextlib.suppress(_Unexpected, FFmpegError, OSError):
        return _Slicer(file, source_name(source), medium, layout, pixels, frames, limits).read(pairs)
    return None


@dataclasses.dataclass(frozen=True)
class _Slicer:
    """Reads one video from an open file."""

    file: OpenFile
    name: str  # for messages
    medium: Medium
    layout: PatchLayout
    settings: PixelSettings
    frames: FrameSettings
    limits: DecodeLimits

    def read(self, pairs: range) -> Slice:
        container, stream = open_container(self.file, self.name, self.limits)
        with container:
            plan = self._plan(container, stream, pairs)
            with contextlib.suppress(_Unexpected, FFmpegError):
                return self._decode(_sought(container, stream, plan), stream, plan)
        container, stream = open_container(self.file, self.name, self.limits)
        with container:  # not every format can be sought in
            return self._decode(_checked(container.demux(stream), stream, plan, 0), stream, plan)

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
        bounds = bounded(self.settings, self.frames, len(indices), self.layout)
        return _Plan(notes, first, times[start:], (wanted - start).tolist(), bounds)

    def _notes(self, container: InputContainer, stream: VideoStream) -> list[_Note]:
        """Notes of all packets, in the file's order, without decoding any."""
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
        """The sampled frames. Raises _Unexpected where they are not those of the medium."""
        base = stream.time_base
        ticks = fractions.Fraction(base.numerator, base.denominator) if base else None
        seconds = span(times, durations, ticks, rated(len(times), stream))
        patch = self.layout.temporal_patch_size
        try:
            indices = sample_indices(len(times), seconds, self.frames, patch)
        except ValueError:
            raise _Unexpected from None
        found = -(-len(indices) // patch), seconds_per_grid(seconds, len(indices), patch)
        if found != (self.medium.grid[0], self.medium.seconds_per_grid):
            raise _Unexpected
        return indices

    def _decode(self, packets: Iterator[Packet], stream: VideoStream, plan: _Plan) -> Slice:
        """Decodes the frames of the packets until the wanted ones are there."""
        stream.codec_context.thread_count = 1  # of many slices at a time; and no frames are decoded ahead
        reformatter = VideoReformatter()
        wanted, result, place, decoded = set(plan.wanted), [], 0, 0
        for frame in itertools.chain.from_iterable(packet.decode() for packet in packets):
            assert isinstance(frame, av.VideoFrame)
            decoded += 1
            check_size(frame.width, frame.height, self.name, self.limits)
            if place == 0 and frame.pts is not None and frame.pts < plan.expected[0]:
                continue  # shown before the first one, and may refer to what wasn't decoded
            if frame.is_corrupt or [frame.pts] != plan.expected[place : place + 1]:
                raise _Unexpected
            if place in wanted:
                result.append(self._fitted(upright(frame, reformatter, threads=1), plan))
            if len(result) == len(wanted):
                return Slice(np.stack(result), decoded)
            place += 1
        raise _Unexpected

    def _fitted(self, image: np.ndarray, plan: _Plan) -> np.ndarray:
        """A frame in the medium's size, if that is what its own becomes; it could be another file's."""
        height, width, _ = image.shape
        size = target_size(self.name, width, height, self.layout.factor, plan.bounds)
        if (size[0] // self.layout.patch_size, size[1] // self.layout.patch_size) != self.medium.grid[1:]:
            raise _Unexpected
        return resize_frame(image, *size)


def _sought(container: InputContainer, stream: VideoStream, plan: _Plan) -> Iterator[Packet]:
    """The packets from the first one of the plan on, of a container that was read. Raises _Unexpected, or FFmpegError,
    where they can't be found by their time."""
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
    """The packets from the first one of the plan on, of those from `number` on, all of which must be as noted."""
    codec = stream.codec.canonical_name
    for packet in packets:
        if packet.size:
            if number >= len(plan.notes) or not plan.notes[number].fits(packet, codec):
                raise _Unexpected
            number += 1
        if number > plan.first:
            yield packet
