"""A microbatch whose sequences are spread over devices, before anything is written: its pieces, their plan, its frames.

The vision tower's work is dealt out by a plan of its own (`sharding.planner.spread_vision`), evenly; its features then
travel to their tokens (`sharding.spread.route`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from models.config import VisionConfig
from models.inputs import VisionInput
from models.processing.vision_input import ARRAYS, blank, common_bound, concatenate, side_by_side
from sharding.mesh import replica_size
from sharding.planner import spread_vision
from sharding.planner.plan import PlanError, ShardPlan
from sharding.spread.buffers import Layout, lay
from sharding.spread.route import Route, route
from sharding.spread.shapes import Sizes

from ..config import Config
from .pieces import Piece, TrainGroup


@dataclasses.dataclass(frozen=True)
class Room:
    """What a device holds of a microbatch: a row of so many `tokens`, and so many `patches`."""

    tokens: int
    patches: int
    share_prompts: bool
    vision: VisionConfig | None

    @classmethod
    def of(cls, config: Config, vision: VisionConfig | None) -> Room:
        """The row has as many tokens as the packed rows of a device would have together."""
        packing = config.packing
        tokens = packing.tokens_per_row * packing.rows_per_device
        return cls(tokens, packing.patches_per_device, packing.share_prompts, vision)

    @property
    def whole_patches(self) -> int:
        """Patches in whole merged features; 0 for a text model."""
        unit = self.vision.merge_unit if self.vision is not None else 0
        return self.patches // unit * unit if unit else 0


class Part:
    """The sequences `pieces` of some groups and the devices that compute them.

    `owner` is the device that computes all of it alone, by a plan of one device; None: the plan's devices together.
    `work` is what it is predicted to cost the busiest device, in any unit; None: nobody asks.

    Raises PlanError where a device does not hold its tokens or patches.
    """

    layout: Layout
    media: SpreadMedia | None  # None: a text model

    def __init__(
        self,
        groups: Sequence[TrainGroup],
        pieces: Sequence[Piece],
        plan: ShardPlan,
        room: Room,
        owner: int | None = None,
        work: float | None = None,
    ) -> None:
        self.groups, self.pieces, self.plan, self.owner, self.work = groups, tuple(pieces), plan, owner, work
        self.layout = lay(plan, room.tokens)
        self.media = None if room.vision is None else SpreadMedia(groups, pieces, plan, room, room.vision)


class SpreadMedia:
    """Which device computes which frame pair, and where each token finds its feature.

    `first_feature` numbers the merged features of each item of the microbatch, as if there were one device. An item
    whose pieces are in several replicas is computed once in each: features never leave a replica.
    """

    def __init__(
        self, groups: Sequence[TrainGroup], pieces: Sequence[Piece], plan: ShardPlan, room: Room, vision: VisionConfig
    ) -> None:
        self._vision, self._num_devices = vision, plan.num_devices
        self.cap = room.whole_patches
        self._replica = replica_size(plan.num_devices)
        homes: dict[tuple[int, int], int] = {}  # the first piece of an item in a replica
        for i, piece in enumerate(pieces):
            homes.setdefault((plan.firsts[i] // self._replica, piece.item), i)
        self._bound = common_bound(group.inputs.vision for group in groups)
        self.first_feature: dict[int, int] = {}
        total = 0
        for item in sorted({item for _, item in homes}):
            part = groups[item].inputs.vision
            if part is not None:
                self.first_feature[item] = total
                total += part.num_patches // vision.merge_unit
        self._units: list[tuple[VisionInput, int, int]] = []  # part, first patch, end
        # Which of all computed features, unit after unit, a replica uses.
        self._computed = np.zeros((plan.num_devices // self._replica, total), np.int64)
        home: list[int] = []  # the piece of each unit
        used = 0
        for replica, item in sorted(homes):
            part = groups[item].inputs.vision
            if part is None:
                continue
            count, first = part.num_patches // vision.merge_unit, self.first_feature[item]
            self._computed[replica, first : first + count] = used + np.arange(count)
            used += count
            edges = [0, *(np.flatnonzero(np.diff(part.frame_segments_P)) + 1).tolist(), part.num_patches]
            self._units += [(part, start, stop) for start, stop in pairwise(edges)]
            home += [homes[replica, item]] * (len(edges) - 1)
        self._sizes = np.array([stop - start for _, start, stop in self._units], np.int64)
        self.plan = spread_vision(
            self._sizes.tolist(),
            [plan.firsts[i] for i in home],
            [plan.degrees[i] for i in home],
            plan.num_devices,
            replica=self._replica,
        )
        self._fullest = int(self.plan.loads().max())
        if self._fullest > self.cap:
            raise PlanError(
                f"a device would get {self._fullest} patches, more than packing.patches_per_device = {room.patches}; "
                "raise it"
            )

    def needs(self, feature_index: np.ndarray, device: np.ndarray) -> Sizes:
        """Least sizes; `device` is that of each token."""
        _, way, _ = self._way(feature_index, device, self._fullest // self._vision.merge_unit, None)
        return {"patches": max(self._fullest, self._vision.merge_unit)} | way.needs()

    def buffers(self, feature_index: np.ndarray, device: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, VisionInput]:
        """(where each token finds its feature after routing, the patches of all devices side by side)."""
        patches = -(-sizes["patches"] // self._vision.merge_unit) * self._vision.merge_unit
        tokens, way, found = self._way(feature_index, device, patches // self._vision.merge_unit, sizes)
        result = feature_index.copy()
        result[tokens] = found
        return result, self._side_by_side(patches, way)

    def _way(
        self, feature_index: np.ndarray, device: np.ndarray, rows: int, sizes: Sizes | None
    ) -> tuple[np.ndarray, Route, np.ndarray]:
        """(the tokens that show features, the route, the row where each of these tokens finds its feature)."""
        owners = np.array(self.plan.devices, np.int64)
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(self._sizes[order])
        begun = np.concatenate([[0], ends])[np.searchsorted(owners[order], owners[order])]
        placed = np.zeros(len(owners), np.int64)  # first patch of each unit in its device's buffer
        placed[order] = ends - self._sizes[order] - begun
        merged = self._sizes // self._vision.merge_unit
        within = np.arange(merged.sum()) - np.repeat(np.cumsum(merged) - merged, merged)
        row = np.repeat(placed // self._vision.merge_unit, merged) + within  # of each feature, unit after unit
        tokens = np.flatnonzero(feature_index >= 0)
        wanted = self._computed[device[tokens] // self._replica, feature_index[tokens]]
        source = np.repeat(owners, merged)[wanted]
        return tokens, *route(source, row[wanted], device[tokens], self._num_devices, rows, sizes)

    def _side_by_side(self, patches: int, way: Route) -> VisionInput:
        members: list[list[tuple[VisionInput, int, int]]] = [[] for _ in range(self._num_devices)]
        for unit, device in zip(self._units, self.plan.devices, strict=True):
            members[device].append(unit)
        buffers: list[VisionInput] = []
        for units in members:
            runs = [_slice(*run) for run in _runs(units)]
            used = sum(run.num_patches for run in runs)
            buffers.append(concatenate([*runs, blank(patches - used, self._vision.patch_values)]))
        return side_by_side(buffers, self._bound, way)


def _runs(units: Iterable[tuple[VisionInput, int, int]]) -> list[tuple[VisionInput, int, int]]:
    """Units that follow each other in one input, joined."""
    runs: list[tuple[VisionInput, int, int]] = []
    for part, start, stop in units:
        if runs and runs[-1][0] is part and runs[-1][2] == start:
            runs[-1] = (part, runs[-1][1], stop)
        else:
            runs.append((part, start, stop))
    return runs


def _slice(part: VisionInput, start: int, stop: int) -> VisionInput:
    return dataclasses.replace(part, **{name: getattr(part, name)[start:stop] for name in ARRAYS})
