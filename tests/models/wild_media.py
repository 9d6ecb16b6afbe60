"""Videos as they are found in the wild, each made by a real encoder, of 48 frames of 64 x 96 pixels.

Frame `n` is `moving_frames(48, 64, 96)[n]`, a window that pans.
"""

import functools
import pathlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import av
import numpy as np
from media_files import CODECS, moving_frames, new_video, turn, write_video

COUNT = 48
HEVC = "keyint=8:min-keyint=8:log-level=none"


@functools.cache
def frames(height: int = 64, width: int = 96) -> np.ndarray:
    return moving_frames(COUNT, height, width)


def encode(
    path: pathlib.Path,
    codec: str,
    coding: dict[str, str],
    *,
    pixel_format: str = "yuv420p",
    pictures: np.ndarray | None = None,
    sound: bool = False,
    fps: int = 12,
    **container: Any,
) -> pathlib.Path:
    """A key frame every 8 frames, unless `coding` says otherwise."""
    pictures = frames() if pictures is None else pictures
    with new_video(path, **container) as output:
        stream: Any = output.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], pixel_format
        stream.options = {"g": "8", **coding}
        audio = output.add_stream("aac", rate=8000) if sound else None
        if audio:
            for _ in range(4):
                frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
                frame.rate = 8000
                output.mux(audio.encode(frame))
            output.mux(audio.encode())
        for picture in pictures:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        output.mux(stream.encode())
    return path


def remux(
    source: pathlib.Path, path: pathlib.Path, change: Callable[[int, av.Packet], av.Packet | None]
) -> pathlib.Path:
    """The packets of a video in another file, changed; None is left out."""
    with av.open(str(source)) as container, av.open(str(path), "w") as output:
        stream = container.streams.video[0]
        copy = output.add_stream_from_template(stream)
        for number, packet in enumerate(container.demux(stream)):
            if packet.size and (changed := change(number, packet)):
                changed.stream = copy
                output.mux(changed)
    return path


def x264(path: pathlib.Path, parameters: str = "", **more: Any) -> pathlib.Path:
    return encode(path, "libx264", {"bf": "2", "x264-params": parameters}, **more)


def edited(path: pathlib.Path, skipped: int) -> pathlib.Path:
    """The file with an edit list that leaves out its first frames."""
    x264(path)
    data = bytearray(path.read_bytes())
    place = data.index(b"elst") + 4 + 4 + 4  # behind the name, version and flags, and the number of entries
    duration, begin = struct.unpack(">Ii", data[place : place + 8])
    tick, moment = 1024, 1000 // 12  # a frame, of the track and of the file
    data[place : place + 8] = struct.pack(">Ii", duration - skipped * moment, begin + skipped * tick)
    path.write_bytes(data)
    return path


def without(path: pathlib.Path, made: pathlib.Path, packets: Sequence[int]) -> pathlib.Path:
    """A recording that was cut or from which pieces were lost."""
    return remux(made, path, lambda number, packet: None if number in packets else packet)


def all_marked(number: int, packet: av.Packet) -> av.Packet:
    packet.is_keyframe = True
    return packet


def some_hidden(number: int, packet: av.Packet) -> av.Packet:
    """Of VP8: the frame is decoded and referred to, though not shown, as an encoder's hidden ones."""
    if number % 8 != 5:
        return packet
    data = bytes(packet)
    hidden = av.Packet(bytes([data[0] & ~(1 << 4)]) + data[1:])
    hidden.pts, hidden.dts, hidden.time_base, hidden.duration = packet.pts, packet.dts, packet.time_base, 0
    return hidden


def growing(path: pathlib.Path) -> pathlib.Path:
    """Two halves of different sizes in one transport stream, as television changes between programmes."""
    small = x264(path.with_suffix(".a.ts"), pictures=frames()[:24])
    large = x264(path.with_suffix(".b.ts"), pictures=frames(128, 192)[24:])
    with av.open(str(small)) as first, av.open(str(large)) as second, av.open(str(path), "w") as output:
        copy = output.add_stream_from_template(first.streams.video[0])
        for shift, container in ((0, first), (24 * 7500, second)):
            for packet in container.demux(video=0):
                if packet.size and packet.pts is not None and packet.dts is not None:
                    packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, copy
                    output.mux(packet)
    return path


def told_once(path: pathlib.Path) -> pathlib.Path:
    """Two halves that are coded in different ways, of which the second is told with its first packet only."""
    one = x264(path.with_suffix(".a.mkv"), "bframes=0:cabac=1", pictures=frames()[:24])
    two = x264(path.with_suffix(".b.mkv"), "bframes=0:cabac=0:8x8dct=0", pictures=frames()[24:])
    with av.open(str(one)) as first, av.open(str(two)) as second, av.open(str(path), "w") as output:
        copy = output.add_stream_from_template(first.streams.video[0])
        header = second.streams.video[0].codec_context.extradata or b""
        told, place = b"", 6  # one set of each kind, behind its length (ISO/IEC 14496-15, 5.3.3.1)
        for _ in range(2):
            size = int.from_bytes(header[place : place + 2])
            told += size.to_bytes(4) + header[place + 2 : place + 2 + size]
            place += 2 + size + 1
        for shift, container in ((0, first), (2000, second)):
            for number, packet in enumerate(container.demux(video=0)):
                if packet.size and packet.pts is not None:
                    moved = av.Packet((told if shift and number == 0 else b"") + bytes(packet))
                    moved.pts = moved.dts = packet.pts + shift
                    moved.time_base, moved.is_keyframe, moved.stream = packet.time_base, packet.is_keyframe, copy
                    output.mux(moved)
    return path


def promising(path: pathlib.Path, count: int) -> pathlib.Path:
    """An AVI file whose header says another number of frames."""
    encode(path, "mpeg4", {})
    data = bytearray(path.read_bytes())
    header = data.index(b"strh") + 8
    data[header + 32 : header + 36] = struct.pack("<I", count)
    path.write_bytes(data)
    return path


def _of_codec(kind: str) -> Callable[[pathlib.Path], pathlib.Path]:
    options = {"bf": "2"} if CODECS[kind] == "libx264" else {}
    more: dict[str, Any] = {"format": "h264"} if kind == "h264" else {}
    fps = 25 if kind == "mpg" else 12
    return lambda folder: encode(folder / f"a.{kind}", CODECS[kind], options, fps=fps, **more)


TIMES = np.cumsum([0, *(40 + 37 * (n * n % 11) for n in range(COUNT - 1))]).tolist()  # of variable frame rate, in ms

VIDEOS: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    **{f"{CODECS[kind]} in {kind}": _of_codec(kind) for kind in CODECS},
    "h264, open groups": lambda folder: x264(folder / "a.mp4", "open-gop=1:keyint=8:min-keyint=8:bframes=3"),
    "h264, open groups, ts": lambda folder: x264(folder / "a.ts", "open-gop=1:keyint=8:min-keyint=8:bframes=3"),
    "h264, refreshed bit by bit": lambda folder: x264(folder / "a.mp4", "intra-refresh=1:keyint=8:bframes=0"),
    "h264, marks lie": lambda folder: remux(x264(folder / "b.mp4", "keyint=16"), folder / "a.mp4", all_marked),
    "h264, one group": lambda folder: x264(folder / "a.mp4", "keyint=infinite:scenecut=0"),
    "h264 in avi, times of packets wrong": lambda folder: x264(folder / "a.avi"),
    "h264, fragments": lambda folder: x264(folder / "a.mp4", options={"movflags": "frag_keyframe+empty_moov"}),
    "h264, 10 bits": lambda folder: x264(folder / "a.mp4", pixel_format="yuv420p10le"),
    "h264, 4:4:4": lambda folder: x264(folder / "a.mp4", pixel_format="yuv444p"),
    "h264 with sound": lambda folder: x264(folder / "a.mp4", sound=True),
    "hevc in mp4": lambda folder: encode(folder / "a.mp4", "libx265", {"x265-params": HEVC}),
    "hevc in mkv": lambda folder: encode(folder / "a.mkv", "libx265", {"x265-params": HEVC}),
    "hevc in ts": lambda folder: encode(folder / "a.ts", "libx265", {"x265-params": HEVC}),
    "hevc, closed groups": lambda folder: encode(folder / "a.mp4", "libx265", {"x265-params": f"{HEVC}:open-gop=0"}),
    "vp8": lambda folder: encode(folder / "a.webm", "libvpx", {}),
    "vp8, hidden frames": lambda folder: remux(encode(folder / "b.webm", "libvpx", {}), folder / "a.webm", some_hidden),
    "vp9, hidden frames": lambda folder: encode(
        folder / "a.webm", "libvpx-vp9", {"g": "16", "auto-alt-ref": "1", "lag-in-frames": "12", "b": "200k"}
    ),
    "av1 in mp4": lambda folder: encode(folder / "a.mp4", "libsvtav1", {"preset": "10"}),
    "av1 in webm": lambda folder: encode(folder / "a.webm", "libsvtav1", {"preset": "10"}),
    "mpeg2 in mpg": lambda folder: encode(folder / "a.mpg", "mpeg2video", {"bf": "2"}, fps=25),
    "mpeg2 in ts": lambda folder: encode(folder / "a.ts", "mpeg2video", {"bf": "2"}, fps=25),
    "mpeg4 in mp4": lambda folder: encode(folder / "a.mp4", "mpeg4", {"bf": "2"}),
    "mpeg4 in avi, frames between": lambda folder: encode(folder / "a.avi", "mpeg4", {"bf": "2"}),
    "gif": lambda folder: encode(folder / "a.gif", "gif", {}, pixel_format="rgb8"),
    "mjpeg": lambda folder: encode(folder / "a.avi", "mjpeg", {}, pixel_format="yuvj420p"),
    "wmv2": lambda folder: encode(folder / "a.asf", "wmv2", {}),
    "flv1": lambda folder: encode(folder / "a.flv", "flv1", {}),
    "variable frame rate": lambda folder: write_video(folder / "a.mkv", frames(), times=TIMES),
    "turned by 90": lambda folder: turn(x264(folder / "a.mp4"), 90),
    "turned by 180": lambda folder: turn(x264(folder / "a.mp4"), 180),
    "edit list": lambda folder: edited(folder / "a.mp4", 5),
    "edit list beyond a group": lambda folder: edited(folder / "a.mp4", 19),
    "no duration": lambda folder: x264(folder / "a.mkv", options={"live": "1"}),
    "header says 0 frames": lambda folder: promising(folder / "a.avi", 0),
    "header says fewer frames": lambda folder: promising(folder / "a.avi", 20),
    "header says more frames": lambda folder: promising(folder / "a.avi", 500),
    "size changes": lambda folder: growing(folder / "a.ts"),
    "told once": lambda folder: told_once(folder / "a.mkv"),
    "begins amid a group": lambda folder: without(folder / "a.ts", x264(folder / "b.ts"), range(3)),
    "hevc begins with an open group": lambda folder: without(
        folder / "a.mkv", encode(folder / "b.mkv", "libx265", {"x265-params": HEVC}), range(6)
    ),
    "packets are lost": lambda folder: without(folder / "a.mkv", x264(folder / "b.mkv"), (13, 14)),
}
