"""A step before its arrays are written: groups, their pieces, outlines of microbatches, and shares of processes.

Process 0 plans a step from sizes alone. Every other process gets its share, and reads no prompt, response or pixel of
other shares. If sequences are spread over devices, every share has the sizes of all sequences, because the positions of
tokens and features depend on these sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from models.inputs import PromptInput
from sharding.kernels.runs import chunk_size
from sharding.mesh import replica_size
from sharding.planner.plan import ShardPlan
from sharding.spread.shapes import Sizes

from ..base.medium import WHOLE
from ..base.types import Columns
from ..config import Config, ConfigError

PROMPT = -1  # stands for the prompt where numbers count the responses of a group
Source: TypeAlias = tuple[int, int]  # what shows media: an item, and its response or `PROMPT`


class Item(NamedTuple):
    """The sizes of a group: the tokens of its prompt and of each response (all positive), the patches of its prompt,
    and the patches of each response's observations (empty: no response has any)."""

    name: str  # name of the prompt, for error messages
    prompt: int
    responses: tuple[int, ...]
    patches: int = 0
    observed: tuple[int, ...] = ()

    def only(self, responses: Iterable[int]) -> Item:
        """Returns the item with only the responses of these indices."""
        some = list(responses)
        observed = tuple(self.observed[k] for k in some) if self.observed else ()
        return self._replace(responses=tuple(self.responses[k] for k in some), observed=observed)

    def observed_by(self, responses: Iterable[int]) -> int:
        """Returns the patches of these responses' observations."""
        return sum(self.observed[k] for k in responses) if self.observed else 0


class Piece(NamedTuple):
    """Responses of one item (ascending indices) in one row, behind one copy of the prompt. `tokens`, `squares`,
    `patches` and `observed` are 0 in processes that do not plan."""

    item: int
    responses: tuple[int, ...]
    tokens: int = 0  # including the copy of the prompt
    squares: float = 0.0  # twice the (query, key) pairs of attention: `tokens**2` for a prompt with one response
    patches: int = 0  # of the prompt; all its pieces on a device (with a plan: on a replica, see `part.py`) share them
    observed: int = 0  # patches of the observations of these responses


Row = tuple[Piece, ...]


def patches_of(pieces: Iterable[Piece]) -> int:
    """Returns the patches that a device holds for these pieces, with those of each prompt once."""
    prompts, observed = dict[int, int](), 0
    for piece in pieces:
        prompts[piece.item] = piece.patches
        observed += piece.observed
    return sum(prompts.values()) + observed


class TrainGroup(NamedTuple):
    """A group to lay out: its prompt, the columns of its non-empty responses, for each response the loss weight
    (float64) of a token, and the inputs of responses that observed media, by index."""

    name: str  # name of the prompt, for error messages; empty in processes that do not plan
    inputs: PromptInput
    columns: Columns
    weights: np.ndarray
    observed: Mapping[int, PromptInput] = MappingProxyType({})

    @property
    def item(self) -> Item:
        lengths, observed = self.columns.numbers_G4[:, 1].tolist(), ()
        if self.observed:
            observed = tuple(_patches(self.observed[k]) if k in self.observed else 0 for k in range(len(lengths)))
        return Item(self.name, len(self.inputs), tuple(lengths), _patches(self.inputs), observed)

    @property
    def shown(self) -> tuple[PromptInput, ...]:
        """The inputs that may have media: of the prompt, and of responses."""
        return (self.inputs, *self.observed.values())

    def only(self, responses: Sequence[int]) -> TrainGroup:
        """Returns the group with only the responses of these indices."""
        draw, numbers_G4, advantages_GU, data = self.columns
        if len(responses) == len(data):
            return self
        some = list(responses)
        columns = Columns(draw, numbers_G4[some], advantages_GU[some], tuple(data[k] for k in some))
        observed = {new: self.observed[k] for new, k in enumerate(some) if k in self.observed}
        return self._replace(columns=columns, weights=self.weights[some], observed=observed)


def _patches(inputs: PromptInput) -> int:
    patches_PX = inputs.patches_PX
    return 0 if patches_PX is None else len(patches_PX)


RUN_TOKENS = 32  # a table of runs (`PackedRuns`) has room for at least one run in this many tokens
Groups: TypeAlias = Sequence[TrainGroup] | Mapping[int, TrainGroup]  # by item


def check(
    items: Sequence[Item],
    tokens: int,
    patches: int,
    row: str = "packing.tokens_per_row",
    media: str = "packing.patches_per_device",
) -> None:
    """Raises ConfigError for a prompt that exceeds `tokens` or `patches` with one of its responses.
    `row` and `media` are the names of these bounds in messages."""
    for item in items:
        longest = item.prompt + max(item.responses)
        if longest > tokens:
            raise ConfigError(
                f"prompt {item.name}: {item.prompt} prompt tokens and a response of {max(item.responses)} make "
                f"{longest}, more than {row} = {tokens}"
            )
        observed = max(item.observed, default=0)
        if (seen := item.patches + observed) > patches:
            whose = "its media" if not observed else "its media and those that one of its responses observed"
            raise ConfigError(f"prompt {item.name}: {whose} have {seen} patches, more than {media} = {patches}")


def pieces_of(
    items: Sequence[Item], longest: int, share_prompts: bool, responses: int = 0, patches: int = 0
) -> list[Piece]:
    """Returns the pieces of the items. Each piece is computed as one sequence. Without `share_prompts`, each response
    is a piece. With `share_prompts`, the responses of a piece are branches behind one copy of the prompt, and a group
    is cut into pieces of at most `longest` tokens by first-fit-decreasing.
    The responses of a piece have at most `responses` tokens together (0: no limit). A piece has at most `patches`
    patches (0: no limit). If a single response exceeds these limits, its size becomes the limit of its group."""
    pieces: list[Piece] = []
    for number, item in enumerate(items):
        prompt, sizes = item.prompt, item.responses
        if share_prompts:
            most = min(longest, prompt + responses) if responses else longest
            parts = [
                tuple(some[k] for k in part)
                for some in _held(item, patches)
                for part in first_fit([sizes[k] for k in some], max(most - prompt, max(sizes)))
            ]
        else:
            parts = [(k,) for k in range(len(sizes))]
        for part in parts:
            lengths = sizes if len(part) == len(sizes) else [sizes[k] for k in part]
            tokens = sum(lengths)
            squares = float(prompt * (prompt + 2 * tokens) + sum(size * size for size in lengths))
            pieces.append(Piece(number, part, prompt + tokens, squares, item.patches, item.observed_by(part)))
    return pieces


def _held(item: Item, patches: int) -> list[tuple[int, ...]]:
    """Returns the responses of an item in parts of at most `patches` patches (0: no limit), with those of the prompt. A
    response with more patches is a part of its own."""
    if not patches or not item.observed:
        return [tuple(range(len(item.responses)))]
    return first_fit(item.observed, patches - item.patches)


def runs_of(pieces: Sequence[Piece], share_prompts: bool) -> int:
    """Returns the number of runs of these pieces: prompts and responses with `share_prompts`, else pieces."""
    return sum(1 + len(piece.responses) if share_prompts else 1 for piece in pieces)


def rounded(runs: int) -> int:
    """Rounds a number of runs up to a power of two, since each number of chunks is a shape to compile."""
    return 1 << max(runs - 1, 0).bit_length()


def chunks_for(columns: int, runs: int, chunk: int) -> int:
    """Returns the number of chunks, of `chunk` tokens each, that suffice for a row of `runs` runs of any lengths."""
    return columns // chunk + max(columns // RUN_TOKENS, rounded(runs))


def most_chunks(config: Config) -> int:
    """Returns the number of chunks for a row of `packing.tokens_per_row` tokens with all prompts, and all responses or
    views, of a step."""
    columns, rollout = config.packing.tokens_per_row, config.rollout
    rewritten = any(source.context != WHOLE for source in config.data.sources.values())
    views = config.data.environments.turns if rewritten else 1
    runs = min(columns, rollout.prompts_per_step * (1 + rollout.group_size * views))
    return chunks_for(columns, runs, chunk_size(columns))


def first_fit(sizes: Sequence[int], room: int) -> list[tuple[int, ...]]:
    """Puts each size, the largest first, into the first part with room. The sizes of a part add up to at most `room`. A
    size above `room` is a part of its own. Returns the indices of each part."""
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


# The use of a microbatch's buffers, over all devices: tokens, cells of the token buffers, patches, cells of the patch
# buffers.
Filled: TypeAlias = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Outline:
    """A microbatch before its arrays are written.

    `shards[s][r]` is row `r` of shard `s`. With a `plan`, there is one long row, as if there were one device. There are
    no shards if a device of another process computes the microbatch alone. `sizes` are the sizes of each shard's
    buffers. `coming` are sizes that fit better, whose program is not compiled yet. `owner` and `work` are those of
    `Microbatch`. `part` is the `part.Part` of the plan, in the process that plans.
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
        """A key of the compiled program that computes the microbatch."""
        return (self.num_devices, *sorted(self.sizes.items()))

    @property
    def filled(self) -> Filled:
        pieces = self.pieces
        if self.plan is None:
            homes = [shard for shard, rows in enumerate(self.shards) for row in rows for _ in row]
        else:
            replica = replica_size(self.plan.num_devices)
            homes = [first // replica for first in self.plan.firsts]
        by_home: dict[int, list[Piece]] = {}
        for home, piece in zip(homes, pieces, strict=True):
            by_home.setdefault(home, []).append(piece)
        cells = self.num_devices * self.sizes.get("rows", 1) * self.sizes["columns"]
        patch_cells = self.num_devices * self.sizes.get("patches", 0)
        patches = sum(map(patches_of, by_home.values()))
        return sum(piece.tokens for piece in pieces), cells, patches, patch_cells

    def of(self, shards: range) -> Outline:
        """Returns the outline for a process with these devices. Without a plan, the outline has the rows of these
        devices. With a plan, it has all rows, or no rows if the owner is a device of another process."""
        if self.plan is None:
            return Outline(self.shards[shards.start : shards.stop], self.sizes, self.coming)
        elsewhere = self.owner is not None and self.owner not in shards
        return dataclasses.replace(self, shards=()) if elsewhere else self

    def items_on(self, shards: range) -> set[int]:
        """Returns the items with a token or a frame on one of these devices. `self` is the result of `of(shards)`."""
        if self.part is None or self.owner is not None:
            return {piece.item for piece in self.pieces}
        return self.part.items_on(shards)


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a step that one process lays out. A process that is alone lays out the entire step.

    `micros` are the step's microbatches for the devices `shards` of the mesh. `groups` has the group of each item. In
    processes that do not plan, groups outside of `needed` have only sizes, and responses in no row of the process are
    empty. `version` is the version of the weights to be trained. `filled` has the use of all shards' buffers in each
    microbatch, in the process that plans.
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
        """Returns the shares of `processes` processes. A share has the rows of the process's devices, and the groups of
        these rows. Shares keep the order of groups, which numbers the media, so that all processes compute the same
        exchange of vision features (`sharding.spread.route`)."""
        count, shares = len(self.shards) // processes, list[Share]()
        for process in range(processes):
            shards = range(process * count, (process + 1) * count)
            outlines = tuple(outline.of(shards) for outline in self.micros)
            items = {piece.item for outline in outlines for piece in outline.pieces}
            groups = {item: self.groups[item] for item in sorted(items)}
            needed = frozenset(item for outline in outlines for item in outline.items_on(shards))
            shares.append(Share(outlines, groups, shards, self.version, needed, self.filled))
        return shares
