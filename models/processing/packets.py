"""Reads packets of a video without decoding them: whether one's frame is shown, whether decoding can begin with it.

A decoder that begins in the middle of a stream must give the same frames as a decoder that began at its start. A
container's own mark of a key frame doesn't promise that. The mark may stand where a picture begins that is refreshed
step by step (H.264's recovery points), parameters for decoding may stand only once, further ahead, and the mark may be
wrong. Sources: ITU-T H.264 and H.265 (7.3.1, 7.4.2.2), RFC 6386 (9.1), the VP9 bitstream specification (6.2), the AV1
specification (5.3 to 5.9), ISO/IEC 13818-2 and 14496-2 (6.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from av.packet import Packet
from av.video.stream import VideoStream

START = b"\0\0\1"  # start of a unit of a bytestream
SEQUENCE, PICTURE = b"\0\0\1\xb3", b"\0\0\1\0"  # start codes of MPEG-1 and -2
INTRA = 1  # MPEG's type of a picture that depends on no other
# FFmpeg decodes streams of old x264 builds as these builds meant them: up to 33 their direct prediction, up to 151
# their 4:4:4. It reads the build from a note in the first frame, which a decoder that begins later doesn't see.
X264 = re.compile(rb"x264 - core (\d+)")
X264_DIRECT, X264_444 = 33, 151


def is_shown(packet: Packet, codec: str) -> bool:
    """Says whether decoding a packet gives a frame; `codec` is FFmpeg's name."""
    if packet.size == 0 or packet.is_discard:  # the first flushes a decoder; the second is outside an edit list
        return False
    return codec != "vp8" or bool(bytes(memoryview(packet)[:1])[0] >> 4 & 1)  # VP8 has frames that are never shown


class EntryPoints:
    """Finds the packets with which decoding can begin. From the time of such a packet on, every frame is the same as in
    a decoding from the start of the stream. Frames of an earlier time that follow the packet may differ.

    A stream of a codec that this file can't read has no such packet: it is decoded from the start.
    """

    def __init__(self, stream: VideoStream) -> None:
        self._codec: str = stream.codec.canonical_name
        self._extradata = stream.codec_context.extradata or b""
        self._format = stream.codec_context.pix_fmt or ""
        self._told: set[bytes] = set()  # parameter units in the packets seen so far
        self._first = True
        self._none = False

    def saw(self, packet: Packet) -> bool:
        """Says whether decoding can begin with `packet`. Must get all packets, in file order."""
        if self._none:
            return False
        if packet.has_sidedata("new_extradata") or packet.has_sidedata("param_change"):
            self._none = True  # the parameters in the header are no longer valid
            return False
        if self._first and self._codec == "h264":
            self._none = self._by_old_x264(bytes(packet))
        self._first = False
        if self._codec in _UNITS:
            return self._begins(bytes(packet)) and packet.is_keyframe
        alone = _ALONE.get(self._codec)
        return alone is not None and packet.is_keyframe and alone(bytes(packet))

    def _begins(self, data: bytes) -> bool:
        """Says whether decoding can begin with this packet, for codecs whose packets consist of units. The packet must
        repeat all units of parameters that came in packets so far; those in the header need no repetition."""
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
        """The bytes of the length before each unit; 0 where start codes separate units (ISO/IEC 14496-15)."""
        head = self._extradata[:3]
        if self._codec == "mpeg4" or len(self._extradata) < 7 or head in (START, b"\0\0\0"):
            return 0
        if self._codec == "h264":
            return (self._extradata[4] & 3) + 1
        return (self._extradata[21] & 3) + 1 if len(self._extradata) > 21 else 0

    def _by_old_x264(self, packet: bytes) -> bool:
        note = X264.search(self._extradata) or X264.search(packet)
        return note is not None and int(note[1]) <= (X264_444 if "444" in self._format else X264_DIRECT)


def units(data: bytes, length_bytes: int) -> Iterator[bytes]:
    """Yields the units of a packet, but no empty ones. Before each stands its length, or a start code (0 bytes)."""
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
    """Says whether a packet is an intra picture behind a sequence header; otherwise older matrices could apply."""
    place = data.find(PICTURE)
    return data.startswith(SEQUENCE) and 0 < place < len(data) - 5 and data[place + 5] >> 3 & 7 == INTRA


def _vp8(data: bytes) -> bool:
    return data[0] & 1 == 0


def _vp9(data: bytes) -> bool:
    """Says whether a packet holds a key frame, and not the order to show an earlier frame."""
    head = data[0] << 1 if data[0] >> 4 == 0b1011 else data[0]  # profile 3 has one more bit before these
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
        if kind == 1:  # a sequence header; a still picture's is shorter, and so is its frame's
            sequence = data[place] >> 3 & 1 == 0
        elif kind in (3, 6):  # a frame, or its header alone
            return sequence and data[place] >> 4 == 0b0001  # a new frame, not an earlier one; a key frame; shown
        place += size
    return False


_ALONE: dict[str, Callable[[bytes], bool]] = {
    "mpeg1video": _mpeg_video,
    "mpeg2video": _mpeg_video,
    "vp8": _vp8,
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
