"""Opens video files so that nothing but the file itself is read, however it was given."""

from __future__ import annotations

import av
from av.container import InputContainer
from av.error import ArgumentError, FFmpegError
from av.stream import Disposition
from av.video.stream import VideoStream

from .bad_media import MediaError
from .media_file import OpenFile
from .settings import DecodeLimits

# FFmpeg's names of the formats that hold a video's own frames. Playlists, scripts and session descriptions (hls, dash,
# concat, sdp, ...) are missing since they name other files or hosts; single pictures since they are no videos.
# An animated GIF is one: its frames have times, and data sets of short clips are published as GIFs.
FORMATS = (
    *("asf", "avi", "flv", "gif", "ivf", "matroska", "mov", "mpeg", "mpegts", "mxf", "ogg"),
    *("h264", "hevc", "m4v", "mpegvideo"),  # bare streams
)
PICTURE_BRANDS = {"avif", "heic", "heix", "mif1"}  # brands of AVIF and HEIF, which FFmpeg reads as MP4
NO_PROTOCOLS = ""  # a whitelist that no protocol is on: a format that asks for another file doesn't get it
BUFFER_BYTES = 1 << 18  # bytes of one read; every read takes the interpreter's lock
CODED = 2  # pixels as coded for one as shown, at most: sides are padded to whole blocks


def open_container(file: OpenFile, name: str, limits: DecodeLimits) -> tuple[InputContainer, VideoStream]:
    """The container in `file`, which stays open, and the stream of its video. `name` is for messages.

    Raises MediaError where it is no video in one of `FORMATS`, and where its frames exceed `limits`.
    """
    file.seek(0)
    try:
        container = av.open(
            file,
            "r",
            options={"max_pixels": str(CODED * limits.pixels)},  # FFmpeg decodes some frames while it opens a file
            container_options={"format_whitelist": ",".join(FORMATS), "protocol_whitelist": NO_PROTOCOLS},
            buffer_size=BUFFER_BYTES,
        )
    except ArgumentError as error:  # a format that is not on the whitelist raises it, too
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
    """The first stream of moving pictures. The cover of a piece of music is none, and neither is a single picture."""
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
        raise MediaError(
            name,
            f"too many pixels: {width} x {height}, at most {limits.pixels} are decoded (data.max_decoded_pixels)",
        )


def reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
