"""Strips of real handwritten digits to transcribe: PNG files of 1 to 12 digits.

The digits are scikit-learn's 1,797 scans of 8 x 8 pixels (UCI Optical Recognition of Handwritten Digits, test part). No
training strip uses a scan of the held-out strips.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib

import numpy as np
from PIL import Image

from .embedded import Record, write_manifests


@dataclasses.dataclass(frozen=True)
class DigitsRecipe:
    version: int = 2  # grows when the code below changes the data
    seed: int = 0
    train: int = 6000  # strips
    held_out: int = 400
    train_scans: int = 1400  # scans for training; the others of the 1,797 scans are held out
    warm_start: int = 400  # strips with answers for the warm start; all lengths are nearly equally frequent
    warm_start_scans: int = 1  # scans of each digit that the warm start uses
    cell: int = 16  # pixels of the side of a digit's square
    max_digits: int = 12
    length_exponent: float = 1.5  # P(n digits) ~ n ** -length_exponent
    # These four variations apply to digits of training strips; held-out digits are only resized.
    rotation: float = 10.0  # degrees either way
    scaling: float = 0.08  # share either way
    shift: float = 1.0  # pixels either way
    brightness: tuple[float, float] = (0.85, 1.1)
    question: str = "<image>Digits?"

    def enlarged(self, cell: int) -> DigitsRecipe:
        """Returns the recipe with pictures enlarged so that a digit's square has sides of `cell` pixels."""
        return dataclasses.replace(self, cell=cell, shift=self.shift * cell / self.cell)

    def build(self, folder: pathlib.Path) -> None:
        """Writes `images/`, `train.jsonl`, `warm_start.jsonl` and `eval.jsonl`. Strips have `cell` rows of pixels."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        scans = (pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        order = np.random.default_rng(self.seed).permutation(len(scans))
        split = {"train": order[: self.train_scans], "eval": order[self.train_scans :]}
        by_digit = [[scan for scan in split["train"] if labels[scan] == digit] for digit in range(10)]
        split["warm_start"] = np.array([scan for scans in by_digit for scan in scans[: self.warm_start_scans]])
        (folder / "images").mkdir()

        def make(name: str, index: int) -> Record:
            rng = np.random.default_rng([self.seed, ("train", "eval", "warm_start").index(name), index])
            length = 1 + index % self.max_digits if name == "warm_start" else draw_length(rng, self)
            chosen = rng.choice(split[name], length)
            cells = [_cell(scans[scan], self, None if name == "eval" else rng) for scan in chosen]
            buffer = io.BytesIO()
            Image.fromarray(np.concatenate(cells, axis=1)).save(buffer, "PNG")
            path = f"images/{name}-{index:05d}.png"
            (folder / path).write_bytes(buffer.getvalue())
            answer = "".join(str(labels[scan]) for scan in chosen)
            return {"id": f"{name}-{index:05d}", "prompt": self.question, "answer": answer, "images": [path]}

        sizes = {"train": self.train, "eval": self.held_out, "warm_start": self.warm_start}
        write_manifests(folder, "digit strips", make, sizes)


def draw_length(rng: np.random.Generator, recipe: DigitsRecipe) -> int:
    """Samples a length from 1 to `max_digits`, by a power law."""
    lengths = np.arange(1, recipe.max_digits + 1)
    weights = lengths**-recipe.length_exponent
    return int(rng.choice(lengths, p=weights / weights.sum()))


def _cell(scan: np.ndarray, recipe: DigitsRecipe, rng: np.random.Generator | None) -> np.ndarray:
    size = recipe.cell
    image = Image.fromarray(scan).resize((size, size), Image.Resampling.BILINEAR)
    if rng is None:
        return np.asarray(image)
    angle = np.deg2rad(rng.uniform(-recipe.rotation, recipe.rotation))
    scale = rng.uniform(1 - recipe.scaling, 1 + recipe.scaling)
    shift = rng.uniform(-recipe.shift, recipe.shift, 2)
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    centre = size / 2
    # Pillow maps output pixels to input pixels: turn and scale about the centre, then shift.
    x0 = centre - cos * centre - sin * centre - shift[0]
    y0 = centre + sin * centre - cos * centre - shift[1]
    matrix = (cos, sin, x0, -sin, cos, y0)
    turned = image.transform((size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    bright = np.asarray(turned, np.float32) * rng.uniform(*recipe.brightness)
    return np.clip(bright, 0, 255).astype(np.uint8)
