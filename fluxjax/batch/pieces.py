"""What is laid out: groups, and the pieces of groups that are computed as one sequence each. Sizes and order only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from models.inputs import ModelInput

from ..base.types import Sample
from ..config import ConfigError


@dataclasses.dataclass(frozen=True)
class Item:
    """A group to pack: the tokens of its prompt and of each of its responses (all positive), its patches."""

    name: str  # of the prompt, for error messages
    prompt: int
    responses: tuple[int, ...]
    patches: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """Responses of one item (indices, ascending) in one row, behind one copy of the prompt."""

    item: int
    responses: tuple[int, ...]


Row = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """`shards[s][r]` is row `r` of shard `s`; each shard is padded to `rows` rows and `patches` patches."""

    rows: int
    patches: int
    shards: tuple[tuple[Row, ...], ...]


@dataclasses.dataclass(frozen=True)
class TrainGroup:
    """A group to lay out: its prompt, its non-empty samples in order, the loss weight of a token of each."""

    name: str  # of the prompt, for error messages
    inputs: ModelInput
    samples: tuple[Sample, ...]
    weights: np.ndarray
    version: int = 0  # of the weights that are trained
    temperature: float | None = None  # of samples that do not say theirs; None: no token's temperature is written down

    @functools.cached_property
    def item(self) -> Item:
        patches = self.inputs.vision.num_patches if self.inputs.vision is not None else 0
        return Item(self.name, len(self.inputs), tuple(len(s.response.token_ids) for s in self.samples), patches)

    def only(self, responses: Sequence[int]) -> TrainGroup:
        """The group with these of its samples."""
        samples = tuple(self.samples[k] for k in responses)
        return dataclasses.replace(self, samples=samples, weights=self.weights[list(responses)])


def tokens_of(items: Sequence[Item], piece: Piece) -> int:
    """The tokens of a piece, its copy of the prompt included."""
    item = items[piece.item]
    return item.prompt + sum(item.responses[k] for k in piece.responses)


def squares_of(items: Sequence[Item], piece: Piece) -> float:
    """Twice the (query, key) pairs that attention looks at: `length**2` for a prompt with one response."""
    item = items[piece.item]
    return float(item.prompt**2) + sum(r**2 + 2 * item.prompt * r for r in (item.responses[k] for k in piece.responses))


def check(
    items: Sequence[Item],
    tokens: int,
    patches: int,
    row: str = "packing.tokens_per_row",
    media: str = "packing.patches_per_device",
) -> None:
    """Raises ConfigError for a prompt that with one response exceeds `tokens`, or whose media exceed `patches`; `row`
    and `media` say which fields make up these bounds."""
    for item in items:
        longest = item.prompt + max(item.responses)
        if longest > tokens:
            raise ConfigError(
                f"prompt {item.name}: {item.prompt} prompt tokens and a response of {max(item.responses)} make "
                f"{longest}, more than {row} = {tokens}"
            )
        if item.patches > patches:
            raise ConfigError(
                f"prompt {item.name}: its media have {item.patches} patches, more than {media} = {patches}"
            )


def cut(items: Sequence[Item], index: int, longest: int) -> list[Piece]:
    """The item in as few pieces of at most `longest` tokens as first-fit-decreasing finds; nearly always one."""
    item = items[index]
    room = longest - item.prompt
    if sum(item.responses) <= room:
        return [Piece(index, tuple(range(len(item.responses))))]
    parts: list[list[int]] = []
    free: list[int] = []
    for k in sorted(range(len(item.responses)), key=lambda k: -item.responses[k]):
        part = next((p for p, left in enumerate(free) if left >= item.responses[k]), len(parts))
        if part == len(parts):
            parts.append([])
            free.append(room)
        parts[part].append(k)
        free[part] -= item.responses[k]
    return [Piece(index, tuple(sorted(part))) for part in parts]


def pieces_of(items: Sequence[Item], longest: int, share_prompts: bool, responses: int = 0) -> list[Piece]:
    """What is computed as one sequence each: with `share_prompts` a group, else a response.

    A group is cut into pieces of at most `longest` tokens, and of at most `responses` without the prompt (0: any). A
    response that has more with its prompt is a piece all the same.
    """
    if not share_prompts:
        return [Piece(i, (k,)) for i, item in enumerate(items) for k in range(len(item.responses))]
    pieces = []
    for i, item in enumerate(items):
        size = min(longest, item.prompt + responses) if responses else longest
        pieces += cut(items, i, max(size, item.prompt + max(item.responses)))
    return pieces
