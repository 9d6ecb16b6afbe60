"""Opens video files so that no other file is read, recognises files that were cut off, and reads packets undecoded.

FFmpeg decodes a cut-off file as a shorter video and reports no error. An incomplete last packet, or the damaged frames
that follow from it, show the cut in every format. Matroska, FLV and IVF files declare their length; transport streams
consist of packets of one size. Transport, program and bare streams declare no length, and AVI files often a wrong
length: files of these four kinds look complete if they were cut between two packets.

A decoder that begins in the middle of a stream must give the same frames as one that began at its start. A packet that
the container marks as a key frame may give others: the mark may be wrong, a step-by-step refresh of the picture may
begin there (H.264's recovery points), or parameters for decoding may stand only earlier in the stream. Sources: ITU-T
H.264 and H.265 (7.3.1, 7.4.2.2), RFC 6386 (9.1), the VP9 bitstream specification (6.2), the AV1 specification (5.3 to
5.9), ISO/IEC 13818-2 and 14496-2 (6.2).
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import av
from av.container import InputContainer
from av.error import ArgumentError, FFmpegError
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from .media_file import MediaError, OpenFile
from .settings import DecodeLimits

# FFmpeg's names of the formats that hold a video's own frames. Animated GIFs count as videos. The list leaves out
# playlists, scripts and session descriptions (hls, dash, concat, sdp, ...), which name other files or hosts, and single
# pictures.
FORMATS = (
    *("asf", "avi", "flv", "gif", "ivf", "matroska", "mov", "mpeg", "mpegts", "mxf", "ogg"),
    *("h264", "hevc", "m4v", "mpegvideo"),  # bare streams
)
PICTURE_BRANDS = {"avif", "heic", "heix", "mif1"}  # brands of AVIF and HEIF, which FFmpeg reads as MP4
NO_PROTOCOLS = ""  # FFmpeg opens no file that another file names
# Before version 19, PyAV needs this option for titles in unknown encodings.
_TITLES: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
BUFFER_BYTES = 1 << 18  # of one read; every read takes the interpreter's lock
CODED = 2  # coded pixels for each shown pixel, at most: codecs pad sides to multiples of a block

SAYING_LENGTH = {"matroska", "flv", "ivf"}  # formats that declare their length correctly
TOLERANCE = 0.01  # share of the declared length that may be missing
REORDERED = 16  # a decoder (H.264, HEVC) holds back up to 16 frames, so that a cut may damage any of the last 16
TS_PACKET, TS_SYNC = 188, b"G"  # bytes of a transport stream's packet, and the byte that each packet begins with

START = b"\0\0\1"  # start of a unit of a bytestream
SEQUENCE, PICTURE = b"\0\0\1\xb3", b"\0\0\1\0"  # start codes of MPEG-1 and -2
INTRA = 1  # MPEG's type of a picture that depends on no other
# Old builds of x264 wrote direct prediction (up to 33) and 4:4:4 (up to 151) wrongly, and FFmpeg reads them so.
# FFmpeg reads the build from a note in the first frame, which a decoder that begins later doesn't see.
X264 = re.compile(rb"x264 - core (\d+)")
X264_DIRECT, X264_444 = 33, 151


def open_container(file: OpenFile, name: str, limits: DecodeLimits) -> tuple[InputContainer, VideoStream]:
    """The container in `file`, which stays open, and the stream of its video. `name` is for messages. Raises MediaError
    if the file is no video in one of `FORMATS`, or its frames exceed `limits`."""
    file.seek(0)
    try:
        container = av.open(
            file,
            "r",
            options={"max_pixels": str(CODED * limits.pixels)},  # FFmpeg decodes some frames while it opens a file
            **_TITLES,
            container_options={"format_whitelist": ",".join(FORMATS), "protocol_whitelist": NO_PROTOCOLS},
            buffer_size=BUFFER_BYTES,
        )
    except ArgumentError as error:  # a format that is not on the whitelist raises this, too
        raise MediaError(name, "cannot be opened as a video: it has none of the formats that are read here") from error
    except (FFmpegError, OSError, ValueError) as error:
        raise MediaError(name, f"cannot be opened as a video: {reason_of(error)}") from error
    assert isinstance(container, InputContainer)
    try:
        stream = _video(container, name)
        check_size(stream.width, stream.height, name, limits)
    except MediaError:
        container.close()
        raise
    stream.codec_context.options = {"max_pixels": str(CODED * limits.pixels)}
    return container, stream


def _video(container: InputContainer, name: str) -> VideoStream:
    """The first stream of moving pictures. Covers of music and single pictures do not count."""
    if container.metadata.get("major_brand") in PICTURE_BRANDS:
        raise MediaError(name, "is a picture, not a video")
    for stream in container.streams.video:
        if not stream.disposition & (Disposition.attached_pic | Disposition.still_image):
            if stream.codec_context is None:
                raise MediaError(name, "has a codec that is not supported")
            return stream
    raise MediaError(name, "has no video stream")


def check_size(width: int, height: int, name: str, limits: DecodeLimits) -> None:
    """Raises MediaError for an image or frame of more pixels than may be decoded."""
    if width * height > limits.pixels:
        raise MediaError(name, f"too many pixels: {width} x {height}, at most {limits.pixels} are decoded")


def reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


class Ending:
    """The signs of a cut-off end that one pass over a container's packets finds."""

    def __init__(self, container: InputContainer, stream: VideoStream) -> None:
        self._stream = stream.index
        self._says_length = not SAYING_LENGTH.isdisjoint(container.format.name.split(","))
        self._transport = container.format.name == "mpegts"
        self._declared = (container.duration or 0) / 1e6  # seconds
        self._seconds = {stream.index: float(stream.time_base or 0) for stream in container.streams}  # seconds a tick
        self._reached = 0.0  # seconds at which the last packet of any stream ends, sound and subtitles included
        self._incomplete: dict[int, bool] = {}  # by stream: whether its last packet is incomplete

    def saw(self, packet: Packet) -> None:
        """Takes note of a packet of any stream, in the file's order."""
        if packet.size == 0:  # an empty packet flushes a decoder
            return
        self._incomplete[packet.stream_index] = packet.is_corrupt
        time = packet.dts if packet.pts is None else packet.pts
        if time is not None:
            end = (time + (packet.duration or 0)) * self._seconds[packet.stream_index]
            self._reached = max(self._reached, end)

    def cut_off(self, file: OpenFile, times: list[int | None], damaged: list[int]) -> str:
        """Why the file must have been cut off, or "", by the frames' times in ticks and the indices of damaged ones."""
        if any(self._incomplete.values()):
            return "the last packet is incomplete"
        if damaged and len(times) - damaged[-1] <= REORDERED:
            return f"frame {damaged[-1]} of {len(times)} is damaged"
        if self._says_length and self._declared - self._reached > self._slack(times):
            return f"only {self._reached:.2f} of {self._declared:.2f} seconds are in the file"
        if self._transport and _ends_within_packet(file):
            return f"it ends within a packet of {TS_PACKET} bytes"
        return ""

    def _slack(self, times: list[int | None]) -> float:
        """Seconds by which the last packet may end before the declared end. If the packet's duration is unknown, it may
        be as long as the longest time between two frames."""
        known = sorted(time for time in times if time is not None)
        longest = max((b - a for a, b in itertools.pairwise(known)), default=0)
        return max(2 * longest * self._seconds[self._stream], TOLERANCE * self._declared)


def _ends_within_packet(file: OpenFile) -> bool:
    """Says whether the first byte behind the last complete packet begins another packet."""
    size = file.seek(0, 2)
    file.seek(0)
    begin = file.read(1)
    file.seek(size - size % TS_PACKET)
    return begin == TS_SYNC == file.read(1)


def is_shown(packet: Packet, codec: str) -> bool:
    """Says whether decoding a packet gives a frame; `codec` is FFmpeg's name of the codec."""
    if packet.size == 0 or packet.is_discard:  # an empty packet flushes; an edit list discards packets outside it
        return False
    return codec != "vp8" or bool(bytes(memoryview(packet)[:1])[0] >> 4 & 1)  # VP8 has frames that are never shown


class EntryPoints:
    """Finds the packets with which decoding can begin, if the codec is in `_UNITS` or `_ALONE`. From the time of such a
    packet on, frames are those of a decoding from the start; frames of an earlier time behind it may differ."""

    def __init__(self, stream: VideoStream) -> None:
        self._codec: str = stream.codec.canonical_name
        self._extradata = stream.codec_context.extradata or b""
        self._format = stream.codec_context.pix_fmt or ""
        self._told: set[bytes] = set()  # parameter units in the packets seen so far
        self._first = True
        self._none = False

    def saw(self, packet: Packet) -> bool:
        """Says whether decoding can begin with `packet`. Must be called with every packet of the stream, in order."""
        if self._none:
            return False
        if packet.has_sidedata("new_extradata") or packet.has_sidedata("param_change"):
            self._none = True  # the parameters in the header are no longer valid
            return False
        if self._first and self._codec == "h264":
            note = X264.search(self._extradata) or X264.search(bytes(packet))
            self._none = note is not None and int(note[1]) <= (X264_444 if "444" in self._format else X264_DIRECT)
        self._first = False
        if self._codec in _UNITS:
            return self._begins(bytes(packet)) and packet.is_keyframe
        alone = _ALONE.get(self._codec)
        return alone is not None and packet.is_keyframe and alone(bytes(packet))

    def _begins(self, data: bytes) -> bool:
        """Says whether decoding can begin with this packet, for codecs whose packets consist of units. The packet must
        repeat all units of parameters that came in packets so far, but not the units in the header."""
        kind_of, says_how, is_entry = _UNITS[self._codec]
        told, entry = set(), False
        for unit in units(data, self._length_bytes()):
            kind = kind_of(unit)
            if kind in says_how:
                told.add(unit.rstrip(b"\0"))
            entry |= is_entry(kind, unit)
        self._told |= told
        return entry and not self._none and self._told == told

    def _length_bytes(self) -> int:
        """The bytes of the length before each unit; 0 if start codes separate units (ISO/IEC 14496-15)."""
        head = self._extradata[:3]
        if self._codec == "mpeg4" or len(self._extradata) < 7 or head in (START, b"\0\0\0"):
            return 0
        if self._codec == "h264":
            return (self._extradata[4] & 3) + 1
        return (self._extradata[21] & 3) + 1 if len(self._extradata) > 21 else 0


def units(data: bytes, length_bytes: int) -> Iterator[bytes]:
    """Yields the non-empty units of a packet, each behind its length or, with `length_bytes` 0, a start code."""
    if length_bytes:
        place = 0
        while place + length_bytes < len(data):
            size = int.from_bytes(data[place : place + length_bytes])
            place += length_bytes
            if size:
                yield data[place : place + size]
            place += size
        return
    start = data.find(START)
    while start >= 0:
        stop = data.find(START, start + len(START))
        if unit := data[start + len(START) : stop if stop >= 0 else None]:
            yield unit
        start = stop


def _mpeg_video(data: bytes) -> bool:
    """Says whether a packet is an intra picture behind a sequence header, without which earlier matrices may apply."""
    place = data.find(PICTURE)
    return data.startswith(SEQUENCE) and 0 < place < len(data) - 5 and data[place + 5] >> 3 & 7 == INTRA


def _vp9(data: bytes) -> bool:
    """Says whether a packet holds a key frame. Other packets may only show an earlier frame."""
    head = data[0] << 1 if data[0] >> 4 == 0b1011 else data[0]  # profile 3 has one more bit before these bits
    return data[0] >> 6 == 0b10 and head >> 2 & 0b11 == 0


def _av1(data: bytes) -> bool:
    """Says whether a packet is a key frame that is shown, behind a sequence header."""
    place, sequence = 0, False
    while place < len(data):
        head = data[place]
        kind, sized = head >> 3 & 15, head >> 1 & 1
        place += 2 if head >> 2 & 1 else 1
        size = len(data) - place
        if sized:
            size = 0
            for shift in range(0, 56, 7):
                if place >= len(data):
                    return False
                size |= (data[place] & 127) << shift
                place += 1
                if data[place - 1] < 128:
                    break
        if place >= len(data):
            return False
        if kind == 1:  # a sequence header; a still picture has shorter headers
            sequence = data[place] >> 3 & 1 == 0
        elif kind in (3, 6):  # a frame, or its header alone
            return sequence and data[place] >> 4 == 0b0001  # a new frame, not an earlier one; a key frame; shown
        place += size
    return False


_ALONE: dict[str, Callable[[bytes], bool]] = {
    "mpeg1video": _mpeg_video,
    "mpeg2video": _mpeg_video,
    "vp8": lambda data: data[0] & 1 == 0,
    "vp9": _vp9,
    "av1": _av1,
}
_Units = tuple[Callable[[bytes], int], set[int], Callable[[int, bytes], bool]]
_UNITS: dict[str, _Units] = {  # kind of a unit; the kinds that hold parameters; whether decoding can begin with a unit
    "h264": (lambda unit: unit[0] & 31, {7, 8, 13, 15}, lambda kind, _: kind == 5),  # an IDR picture
    "hevc": (lambda unit: unit[0] >> 1 & 63, {32, 33, 34}, lambda kind, _: 16 <= kind <= 21),  # IDR, BLA, CRA
    "mpeg4": (
        lambda unit: unit[0],
        {*range(0x20, 0x30), 0xB0, 0xB2, 0xB5},
        lambda kind, unit: kind == 0xB6 and len(unit) > 1 and unit[1] >> 6 == 0,
    ),
}
