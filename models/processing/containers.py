"""Opens video files so that no other file is read, and recognises files that were cut off.

FFmpeg decodes a cut-off file as a shorter video and reports no error. An incomplete last packet, or the damaged frames
that follow from it, show the cut in every format. Matroska, FLV and IVF files declare their length; transport streams
consist of packets of one size. The other formats declare no length (transport and program streams, bare streams) or
often a wrong one (AVI): there, a file that was cut between two packets looks complete.
"""

import itertools
from typing import Any

import av
from av.container import InputContainer
from av.error import ArgumentError, FFmpegError
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from .media_file import MediaError, OpenFile
from .settings import DecodeLimits

# FFmpeg's names of the formats that hold a video's own frames. Playlists, scripts and session descriptions (hls, dash,
# concat, sdp, ...) are left out since they name other files or hosts, single pictures since they are no videos.
# An animated GIF is a video: its frames have times, and data sets of short clips are published as GIFs.
FORMATS = (
    *("asf", "avi", "flv", "gif", "ivf", "matroska", "mov", "mpeg", "mpegts", "mxf", "ogg"),
    *("h264", "hevc", "m4v", "mpegvideo"),  # bare streams
)
PICTURE_BRANDS = {"avif", "heic", "heix", "mif1"}  # brands of AVIF and HEIF, which FFmpeg reads as MP4
NO_PROTOCOLS = ""  # a whitelist without any protocol: FFmpeg opens no file that another one names
# Titles are not read and may be in any encoding. PyAV 19 and later accept any encoding; older ones need this option.
_TITLES: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
BUFFER_BYTES = 1 << 18  # bytes of one read; every read takes the interpreter's lock
CODED = 2  # coded pixels for each shown pixel, at most: codecs pad sides to multiples of a block

SAYING_LENGTH = {"matroska", "flv", "ivf"}  # formats that declare their length, and rightly
TOLERANCE = 0.01  # share of the declared length that may be missing
REORDERED = 16  # frames that a decoder holds back, at most (H.264, HEVC): so far from the end a damaged one may be
TS_PACKET, TS_SYNC = 188, b"G"  # bytes of a transport stream's packet, and the byte that each packet begins with


def open_container(file: OpenFile, name: str, limits: DecodeLimits) -> tuple[InputContainer, VideoStream]:
    """The container in `file`, which stays open, and the stream of its video. `name` is for messages.

    Raises MediaError where the file is no video in one of `FORMATS`, and where its frames exceed `limits`.
    """
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
                raise MediaError(name, "is coded in a way that is not known here")
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
        self._seconds = {stream.index: float(stream.time_base or 0) for stream in container.streams}  # of a tick
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
        """The reason why the file must have been cut off, or "".

        `times` are the times of all frames in ticks, `damaged` the indices of the damaged frames.
        """
        if any(self._incomplete.values()):
            return "the last packet is incomplete"
        if damaged and len(times) - damaged[-1] <= REORDERED:
            return f"frame {damaged[-1]} of {len(times)} is damaged"
        if self._says_length and self._declared - self._reached > self._slack(times):
            return f"{self._reached:.2f} of {self._declared:.2f} seconds are there"
        if self._transport and _ends_within_packet(file):
            return f"it ends within a packet of {TS_PACKET} bytes"
        return ""

    def _slack(self, times: list[int | None]) -> float:
        """Seconds by which the last packet may end before the declared end. Its duration may be unknown, and may be as
        long as the longest time between two frames."""
        known = sorted(time for time in times if time is not None)
        longest = max((b - a for a, b in itertools.pairwise(known)), default=0)
        return max(2 * longest * self._seconds[self._stream], TOLERANCE * self._declared)


def _ends_within_packet(file: OpenFile) -> bool:
    """Says whether another packet begins behind the last complete packet; bytes of other kinds begin differently."""
    size = file.seek(0, 2)
    file.seek(0)
    begin = file.read(1)
    file.seek(size - size % TS_PACKET)
    return begin == TS_SYNC == file.read(1)
