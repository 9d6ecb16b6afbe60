"""Clips panned over real photographs, as h264 in MP4, a second each: in which direction does the picture move?

The photographs ship with scikit-image and scikit-learn. No training clip uses a photograph of the held-out clips.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib

import av
import numpy as np
from PIL import Image

from ..base.errors import DataError
from .embedded import Record, write_manifest, write_manifests

# The window moves by (dy, dx); the picture in the window seems to move in the opposite direction.
DIRECTIONS = {"left": (0, 1), "right": (0, -1), "up": (1, 0), "down": (-1, 0)}


@dataclasses.dataclass(frozen=True)
class PansRecipe:
    version: int = 2  # grows when the code below changes the data
    seed: int = 0
    train: int = 4000  # clips
    warm_start: int = 60  # clips of the warm start: the first training clips
    held_out: int = 400
    held_out_photos: tuple[str, ...] = ("china", "flower", "coffee.png", "chelsea.png", "rocket.jpg")
    # Drawings, patterns and frames of an animation have no texture in which motion shows.
    unused: tuple[str, ...] = (
        *("chessboard_GRAY.png", "chessboard_RGB.png", "logo.png"),
        *("horse.png", "color.png", "phantom.png"),
    )
    photo_side: int = 160  # pixels of the shorter side, after scaling down
    size: int = 32  # pixels of the side of the square window
    side: int = 32  # pixels of the side of the square clip; the window is enlarged to this size
    frames: int = 8
    fps: int = 8
    speeds: tuple[int, ...] = (2,)  # pixels a frame
    min_contrast: float = 18.0  # the least standard deviation of a clip's pixels
    # the least mean difference of pixels two apart, divided by the clip's deviation: without it, no motion shows
    min_gradient: float = 0.25
    contrast: float = 55.0  # every clip is brought to this standard deviation, about mid-grey
    crf: int = 20
    question: str = "<video>Direction?"

    def enlarged(self, cell: int) -> PansRecipe:
        """Returns the recipe with clips enlarged to squares of `2 * cell` pixels a side."""
        return dataclasses.replace(self, side=2 * cell)

    def build(self, folder: pathlib.Path) -> None:
        """Writes `videos/`, `train.jsonl`, `warm_start.jsonl` and `eval.jsonl`; about 3 kB a clip. Raises `DataError`
        if the installed packages lack the photographs that the recipe holds out."""
        photos = load_photos(self)
        if missing := set(self.held_out_photos) - set(photos):
            raise DataError(f"the installed scikit-image and scikit-learn lack the photographs {sorted(missing)}")
        split = {
            "train": [photo for name, photo in photos.items() if name not in self.held_out_photos],
            "eval": [photo for name, photo in photos.items() if name in self.held_out_photos],
        }
        (folder / "videos").mkdir()

        def make(name: str, index: int) -> Record:
            rng = np.random.default_rng([self.seed, 2 + ("train", "eval").index(name), index])
            frames, answer = draw_clip(rng, split[name], self, varied=name == "train")
            path = f"videos/{name}-{index:05d}.mp4"
            (folder / path).write_bytes(encode(frames, self))
            return {"id": f"{name}-{index:05d}", "prompt": self.question, "answer": answer, "videos": [path]}

        records = write_manifests(folder, "video clips", make, {"train": self.train, "eval": self.held_out})
        write_manifest(folder / "warm_start.jsonl", records[: self.warm_start])


def load_photos(recipe: PansRecipe) -> dict[str, np.ndarray]:
    """Returns photographs by name, uint8 [height, width, 3], scaled down; reads installed files, downloads nothing."""
    import skimage
    from sklearn.datasets import load_sample_image

    photos = {
        path.name: Image.open(path).convert("RGB")
        for path in sorted((pathlib.Path(skimage.__file__).parent / "data").iterdir())
        if path.suffix in (".png", ".jpg", ".jpeg") and path.name not in recipe.unused
    }
    photos |= {name: Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower")}
    result = {}
    for name, photo in photos.items():
        scale = recipe.photo_side / min(photo.size)
        if scale < 0.85:  # small pictures are icons
            size = (round(photo.width * scale), round(photo.height * scale))
            result[name] = np.asarray(photo.resize(size, Image.Resampling.LANCZOS))
    return result


def draw_clip(
    rng: np.random.Generator, photos: list[np.ndarray], recipe: PansRecipe, varied: bool
) -> tuple[np.ndarray, str]:
    """Returns a clip, uint8 [frames, side, side, 3], and the direction in which its content moves."""
    for _ in range(1000):
        photo = photos[rng.integers(len(photos))]
        if varied:
            photo = _turned(photo, rng)
        answer = list(DIRECTIONS)[rng.integers(len(DIRECTIONS))]
        clip = _pan(photo, DIRECTIONS[answer], int(rng.choice(recipe.speeds)), rng, recipe).astype(np.float32)
        if _has_texture(clip, recipe):
            break
    else:
        raise DataError("no photograph has a patch of enough texture for a clip")
    clip = (clip - clip.mean()) * (recipe.contrast / clip.std()) + 128
    if varied:
        clip = clip[..., rng.permutation(3)]
        if rng.random() < 0.5:
            clip = 255 - clip
    return _enlarged(np.clip(clip, 0, 255).astype(np.uint8), recipe.side), answer


def _enlarged(clip: np.ndarray, side: int) -> np.ndarray:
    if clip.shape[1] == side:
        return clip
    frames = (Image.fromarray(frame).resize((side, side), Image.Resampling.BILINEAR) for frame in clip)
    return np.stack([np.asarray(frame) for frame in frames])


def encode(frames: np.ndarray, recipe: PansRecipe) -> bytes:
    """Returns an MP4 file. The encoder uses one thread, so that the same frames give the same bytes."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=recipe.fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(recipe.crf), "preset": "ultrafast"}
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def _turned(photo: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if rng.random() < 0.5:
        photo = photo[:, ::-1]
    if rng.random() < 0.5:
        photo = photo[::-1]
    return photo.transpose(1, 0, 2) if rng.random() < 0.5 else photo


def _pan(
    photo: np.ndarray, step: tuple[int, int], speed: int, rng: np.random.Generator, recipe: PansRecipe
) -> np.ndarray:
    """Cuts a window that moves `speed` pixels a frame from a random start and never leaves the photograph."""
    (dy, dx), reach = step, speed * (recipe.frames - 1)
    y = int(rng.integers(photo.shape[0] - recipe.size - abs(dy) * reach + 1)) + (reach if dy < 0 else 0)
    x = int(rng.integers(photo.shape[1] - recipe.size - abs(dx) * reach + 1)) + (reach if dx < 0 else 0)
    corners = [(y + dy * speed * t, x + dx * speed * t) for t in range(recipe.frames)]
    return np.stack([photo[y : y + recipe.size, x : x + recipe.size] for y, x in corners])


def _has_texture(clip: np.ndarray, recipe: PansRecipe) -> bool:
    spread = clip.std()
    grey = clip.mean(-1)
    across = np.abs(grey[:, :, 2:] - grey[:, :, :-2]).mean((1, 2)).min()
    down = np.abs(grey[:, 2:] - grey[:, :-2]).mean((1, 2)).min()
    return bool(spread >= recipe.min_contrast and min(across, down) >= recipe.min_gradient * spread)
