"""Tells that a JPEG file has a hole, as a download that was not finished or a bad disk leaves it.

Zeros in the middle decode as pixels of some colour: libjpeg counts that as a warning, which Pillow doesn't pass on, nor
has it an option to. FFmpeg's decoder, told to be strict, notices what can't be the end of a scan. It misses some holes,
the more the smaller they are, and all whose zeros happen to decode to the right number of blocks.
"""

from __future__ import annotations

import av
from av.error import FFmpegError, InvalidDataError

from .settings import DecodeLimits

# No encoder with fixed Huffman tables writes so many zeros in a row; fitted tables may, for an even area. So they are
# a reason to look, and whole files without them, nearly all photographs, are decoded once.
HOLE = bytes(64)


def has_hole(data: bytes, limits: DecodeLimits) -> bool:
    """Says whether a JPEG file, given whole, has zeros where its picture should be, as far as that can be told."""
    if HOLE not in data:
        return False
    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.thread_count = 1  # no frame is held back
    decoder.options = {"err_detect": "explode", "max_pixels": str(2 * limits.pixels)}
    try:
        decoder.decode(av.Packet(data))
    except InvalidDataError:
        return True
    except FFmpegError:  # a kind of JPEG that FFmpeg doesn't know
        return False
    return False
