"""A step before its arrays are written: groups, the pieces that they are cut into, outlines of its microbatches, and
the share of each process.

The process that has all groups plans a step from sizes alone. The other processes get their share, and read no prompt,
response or pixel of other shares. If sequences are spread over devices, the positions of a device's tokens and
features depend on the sizes of all sequences, so that every share has these sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from models.inputs import PromptInput
from sharding.kernels.runs import chunk_size
from sharding.mesh import replica_size
from sharding.planner.plan import ShardPlan
from sharding.spread.shapes import Sizes

from ..base.types import Columns
from ..config import Config, ConfigError


class Item(NamedTuple):
    """The sizes of a group: tokens of its prompt and of each of its responses (all positive), and patches."""

    name: str  # name of the prompt, for error messages
    prompt: int
    responses: tuple[int, ...]
    patches: int = 0


class Piece(NamedTuple):
    """Responses of one item (indices, ascending) in one row, behind one copy of the prompt. `tokens`, `squares` and
    `patches` are 0 in processes that do not plan."""

    item: int
    responses: tuple[int, ...]
    tokens: int = 0  # including the copy of the prompt
    squares: float = 0.0  # twice the (query, key) pairs of attention: `tokens**2` for a prompt with one response
    patches: int = 0  # of the item; a device (with a plan, a replica) holds them once for all pieces of the item


Row = tuple[Piece, ...]


class TrainGroup(NamedTuple):
    """A group to lay out: its prompt, the columns of its non-empty responses, and the loss weight of a token of each
    response (float64)."""

    name: str  # name of the prompt, for error messages; empty in processes that do not plan
    inputs: PromptInput
    columns: Columns
    weights: np.ndarray

    @property
    def item(self) -> Item:
        patches_PX, lengths = self.inputs.patches_PX, self.columns.numbers_G3[:, 1].tolist()
        return Item(self.name, len(self.inputs), tuple(lengths), 0 if patches_PX is None else len(patches_PX))

    def only(self, responses: Sequence[int]) -> TrainGroup:
        """Returns the group with only these of its responses, in order."""
        draw, numbers_G3, advantages_G, data = self.columns
        if len(responses) == len(data):
            return self
        some = list(responses)
        columns = Columns(draw, numbers_G3[some], advantages_G[some], tuple(data[k] for k in some))
        return self._replace(columns=columns, weights=self.weights[some])


RUN_TOKENS = 32  # a table of runs always has room for runs of this average length
Groups: TypeAlias = Sequence[TrainGroup] | Mapping[int, TrainGroup]  # by item


def check(
    items: Sequence[Item],
    tokens: int,
    patches: int,
    row: str = "packing.tokens_per_row",
    media: str = "packing.patches_per_device",
) -> None:
    """Raises ConfigError for a prompt that exceeds `tokens` with one of its responses, or whose media exceed `patches`.
    `row` and `media` name the fields that set these bounds."""
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


def pieces_of(items: Sequence[Item], longest: int, share_prompts: bool, responses: int = 0) -> list[Piece]:
    """Returns the pieces, each computed as one sequence. Without `share_prompts`, each response is a piece.

    With `share_prompts`, a group is cut into pieces of at most `longest` tokens, and of at most `responses` tokens
    without the prompt (0: no limit): as few as first-fit-decreasing finds, nearly always one. If the longest response
    alone exceeds these limits, its length is the limit of its group's pieces.
    """
    pieces: list[Piece] = []
    for number, (_, prompt, sizes, patches) in enumerate(items):
        if share_prompts:
            most = min(longest, prompt + responses) if responses else longest
            parts = first_fit(sizes, max(most - prompt, max(sizes)))
        else:
            parts = [(k,) for k in range(len(sizes))]
        for part in parts:
            lengths = sizes if len(part) == len(sizes) else [sizes[k] for k in part]
            tokens = sum(lengths)
            squares = float(prompt * (prompt + 2 * tokens) + sum(size * size for size in lengths))
            pieces.append(Piece(number, part, prompt + tokens, squares, patches))
    return pieces


def chunks_needed(columns: int, row: Sequence[Piece], share_prompts: bool, chunk: int) -> int:
    """Returns the number of chunks, of `chunk` tokens, in a row's table of runs (`PackedRuns`), enough for any lengths
    of the runs. With `share_prompts`, each prompt and each response is a run, else each piece."""
    return _chunks_of(columns, _runs(row, share_prompts), chunk)


def most_chunks(config: Config) -> int:
    """Returns the chunks of a row of `packing.tokens_per_row` tokens that has all prompts and responses of a step."""
    columns, rollout = config.packing.tokens_per_row, config.rollout
    runs = min(columns, rollout.prompts_per_step * (1 + rollout.group_size))
    return _chunks_of(columns, runs, chunk_size(columns))


def runs_bound(pieces: Sequence[Piece], share_prompts: bool, devices: int = 1) -> int:
    """Returns the number of runs for each of the `devices` that share these pieces, rounded up to a power of two."""
    return _rounded(-(-_runs(pieces, share_prompts) // devices))


def _runs(pieces: Sequence[Piece], share_prompts: bool) -> int:
    return sum(1 + len(piece.responses) if share_prompts else 1 for piece in pieces)


def _chunks_of(columns: int, runs: int, chunk: int) -> int:
    return columns // chunk + max(columns // RUN_TOKENS, _rounded(runs))


def _rounded(runs: int) -> int:
    """Rounds a number of runs up to few values, since each number of chunks is a shape to compile."""
    return 1 << max(runs - 1, 0).bit_length()


def first_fit(sizes: Sequence[int], room: int) -> list[tuple[int, ...]]:
    """Deals sizes to parts of at most `room`, the largest size first, each to the first part with room. Returns the
    indices of each part. A size above `room` is a part of its own."""
    if sum(sizes) <= room:
        return [tuple(range(len(sizes)))]
    parts: list[list[int]] = []
    free: list[int] = []
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        part = next((number for number, left in enumerate(free) if left >= sizes[k]), len(parts))
        if part == len(parts):
            parts.append([])
            free.append(room)
        parts[part].append(k)
        free[part] -= sizes[k]
    return [tuple(sorted(part)) for part in parts]


class Filled(NamedTuple):
    """The use of a microbatch's buffers, over all devices: its tokens and the cells of its token buffers, its patches
    and the cells of its patch buffers."""

    tokens: int
    token_cells: int
    patches: int
    patch_cells: int


@dataclasses.dataclass(frozen=True)
class Outline:
    """A microbatch before its arrays are written.

    `shards[s][r]` is row `r` of shard `s`. If a `plan` spreads sequences over devices, there is one long row, as if
    there were one device. If a device of another process computes the microbatch alone, there are no shards: only its
    shape and its work matter. `sizes` are the sizes of each shard's buffers; `coming` are sizes that would fit better,
    once their program is compiled. `owner` and `work` are those of `Microbatch`. `part` is the `part.Part` of the plan;
    only the process that plans has it.
    """

    shards: tuple[tuple[Row, ...], ...]
    sizes: Sizes
    coming: Sizes | None = None
    plan: ShardPlan | None = None
    owner: int | None = None
    work: float | None = None
    part: Any = None

    @property
    def pieces(self) -> list[Piece]:
        return [piece for shard in self.shards for row in shard for piece in row]

    @property
    def num_devices(self) -> int:
        return len(self.shards) if self.plan is None else self.plan.num_devices

    @property
    def program(self) -> tuple[object, ...]:
        """A key that is equal for microbatches that the same compiled program computes."""
        return (self.num_devices, *sorted(self.sizes.items()))

    @property
    def filled(self) -> Filled:
        pieces = self.pieces
        if self.plan is None:
            homes = [shard for shard, rows in enumerate(self.shards) for row in rows for _ in row]
        else:
            replica = replica_size(self.plan.num_devices)
            homes = [first // replica for first in self.plan.firsts]
        media = {(home, piece.item): piece.patches for home, piece in zip(homes, pieces, strict=True)}
        cells = self.num_devices * self.sizes.get("rows", 1) * self.sizes["columns"]
        patch_cells = self.num_devices * self.sizes.get("patches", 0)
        return Filled(sum(piece.tokens for piece in pieces), cells, sum(media.values()), patch_cells)

    def of(self, shards: range) -> Outline:
        """Returns the outline for a process with these devices: their rows; with a plan all rows, or none if another
        process has the owner."""
        if self.plan is None:
            return Outline(self.shards[shards.start : shards.stop], self.sizes, self.coming)
        elsewhere = self.owner is not None and self.owner not in shards
        return dataclasses.replace(self, shards=()) if elsewhere else self

    def items_on(self, shards: range) -> set[int]:
        """Returns the items that have a token or a frame on one of these devices. `self` is the result of
        `of(shards)`."""
        if self.part is None or self.owner is not None:
            return {piece.item for piece in self.pieces}
        return self.part.items_on(shards)


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a step that one process lays out; a process that is alone lays out the entire step.

    `micros` are the step's microbatches, for the devices `shards` of the mesh only; `groups` has the group of each
    item. In processes that do not plan, groups that are not `needed` have sizes only, and responses outside of the rows
    are empty. `version` is the version of the weights to be trained. `filled` has the use of all shards' buffers in
    each microbatch; only the process that plans has it.
    """

    micros: tuple[Outline, ...]
    groups: Mapping[int, TrainGroup]
    shards: range
    version: int
    needed: frozenset[int]
    filled: tuple[Filled, ...] = ()

    @classmethod
    def of_all(cls, micros: Sequence[Outline], groups: Sequence[TrainGroup], num_devices: int, version: int) -> Share:
        """Returns the share of a process that has all `num_devices` devices."""
        needed, filled = frozenset(range(len(groups))), tuple(outline.filled for outline in micros)
        return cls(tuple(micros), dict(enumerate(groups)), range(num_devices), version, needed, filled)

    def cut(self, processes: int) -> list[Share]:
        """Returns the share of each of `processes` processes: the rows of the process's devices, and the groups in
        these rows. A process needs the groups that have a token or a frame on one of its devices.

        Media are numbered by the order of groups, which shares keep: all processes compute the same exchange of vision
        features (`sharding.spread.route`).
        """
        count, shares = len(self.shards) // processes, list[Share]()
        for process in range(processes):
            shards = range(process * count, (process + 1) * count)
            outlines = tuple(outline.of(shards) for outline in self.micros)
            items = {piece.item for outline in outlines for piece in outline.pieces}
            groups = {item: self.groups[item] for item in sorted(items)}
            needed = frozenset(item for outline in outlines for item in outline.items_on(shards))
            shares.append(Share(outlines, groups, shards, self.version, needed, self.filled))
        return shares
