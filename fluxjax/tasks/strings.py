"""A text-only task: write a string backwards."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

import numpy as np

from .building import write_manifest


@dataclasses.dataclass(frozen=True)
class StringsRecipe:
    version: int = 1  # grows when the code below changes what it makes
    seed: int = 0
    train: int = 2000  # records
    held_out: int = 200
    letters: str = "abcdef"
    max_length: int = 5
    question: str = "Reverse {}:"


def build_reverse(folder: pathlib.Path, recipe: StringsRecipe) -> None:
    """Writes `train.jsonl` and `eval.jsonl`; no string is in both. Lengths are spread evenly while the short ones
    last."""
    rng = np.random.default_rng(recipe.seed)
    by_length = []
    for length in range(1, recipe.max_length + 1):
        words = ["".join(letters) for letters in itertools.product(recipe.letters, repeat=length)]
        by_length.append([words[i] for i in rng.permutation(len(words))])
    words = [word for round_ in itertools.zip_longest(*by_length) for word in round_ if word is not None]
    words = words[: recipe.train + recipe.held_out]
    words = [words[i] for i in rng.permutation(len(words))]
    held_out, train = words[: recipe.held_out], words[recipe.held_out :]
    for name, part in (("train", train), ("eval", held_out)):
        write_manifest(
            folder / f"{name}.jsonl",
            (
                {"id": f"{name}-{index:05d}", "prompt": recipe.question.format(word), "answer": word[::-1]}
                for index, word in enumerate(part)
            ),
        )
