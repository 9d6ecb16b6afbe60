"""Real media files made by real encoders, for tests."""

from __future__ import annotations

import fractions
import pathlib
from typing import Any

import av
import numpy as np


def moving_frames(count: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Frames `[count, height, width, 3]` of a window that pans over a smooth random picture."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 4 + 2, (width + 4 * count) // 4 + 2, 3)).astype(np.float32)
    picture = coarse.repeat(4, axis=0).repeat(4, axis=1).astype(np.uint8)
    return np.stack([picture[:height, 4 * i : 4 * i + width] for i in range(count)])


def write_video(
    path: pathlib.Path,
    frames: np.ndarray,
    *,
    fps: int = 8,
    codec: str = "libx264",
    times: list[int] | None = None,
    **container,
) -> pathlib.Path:
    """Encodes the frames; `times` are their timestamps in 1/1000 s, where they are not evenly spaced."""
    with av.open(str(path), "w", **container) as output:
        stream: Any = output.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        if codec == "libx264":
            stream.options = {"crf": "10", "bf": "0" if times else "2", "g": "4"}
        if times:
            stream.codec_context.time_base = fractions.Fraction(1, 1000)
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            if times:
                frame.pts, frame.time_base = times[index], fractions.Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


def decoded(path: pathlib.Path) -> np.ndarray:
    """All frames `[frames, height, width, 3]`, decoded plainly."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
