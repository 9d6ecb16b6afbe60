"""Makes media for `shadow_loader.py`: clips in many sizes and lengths, out of real videos and photographs."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Iterator

import av
import numpy as np
from common import ROOT
from PIL import Image

GIVEN = ROOT.parent / "shared" / "data" / "media"
SIZES = ((128, 96), (160, 120), (224, 224), (256, 144), (320, 240), (426, 240))  # width, height
CODECS = (("mp4", "libx264"), ("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"))


def build(folder: pathlib.Path, clips: int, pictures: int, frames: tuple[int, int], seed: int = 0) -> pathlib.Path:
    """Writes `clips` prompts with a clip each and `pictures` prompts with two pictures each; returns their manifest.
    A clip's number of frames is random between the two of `frames`. Existing media stay."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, records, footage = random.Random(seed), [], None
    for number in range(clips):
        (ending, codec), size = draw.choice(CODECS), draw.choice(SIZES)
        count, first = draw.randint(*frames), draw.randrange(10**6)
        file = folder / f"clip{number:04d}.{ending}"
        if not file.exists():
            footage = footage or list(_footage())
            _write(file, codec, [footage[(first + k) % len(footage)] for k in range(count)], size)
        records.append({"id": file.stem, "prompt": "<video>What?", "answer": "this", "videos": [file.name]})
    for number in range(pictures):
        names = [f"picture{number:04d}{letter}.jpg" for letter in "ab"]
        for name in names:
            side, width, height = draw.random(), draw.randint(112, 448), draw.randint(112, 448)
            if not (folder / name).exists():
                footage = footage or list(_footage())
                picture = Image.fromarray(footage[int(side * len(footage))])
                picture.resize((width, height)).save(folder / name, quality=90)
        records.append({"id": names[0], "prompt": "<image><image>What?", "answer": "this", "images": names})
    draw.shuffle(records)
    manifest = folder / "train.jsonl"
    manifest.write_text("".join(json.dumps(record) + "\n" for record in records))
    return manifest


def _footage() -> Iterator[np.ndarray]:
    """Yields frames `[480, 640, 3]` of real videos; without `../shared`, of windows that pan over photographs."""
    videos = sorted(GIVEN.glob("*.mp4")) + sorted(GIVEN.glob("*.avi"))
    for path in videos:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                yield frame.reformat(640, 480, format="rgb24").to_ndarray()
    if not videos:
        from skimage import data

        for picture in (data.astronaut(), data.chelsea(), data.coffee(), data.rocket()):
            wide = np.asarray(Image.fromarray(picture).resize((1280, 960)))
            yield from (wide[2 * k : 2 * k + 480, 4 * k : 4 * k + 640] for k in range(120))


def _write(file: pathlib.Path, codec: str, frames: list[np.ndarray], size: tuple[int, int]) -> None:
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        if codec == "libvpx-vp9":
            stream.options = {"deadline": "realtime", "cpu-used": "8"}
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24").reformat(*size)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
