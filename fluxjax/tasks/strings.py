"""A text-only task: write a string backwards."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

import numpy as np

from .building import write_manifest


@dataclasses.dataclass(frozen=True)
class StringsRecipe:
    version: int = 1  # grows when the code below changes the data
    seed: int = 0
    train: int = 2000  # records
    held_out: int = 200
    letters: str = "abcdef"
    max_length: int = 5
    question: str = "Reverse {}:"

    def enlarged(self, cell: int) -> StringsRecipe:
        """Returns the recipe as it is: there are no pictures."""
        return self

    def build(self, folder: pathlib.Path) -> None:
        """Writes `train.jsonl` and `eval.jsonl`; no string is in both. All lengths are equally frequent until the short
        strings are used up."""
        rng = np.random.default_rng(self.seed)
        by_length = []
        for length in range(1, self.max_length + 1):
            words = ["".join(letters) for letters in itertools.product(self.letters, repeat=length)]
            by_length.append([words[i] for i in rng.permutation(len(words))])
        words = [word for round_ in itertools.zip_longest(*by_length) for word in round_ if word is not None]
        words = words[: self.train + self.held_out]
        words = [words[i] for i in rng.permutation(len(words))]
        for name, part in (("train", words[self.held_out :]), ("eval", words[: self.held_out])):
            records = (
                {"id": f"{name}-{index:05d}", "prompt": self.question.format(word), "answer": word[::-1]}
                for index, word in enumerate(part)
            )
            write_manifest(folder / f"{name}.jsonl", records)
