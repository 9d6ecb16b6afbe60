"""A prompt without its pixels: its token ids, and the kind and grid of each medium."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..qwen2_5_vl.positions import Grid


@dataclasses.dataclass(frozen=True)
class Medium:
    """An image or a video as the model sees it."""

    kind: str  # "image" or "video"
    grid: Grid
    seconds_per_grid: float = 0.0  # seconds that a frame pair of a video spans
    # Decoding has shown that packets tell the time of each frame. This says how to read a medium: equality ignores it.
    seekable: bool = dataclasses.field(default=False, compare=False)


@dataclasses.dataclass(frozen=True)
class PromptOutline:
    """A tokenised prompt with one placeholder for each medium, and these media, in order.

    `certain` is False where a number of frames comes from a video's header: decoding may show another one.
    """

    token_ids: np.ndarray  # i32, placeholders not expanded
    media: tuple[Medium, ...]
    merge_size: int  # patches a side of the square that becomes one token
    certain: bool = True

    def __len__(self) -> int:
        """The number of tokens that the model sees."""
        return len(self.token_ids) - len(self.media) + self.num_patches // self.merge_size**2

    @property
    def grids(self) -> list[Grid]:
        return [medium.grid for medium in self.media]

    @property
    def num_patches(self) -> int:
        return sum(pairs * rows * columns for pairs, rows, columns in self.grids)

    @property
    def largest_frame(self) -> int:
        """Patches of the largest frame pair; 0 without media."""
        return max((rows * columns for _, rows, columns in self.grids), default=0)
