"""Reads the facts of a medium without its pixels: from its header, or from a video's packets if that isn't credible.

Only the first frame of a video is decoded: nothing else tells its rotation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fractions
import os
import struct
from collections.abc import Iterator

from av.container import InputContainer
from av.error import FFmpegError
from av.video.stream import VideoStream
from PIL import ExifTags, Image

from .containers import check_size, open_container, reason_of
from .images import open_image
from .media_file import MediaError, OpenFile, Source, opened, source_name
from .packets import is_shown
from .settings import DecodeLimits
from .videos import rated, span, too_many_frames

ORIENTATION = ExifTags.Base.Orientation
LYING = range(5, 9)  # EXIF orientations that exchange width and height
PNG_SIGNATURE, PNG_CHECKSUM = 8, 4  # bytes
PNG_NOTES = {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}  # chunks that may hold an EXIF orientation


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of an image or a video. Sides are those of the upright picture, in pixels.

    `seconds` is None where nothing tells how long a video lasts. `counted` is False where a header gives `frames` and
    `seconds`.
    """

    width: int
    height: int
    frames: int = 1
    seconds: float | None = None
    counted: bool = True


def image_facts(source: Source, limits: DecodeLimits) -> Facts:
    """The facts of an image, by its header. Raises MediaError where the header shows that it can't be used."""
    with open_image(source, limits) as (file, content):
        width, height = file.size
        if width != height and _orientation(file, content) in LYING:
            width, height = height, width
        return Facts(width, height)


def _orientation(file: Image.Image, content: OpenFile) -> int:
    """The EXIF orientation; 1 for TIFF files, whose size in Pillow is that of the upright picture already."""
    if file.format == "TIFF":
        return 1
    if file.format == "PNG" and "exif" not in file.info and not _notes_behind_pixels(content):
        return Image.Image.getexif(file).get(ORIENTATION, 1)  # PNG's own `getexif` decodes all pixels
    return file.getexif().get(ORIENTATION, 1)


def _notes_behind_pixels(png: OpenFile) -> bool:
    there = png.tell()
    png.seek(PNG_SIGNATURE)
    behind = found = False
    while not found and len(head := png.read(8)) == 8:
        size, name = struct.unpack(">I4s", head)
        behind |= name == b"IDAT"
        found = behind and name in PNG_NOTES
        png.seek(size + PNG_CHECKSUM, os.SEEK_CUR)
    png.seek(there)
    return found


def video_facts(source: Source, limits: DecodeLimits, *, count: bool = False) -> Facts:
    """The facts of a video. Reads all packets with `count`, or where the header has no credible number of frames.

    Raises MediaError for a file that can't be used, as far as that can be told without decoding.
    """
    name = source_name(source)
    with opened(source) as file:
        container, stream = open_container(file, name, limits)
        with container, _errors(name):
            width, height, begin = _first_frame(container, stream, name, limits)
            said, seconds = stream.frames, rated(stream.frames, stream)
        if 0 < said <= limits.frames and not count:
            return Facts(width, height, said, seconds, counted=False)
        container, stream = open_container(file, name, limits)
        with container, _errors(name):
            frames, seconds = _count(container, stream, begin, name, limits)
    return Facts(width, height, frames, seconds)


def _first_frame(
    container: InputContainer, stream: VideoStream, name: str, limits: DecodeLimits
) -> tuple[int, int, int | None]:
    """Width and height of the first frame, upright, and its time in ticks."""
    stream.codec_context.thread_count = 1  # threads do not speed up a single frame
    for frame in container.decode(stream):
        check_size(frame.width, frame.height, name, limits)
        sides = (frame.height, frame.width) if round(frame.rotation / 90) % 2 else (frame.width, frame.height)
        return *sides, frame.pts
    raise MediaError(name, "no frame can be decoded")


def _count(
    container: InputContainer, stream: VideoStream, begin: int | None, name: str, limits: DecodeLimits
) -> tuple[int, float | None]:
    """(number of frames, their duration in seconds), by the packets of the stream. Frames before `begin` do not count:
    a recording that begins amid a group of pictures lacks the frames that they refer to."""
    shown: list[tuple[int | None, int]] = []  # time and duration in ticks
    for packet in container.demux(stream):
        if is_shown(packet, stream.codec.canonical_name):
            shown.append((packet.pts, packet.duration or 0))
            if len(shown) > limits.frames:
                raise too_many_frames(name, limits)
    if all(time is not None for time, _ in shown):
        shown.sort()  # packets are in the order of decoding
        shown = [frame for frame in shown if begin is None or frame[0] is None or frame[0] >= begin]
    base = stream.time_base
    ticks = fractions.Fraction(base.numerator, base.denominator) if base else None
    times, durations = [time for time, _ in shown], [duration for _, duration in shown]
    return len(shown), span(times, durations, ticks, rated(len(shown), stream))


@contextlib.contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except (FFmpegError, OSError) as error:
        raise MediaError(name, f"cannot be read: {reason_of(error)}") from error
