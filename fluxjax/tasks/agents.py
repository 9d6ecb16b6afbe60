"""Records for episodes: frozen lakes to walk over, photographs with a small digit, and arithmetic; and good turns.

A good turn says first what the newest picture shows, part by part, and then what follows from it. A tiny model learns
to read pictures by that; from moves and answers alone it learned nothing in the same time (docs/log.md).
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from ..base.scored import Prompt
from .embedded import Record, write_manifests, write_parts
from .pans import PansRecipe, load_photos

_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # left, down, right, up: the actions of FrozenLake
_NAMES = ("train", "eval")


@dataclasses.dataclass(frozen=True)
class LakesRecipe:
    """Maps of Gymnasium's FrozenLake, each once: from the start, the goal is two moves away or more."""

    version: int = 1  # grows when the code below changes the data
    seed: int = 0
    train: int = 8000
    held_out: int = 200
    side: int = 4
    holes: float = 0.2  # share of the fields, as in Gymnasium's random maps
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


def told_way(game: Any) -> str:
    """Returns the rows of an unwrapped FrozenLake as its picture shows them, and the first move of a shortest way: for
    example `A... .O.. ..O. ...G right`, A being the walker and O holes."""
    fields = list(game.desc.ravel().astype(str))
    fields[int(game.s)] = "A"
    shown = "".join(fields).translate(str.maketrans("SFH", "..O"))
    return f"{_rows(shown, game.ncol)} {('left', 'down', 'right', 'up')[way(game)]}"


def _rows(fields: str, width: int) -> str:
    """Returns the rows of `fields`, a character a field, with spaces between them."""
    return " ".join(fields[start : start + width] for start in range(0, len(fields), width))


@dataclasses.dataclass(frozen=True)
class TagsRecipe:
    """Photographs with a small digit in a purple part. The digit is read only after this part has been enlarged, and a
    part of this part: the digit fills a cell of `grid` * `grid` of it, and the part fills one of the photograph."""

    version: int = 6  # grows when the code below changes the data
    seed: int = 0
    train: int = 3000
    held_out: int = 200
    train_scans: int = 1400  # scans of digits for training; the others of the 1,797 scans are held out
    side: int = 256  # pixels of the side of a photograph
    grid: int = 4
    question: str = "{call}Digit?<image>"

    def build(self, folder: pathlib.Path) -> None:
        """Writes `images/`, `train.jsonl` and `eval.jsonl`. No training record has a photograph or a scan of the
        held-out ones. Ids end with what `found_digit` says."""
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
        question = self.question.format(call=f"Use {_call('zoom', cell=1, grid=self.grid, image=1)}. ")
        (folder / "images").mkdir()

        def make(name: str, index: int) -> Record:
            part = _NAMES.index(name)
            rng = np.random.default_rng([self.seed, part, index])
            photo, scan = split[part][rng.integers(len(split[part]))], rng.choice(scans[part])
            shorter = min(photo.shape[:2])
            top, left = (int(rng.integers(size - shorter + 1)) for size in photo.shape[:2])
            square = photo[top : top + shorter, left : left + shorter]
            gray = ImageOps.equalize(Image.fromarray(square).convert("L"))  # as many dark as bright pixels
            image = gray.convert("RGB").resize((self.side, self.side))
            digit = Image.fromarray(np.uint8(255 * (1 - pixels[scan].reshape(8, 8) / 16)))  # dark on white
            cells = rng.integers(self.grid**2, size=2).tolist()
            shown = [self._levels(view) for view in self._marked(image, digit, *cells)]
            image.save(folder / (path := f"images/{name}-{index:05d}.jpg"), quality=90)
            said = json.dumps({"cells": cells, "shown": shown})
            answer = str(labels[scan])
            return {"id": f"{name}-{index:05d}#{said}", "prompt": question, "answer": answer, "images": [path]}

        write_manifests(folder, "photographs with tags", make, {"train": self.train, "eval": self.held_out})

    def _marked(self, image: Image.Image, digit: Image.Image, cell: int, cell_in_part: int) -> list[Image.Image]:
        """Makes a cell of an image purple, and draws the digit in a cell of this part. Returns the image, the part and
        the digit, as they are seen one after the other."""
        part, place = (np.array(divmod(number, self.grid)) for number in (cell, cell_in_part))
        size = self.side // self.grid
        y, x = (size * part).tolist()
        area = x, y, x + size, y + size
        red, _, _ = image.crop(area).split()
        image.paste(Image.merge("RGB", (red, Image.new("L", red.size), red)), area)
        size //= self.grid
        y, x = (size * (self.grid * part + place)).tolist()
        image.paste(digit.convert("RGB").resize((size, size)), (x, y))
        return [image, image.crop(area), image.crop((x, y, x + size, y + size))]

    def _levels(self, image: Image.Image) -> str:
        """Returns how bright each cell of an image is: dark `.`, medium `-` or bright `#`."""
        bright = np.asarray(image)[..., 0].reshape(self.grid, image.height // self.grid, self.grid, -1).mean((1, 3))
        return "".join(".-#"[int(level > 95) + int(level > 160)] for level in bright.ravel())


def found_digit(prompt: Prompt, turn: int) -> str:
    """Returns a good turn for a record of `TagsRecipe`: how bright the cells of the newest image are, and which of them
    has what is sought (`T`), then the call that enlarges this cell; at last the cells of the digit, and the digit. For
    example `--#. #T-# .... -##. <tool_call>...`."""
    said = json.loads(prompt.id.partition("#")[2])
    cells, shown = said["cells"], said["shown"][min(turn, len(said["cells"]))]
    grid = math.isqrt(len(shown))
    if turn >= len(cells):
        return f"{_rows(shown, grid)} {prompt.answer}"
    fields = f"{shown[: cells[turn]]}T{shown[cells[turn] + 1 :]}"
    return f"{_rows(fields, grid)} {_call('zoom', cell=cells[turn] + 1, grid=grid, image=turn + 1)}"


@dataclasses.dataclass(frozen=True)
class SumsRecipe:
    """Products of numbers of two and three digits."""

    version: int = 2  # grows when the code below changes the data
    seed: int = 0
    train: int = 4000
    held_out: int = 200

    def build(self, folder: pathlib.Path) -> None:
        """Writes `train.jsonl` and `eval.jsonl`; no product is in both. Ids end with the product."""
        rng, sums = np.random.default_rng(self.seed), dict[str, int]()
        while len(sums) < self.train + self.held_out:
            first, second = (int(number) for number in rng.integers(11, (1000, 100)))
            sums[f"{first}*{second}"] = first * second

        def record(id: str, product: tuple[str, int]) -> Record:
            text, value = product
            question = f"Use {_call('calculator', expression='1+1')}. {text}="
            return {"id": f"{id}#{text}", "prompt": question, "answer": str(value)}

        write_parts(folder, list(sums.items()), self.held_out, record)


def computed(prompt: Prompt, turn: int) -> str:
    """Returns a good turn for a record of `SumsRecipe`: the call of the calculator, then the answer."""
    return prompt.answer if turn else _call("calculator", expression=prompt.id.partition("#")[2])


def _call(tool: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"
