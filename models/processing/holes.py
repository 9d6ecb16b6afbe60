"""Finds image files with zeros where their picture should be, as unfinished downloads and bad disks leave them.

Such zeros decode as pixels of some colour, and decoders report no error. Formats with checksums need no help; in
formats that store pixels uncompressed, zeros are black. That leaves JPEG, WebP and AVIF.
"""

import struct

import av
from av.error import FFmpegError, InvalidDataError

from .containers import CODED
from .media_file import MediaError, OpenFile
from .settings import DecodeLimits

# An encoder with fixed Huffman tables never writes 64 zeros in a row. One with fitted tables may, for an even area.
# Such zeros are therefore a reason to look closer. Files without them, nearly all photographs, are decoded once only.
HOLE = bytes(64)
SCAN, END = b"\xff\xda", b"\xff\xd9"  # JPEG's markers
# Zeros at its end may be 1 / SHARE of a coded picture: libwebp's are a twentieth for pictures of one colour.
SHARE = 8


def refuse_holes(content: OpenFile, format: str, name: str, limits: DecodeLimits) -> None:
    """Raises MediaError where zeros stand in the place of the picture's data, as far as that can be told. `format` is
    Pillow's name of the file's format."""
    if format not in ("JPEG", "MPO", "WEBP", "AVIF"):
        return
    content.seek(0)
    data = content.read()
    if format == "WEBP":
        damaged = _ends_in_zeros(data[: 8 + int.from_bytes(data[4:8], "little")])
    elif format == "AVIF":
        damaged = _ends_in_zeros(_media_data(data))
    else:
        damaged = _jpeg_has_hole(data, limits)
    if damaged:
        raise MediaError(name, "is damaged: zeros stand where its picture should be")


def _jpeg_has_hole(jpeg: bytes, limits: DecodeLimits) -> bool:
    """Says whether the last scan of a JPEG file ends in zeros, or FFmpeg's strict decoder finds bytes that can't end a
    scan. libjpeg only counts such bytes as a warning, and Pillow has no way to read it.

    Some holes are missed, small ones more often, and all whose zeros decode to the right number of blocks.
    """
    if HOLE not in jpeg:
        return False
    there = jpeg.rstrip(b"\0")
    if len(jpeg) - len(there) >= len(HOLE) and there.rfind(END) < there.rfind(SCAN):
        return True
    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.thread_count = 1  # one thread holds no frame back
    decoder.options = {"err_detect": "explode", "max_pixels": str(CODED * limits.pixels)}
    try:
        decoder.decode(av.Packet(jpeg))
    except InvalidDataError:
        return True
    except FFmpegError:  # FFmpeg does not know this kind of JPEG
        return False
    return False


def _ends_in_zeros(coded: bytes) -> bool:
    zeros = len(coded) - len(coded.rstrip(b"\0"))
    return zeros >= max(len(HOLE), len(coded) // SHARE)


def _media_data(avif: bytes) -> bytes:
    """The last box with coded pictures; a file has one such box (ISO/IEC 14496-12, 4.2 and 8.1.1)."""
    place, found = 0, b""
    while place + 8 <= len(avif):
        size, kind = struct.unpack(">I4s", avif[place : place + 8])
        if size < 8:  # 0: the box extends to the end of the file; 1: its size has 64 bits
            return avif[place:] if kind == b"mdat" else found
        if kind == b"mdat":
            found = avif[place : place + size]
        place += size
    return found
