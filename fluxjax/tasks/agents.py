"""Records for episodes: frozen lakes to walk over, photographs with a small digit, and arithmetic.

The id of a record with a tool ends with the arguments of the call that a warm start demonstrates.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from .embedded import Record, write_manifests, write_parts
from .pans import PansRecipe, load_photos

_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # left, down, right, up: the actions of FrozenLake
_CALL = 'Use <tool_call>{"name": "%s", "arguments": %s}</tool_call>. '
_NAMES = ("train", "eval")


@dataclasses.dataclass(frozen=True)
class LakesRecipe:
    """Maps of Gymnasium's FrozenLake, each once: from the start, the goal is two moves away or more."""

    version: int = 1  # grows when the code below changes the data
    seed: int = 0
    train: int = 4000
    held_out: int = 200
    side: int = 4
    holes: float = 0.25  # share of the fields
    question: str = "Walk to the present: left, down, right, up."

    def build(self, folder: pathlib.Path) -> None:
        """Writes `train.jsonl` and `eval.jsonl`. An answer has further arguments of `gymnasium.make`."""
        rng, maps = np.random.default_rng(self.seed), dict[tuple[str, ...], None]()
        while len(maps) < self.train + self.held_out:
            fields = np.where(rng.random(self.side**2) < self.holes, "H", "F")
            start, goal = rng.choice(self.side**2, 2, replace=False)
            fields[start], fields[goal] = "S", "G"
            drawn = tuple("".join(row) for row in fields.reshape(self.side, self.side))
            if distances(drawn).get(divmod(int(start), self.side), 0) > 1:
                maps[drawn] = None

        def record(id: str, drawn: tuple[str, ...]) -> Record:
            return {"id": id, "prompt": self.question, "answer": json.dumps({"desc": drawn})}

        write_parts(folder, list(maps), self.held_out, record)


def distances(fields: Sequence[str]) -> dict[tuple[int, int], int]:
    """Returns the number of moves to the goal from each field that has a way there. `fields` are the map's rows."""
    at = {(y, x): field for y, row in enumerate(fields) for x, field in enumerate(row)}
    found = {place: 0 for place, field in at.items() if field == "G"}
    for y, x in (queue := list(found)):
        for dy, dx in _MOVES:
            if at.get(place := (y + dy, x + dx), "H") != "H" and place not in found:
                found[place] = found[y, x] + 1
                queue.append(place)
    return found


def way(game: Any) -> int:
    """Returns the first action on a shortest way to the goal of an unwrapped FrozenLake."""
    fields = [b"".join(row).decode() for row in game.desc]
    found, (y, x) = distances(fields), divmod(int(game.s), len(fields[0]))
    return min(range(4), key=lambda action: found.get((y + _MOVES[action][0], x + _MOVES[action][1]), 1 << 20))


@dataclasses.dataclass(frozen=True)
class TagsRecipe:
    """Photographs with a digit on a small tag, which is read only in a part of the photograph that is enlarged."""

    version: int = 1  # grows when the code below changes the data
    seed: int = 0
    train: int = 3000
    held_out: int = 200
    train_scans: int = 1400  # scans of digits for training; the others of the 1,797 scans are held out
    side: int = 384  # pixels of the side of a photograph
    grid: int = 4  # parts of a side; a tag lies within one of them
    digit: int = 20  # pixels of the side of a digit
    frame: int = 5  # pixels around it
    question: str = "<image>{call}Digit?"

    def build(self, folder: pathlib.Path) -> None:
        """Writes `images/`, `train.jsonl` and `eval.jsonl`. No training record has a photograph or a scan of the
        held-out ones."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(self.seed).permutation(len(labels))
        photos = load_photos(pans := PansRecipe())
        held_out = [name in pans.held_out_photos for name in photos]
        split = [
            [photo for photo, held in zip(photos.values(), held_out, strict=True) if held is part]
            for part in (False, True)
        ]
        scans = np.split(order, [self.train_scans])
        question = self.question.format(call=_CALL % ("zoom", json.dumps({"cell": 1, "grid": self.grid})))
        (folder / "images").mkdir()

        def make(name: str, index: int) -> Record:
            part = _NAMES.index(name)
            rng = np.random.default_rng([self.seed, part, index])
            photo, scan = split[part][rng.integers(len(split[part]))], rng.choice(scans[part])
            shorter = min(photo.shape[:2])
            top, left = (int(rng.integers(size - shorter + 1)) for size in photo.shape[:2])
            square = photo[top : top + shorter, left : left + shorter]
            image = Image.fromarray(square).resize((self.side, self.side))
            size, tag = self.side // self.grid, self.digit + 2 * self.frame
            row, column = (int(place) for place in rng.integers(self.grid, size=2))
            y, x = (int(cell * size + rng.integers(size - tag + 1)) for cell in (row, column))
            image.paste((255, 0, 255), (x, y, x + tag, y + tag))
            shown = Image.fromarray((255 - pixels[scan].reshape(8, 8) * (255 / 16)).astype(np.uint8))
            image.paste(shown.resize((self.digit, self.digit)), (x + self.frame, y + self.frame))
            image.save(folder / (path := f"images/{name}-{index:05d}.jpg"), quality=90)
            call = {"cell": row * self.grid + column + 1, "grid": self.grid}
            id, answer = f"{name}-{index:05d}#{json.dumps(call)}", str(labels[scan])
            return {"id": id, "prompt": question, "answer": answer, "images": [path]}

        write_manifests(folder, "photographs with tags", make, {"train": self.train, "eval": self.held_out})


@dataclasses.dataclass(frozen=True)
class SumsRecipe:
    """Products of numbers of two and three digits."""

    version: int = 1  # grows when the code below changes the data
    seed: int = 0
    train: int = 4000
    held_out: int = 200

    def build(self, folder: pathlib.Path) -> None:
        """Writes `train.jsonl` and `eval.jsonl`; no product is in both."""
        rng, sums = np.random.default_rng(self.seed), dict[str, int]()
        while len(sums) < self.train + self.held_out:
            first, second = (int(number) for number in rng.integers(11, (1000, 100)))
            sums[f"{first}*{second}"] = first * second
        question = _CALL % ("calculator", json.dumps({"expression": "1+1"}))

        def record(id: str, product: tuple[str, int]) -> Record:
            text, value = product
            call = json.dumps({"expression": text})
            return {"id": f"{id}#{call}", "prompt": f"{question}{text}=", "answer": str(value)}

        write_parts(folder, list(sums.items()), self.held_out, record)
