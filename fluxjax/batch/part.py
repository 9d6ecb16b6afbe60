"""A microbatch whose sequences are spread over devices, before its arrays exist.

The work of the vision tower is spread evenly by a separate plan (`sharding.planner.vision_units`). The features of the
tower then travel to their tokens (`sharding.spread.route`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import jax
import numpy as np

from models.config import VisionConfig
from models.inputs import ARRAYS, PromptInput, VisionInput, blank, concatenate, side_by_side
from sharding.mesh import binary_axes, replica_size
from sharding.planner.plan import PlanError, ShardPlan
from sharding.planner.vision_units import spread_vision
from sharding.spread.buffers import Layout, lay, size_cost
from sharding.spread.route import ExchangeRoute, crossings, route
from sharding.spread.shapes import ShapeBook, Sizes, round_up

from .share import PROMPT, Groups, Outline, Piece, Source, rounded, runs_of

# Tokens that a device exports in a round of a degree above 1, at most. An exported token predicts a token of another
# device. The last token of the device's chunk predicts the next chunk's first token. A prompt's last token in the chunk
# predicts the first tokens of responses beyond the chunk.
EXPORTS = 2

Tree = TypeVar("Tree")  # a pytree of arrays


@dataclasses.dataclass(frozen=True)
class Room:
    """A device's capacity in a microbatch: `tokens` (`tokens_per_row * rows_per_device`) and `patches`."""

    tokens: int
    patches: int
    share_prompts: bool
    vision: VisionConfig | None
    degree: int = 1  # devices that compute one sequence, at most
    chunk: int = 0  # tokens of a chunk in the tables of runs (`PackedRuns`); 0: a model without Gated DeltaNet

    @property
    def whole_patches(self) -> int:
        """`patches`, rounded down to complete merge blocks; 0 for a text model."""
        unit = self.vision.merge_unit if self.vision is not None else 0
        return self.patches // unit * unit if unit else 0

    def caps(self, num_devices: int) -> Sizes:
        """Returns the largest size of each buffer that a microbatch on `num_devices` devices may need."""
        degrees = [1 << k for k in range(min(self.degree, num_devices).bit_length())]
        rounds = [f"round/{p}/0" for p in degrees]
        caps = {"columns": self.tokens} | dict.fromkeys(rounds, self.tokens)
        if len(rounds) > 1:
            caps["exports"] = round_up(EXPORTS * (len(rounds) - 1))
        if self.vision is not None:
            features = self.whole_patches // self.vision.merge_unit
            # In the worst case, a device passes on all features that it receives.
            sends = {f"send/{axis}": features << k for k, axis in enumerate(binary_axes(num_devices))}
            caps |= {"patches": self.whole_patches, "frame": 1 << (self.whole_patches - 1).bit_length()} | sends
        return caps


class Part:
    """The `pieces` of some groups, and the `plan` of their devices. Each piece is one sequence. `owner` and `work` are
    those of `Microbatch`; an owner is the plan's only device. `shaped`: the plan was made for rows of a given length.
    `frame` bounds the patches of a frame pair. Raises PlanError if a device's tokens or patches exceed `room`."""

    layout: Layout
    media: SpreadMedia | None  # None for a text model

    def __init__(
        self,
        groups: Groups,
        pieces: Sequence[Piece],
        plan: ShardPlan,
        room: Room,
        frame: int = 1,
        owner: int | None = None,
        work: float | None = None,
        shaped: bool = False,
    ) -> None:
        self.groups, self.pieces, self.plan, self.owner, self.work = groups, tuple(pieces), plan, owner, work
        self.shaped, self.layout, self._room, self._frame = shaped, lay(plan, room.tokens), room, frame
        self.media = None if room.vision is None else SpreadMedia(groups, pieces, plan, room, room.vision)

    @functools.cached_property
    def caps(self) -> Sizes:
        """The largest size of each buffer that a microbatch on the devices of the plan may need."""
        return self._room.caps(self.plan.num_devices)

    @functools.cached_property
    def needs(self) -> Sizes:
        """The least size of each buffer that holds this part."""
        sharded = sum(round.degree > 1 for round in self.plan.rounds)
        sizes = self.layout.needs() | ({"exports": EXPORTS * sharded} if sharded else {})
        if self._room.chunk:
            streams = [(members, round.degree) for round in self.plan.rounds for members in round.groups]
            share, pieces = self._room.share_prompts, self.pieces
            sizes["runs"] = max(
                rounded(-(-runs_of([pieces[i] for i in members], share) // n)) for members, n in streams
            )
        if self.media is None:
            return sizes
        # `media.needs` counts a feature once for each device that shows the feature, even if it crosses an axis only
        # once. The cap is a second bound.
        media = self.media.needs(*self._shown()) | {"frame": self._frame}
        return sizes | {n: min(need, self.caps[n]) if n.startswith("send/") else need for n, need in media.items()}

    def items_on(self, devices: range) -> set[int]:
        """Returns the items that have a token or a frame on one of these devices."""
        media = set() if self.media is None else self.media.items_on(devices)
        spans = zip(self.pieces, self.plan.firsts, self.plan.degrees, strict=True)
        return media | {p.item for p, first, n in spans if first < devices.stop and devices.start < first + n}

    def _shown(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the device of each token that shows a feature, and the feature's number in the microbatch."""
        assert self.media is not None
        tokens, features = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        starts = np.cumsum([0, *self.plan.lengths])
        for start, piece in zip(starts[:-1].tolist(), self.pieces, strict=True):
            group, at = self.groups[piece.item], start
            lengths = group.columns.numbers_G4[list(piece.responses), 1].tolist()
            for response, length in zip((PROMPT, *piece.responses), (len(group.inputs), *lengths), strict=True):
                if (first := self.media.first_feature.get((piece.item, response))) is not None:
                    where, which = inputs_of((piece.item, response), self.groups).shown
                    tokens.append(at + where)
                    features.append(first + which)
                at += length
        device, _ = self.layout.places()
        return device[np.concatenate(tokens)], np.concatenate(features)


class SpreadMedia:
    """The media of a part: the device that computes each frame pair, and the row where each token finds its feature.
    `first_feature` has the number of the first merged feature of each prompt and each response with media, counted as
    if there were one device. Each replica (devices that exchange features) with pieces of an item computes the features
    of the prompt, and those of these pieces' responses."""

    def __init__(
        self, groups: Groups, pieces: Sequence[Piece], plan: ShardPlan, room: Room, vision: VisionConfig
    ) -> None:
        self._vision, self._num_devices = vision, plan.num_devices
        self.cap = room.whole_patches
        self._replica = replica_size(plan.num_devices)
        homes: dict[tuple[int, Source], int] = {}  # the first piece in a replica that shows a source's media
        for i, piece in enumerate(pieces):
            for source in sources_of([piece], groups):
                homes.setdefault((plan.firsts[i] // self._replica, source), i)
        self.first_feature: dict[Source, int] = {}
        total = 0
        self._inputs = {source: inputs_of(source, groups) for _, source in homes}
        for source in sorted(self._inputs):
            if frame_edges := self._inputs[source].frame_edges:
                self.first_feature[source] = total
                total += frame_edges[-1] // vision.merge_unit
        self._sources = list(self.first_feature)
        numbers = {source: number for number, source in enumerate(self._sources)}
        shown: list[int] = []  # the number of the source of each unit (a frame pair)
        edges: list[tuple[int, int]] = []  # the first patch of each unit, and its end
        # By replica and feature: the feature's index among all computed features, in the order of units.
        self._computed = np.zeros((plan.num_devices // self._replica, total), np.int64)
        home: list[int] = []  # the piece of each unit
        used = 0
        for replica, source in sorted(homes):
            if source not in self.first_feature:
                continue
            frame_edges = self._inputs[source].frame_edges
            count, first = frame_edges[-1] // vision.merge_unit, self.first_feature[source]
            self._computed[replica, first : first + count] = used + np.arange(count)
            used += count
            pairs = list(pairwise(frame_edges))
            edges += pairs
            shown += [numbers[source]] * len(pairs)
            home += [homes[replica, source]] * len(pairs)
        self._shown, self._edges = np.array(shown, np.int32), np.array(edges, np.int32).reshape(-1, 2)
        self._sizes = np.diff(self._edges)[:, 0].astype(np.int64)
        firsts, degrees = [plan.firsts[i] for i in home], [plan.degrees[i] for i in home]
        # The device of each unit.
        self._owners = spread_vision(self._sizes.tolist(), firsts, degrees, plan.num_devices, replica=self._replica)
        self._fullest = int(np.bincount(self._owners, self._sizes, plan.num_devices).max())
        if self._fullest > self.cap:
            raise PlanError(
                f"a device would get {self._fullest} patches, more than packing.patches_per_device = {room.patches}; "
                "raise it"
            )

    def items_on(self, devices: range) -> set[int]:
        shown = np.unique(self._shown[(self._owners >= devices.start) & (self._owners < devices.stop)])
        return {self._sources[number][0] for number in shown.tolist()}

    def needs(self, device: np.ndarray, feature: np.ndarray) -> Sizes:
        """Returns the least buffer sizes. Token i is on `device[i]` and shows `feature[i]`."""
        merged = self._sizes // self._vision.merge_unit
        source = np.repeat(self._owners, merged)[self._computed[device // self._replica, feature]]
        pairs = np.bincount(source * self._num_devices + device, minlength=self._num_devices**2)
        sends = crossings(pairs.reshape(self._num_devices, -1))
        return {"patches": max(self._fullest, self._vision.merge_unit)} | sends

    def buffers(
        self, feature_index: np.ndarray, device: np.ndarray, sizes: Sizes, devices: range
    ) -> tuple[np.ndarray, VisionInput]:
        """Returns the row where each token finds its feature after routing, and the vision input of these devices."""
        patches = -(-sizes["patches"] // self._vision.merge_unit) * self._vision.merge_unit
        tokens = np.flatnonzero(feature_index >= 0)
        way, found = self._way(device[tokens], feature_index[tokens], patches // self._vision.merge_unit, sizes)
        result = feature_index.copy()
        result[tokens] = found
        return result, self._side_by_side(patches, sizes["frame"], rows_of(way, devices), devices)

    def _way(
        self, device: np.ndarray, feature: np.ndarray, rows: int, sizes: Sizes
    ) -> tuple[ExchangeRoute, np.ndarray]:
        """Returns the features' route, and each token's row in it. Token i is on `device[i]` and shows `feature[i]`."""
        owners = self._owners
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(self._sizes[order])
        begun = np.concatenate([[0], ends])[np.searchsorted(owners[order], owners[order])]
        placed = np.zeros(len(owners), np.int64)  # by unit: its first patch in its device's buffer
        placed[order] = ends - self._sizes[order] - begun
        merged = self._sizes // self._vision.merge_unit
        within = np.arange(merged.sum()) - np.repeat(np.cumsum(merged) - merged, merged)
        row = np.repeat(placed // self._vision.merge_unit, merged) + within  # row of each feature, unit after unit
        wanted = self._computed[device // self._replica, feature]
        source = np.repeat(owners, merged)[wanted]
        return route(source, row[wanted], device, self._num_devices, rows, sizes)

    def _side_by_side(self, patches: int, bound: int, way: ExchangeRoute, devices: range) -> VisionInput:
        members: list[list[tuple[int, int, int]]] = [[] for _ in devices]
        for number, (start, stop), device in zip(
            self._shown.tolist(), self._edges.tolist(), self._owners.tolist(), strict=True
        ):
            if device in devices:
                members[device - devices.start].append((number, start, stop))
        buffers: list[VisionInput] = []
        for units in members:
            runs = [self._slice(*run) for run in _runs(units)]
            used = sum(run.num_patches for run in runs)
            buffers.append(concatenate([*runs, blank(patches - used, self._vision.patch_values)]))
        return side_by_side(buffers, bound, way)

    def _slice(self, number: int, start: int, stop: int) -> VisionInput:
        part = self._inputs[self._sources[number]].laid_out().vision
        assert part is not None
        return dataclasses.replace(part, **{name: getattr(part, name)[start:stop] for name in ARRAYS})


def sources_of(pieces: Iterable[Piece], groups: Groups) -> list[Source]:
    """Returns the prompts of these pieces and their responses with media, each once, in order."""
    sources: set[Source] = set()
    for piece in pieces:
        sources.add((piece.item, PROMPT))
        if observed := groups[piece.item].observed:
            sources.update((piece.item, k) for k in piece.responses if k in observed)
    return sorted(sources)


def inputs_of(source: Source, groups: Groups) -> PromptInput:
    """Returns the inputs of a prompt, or of a response that has media."""
    item, response = source
    return groups[item].inputs if response == PROMPT else groups[item].observed[response]


def _runs(units: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for number, start, stop in units:
        if runs and runs[-1][0] == number and runs[-1][2] == start:
            runs[-1] = (number, runs[-1][1], stop)
        else:
            runs.append((number, start, stop))
    return runs


def rows_of(tree: Tree, devices: range) -> Tree:
    """Returns the rows of these devices from arrays that have one row for each device."""
    return jax.tree.map(lambda rows: rows[devices.start : devices.stop], tree)


def outlines_of(parts: Sequence[Part], shapes: ShapeBook) -> list[Outline]:
    """Returns the outline of each part, with the buffer sizes that `shapes` chooses."""
    found: list[Outline] = []
    for part in parts:
        sizes, coming = shapes.choose(part.needs, part.caps, size_cost, part.plan.num_devices)
        found.append(Outline(((part.pieces,),), sizes, coming, part.plan, part.owner, part.work, part))
    return found
