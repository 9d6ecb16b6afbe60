"""The features of prompts whose images and videos are too many for one program: computed by groups of frame pairs.

Attention of the vision tower never leaves a frame pair, so that features do not depend on which frame pairs are
computed together. Pixels are fetched for one group at a time; features stay while the prompt is prefilled.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jax import Array

from models.inputs import ModelInput, VisionInput, cut, pad
from models.shadow import ShadowTensor

from .programs import geometric

LEAST_FEATURES = 16  # least features of a compiled program


class FrameGroup(NamedTuple):
    """Neighbouring frame pairs that are computed together: the patches `start .. stop`, padded to `padded` patches."""

    start: int
    stop: int
    padded: int
    row: int  # row of its first feature in `PromptFeatures.rows`


@dataclasses.dataclass(eq=False)
class PromptFeatures:
    """The features of one prompt, computed group by group. `rows`, `[F, D]`, is on the device, which fills it in. Each
    group has room for its padding, too, so that groups may be computed in any order."""

    vision: VisionInput
    merge_unit: int
    groups: tuple[FrameGroup, ...]
    size: int  # F
    planned: set[int] = dataclasses.field(default_factory=set)  # numbers of the groups that are computed or planned
    rows: Array | None = None

    @staticmethod
    def of(prompt: ModelInput, merge_unit: int, most: int) -> PromptFeatures:
        """Divides a prompt into groups of at most `most` patches, or of one larger frame pair; none is planned yet."""
        assert prompt.vision is not None
        edges = [edge for edge in prompt.frame_edges if edge % merge_unit == 0]  # a feature is never divided
        groups: list[FrameGroup] = []
        start = row = 0
        for here, following in zip(edges[1:], [*edges[2:], None], strict=True):
            if following is None or following - start > most:
                size = padded_patches(here - start, merge_unit)
                padded = min(size, max(most // merge_unit * merge_unit, here - start))
                groups.append(FrameGroup(start, here, padded, row))
                start, row = here, row + padded // merge_unit
        return PromptFeatures(prompt.vision, merge_unit, tuple(groups), geometric(row, LEAST_FEATURES))

    def places(self, feature_index_T: np.ndarray) -> np.ndarray:
        """The row of `rows` for each feature index; -1 stays -1."""
        group_T = self._groups(feature_index_T)
        starts = np.array([group.start for group in self.groups]) // self.merge_unit
        rows = np.array([group.row for group in self.groups])
        moved_T = feature_index_T + (rows - starts)[group_T]
        return np.where(feature_index_T >= 0, moved_T, -1).astype(np.int32)

    def missing(self, feature_index_T: np.ndarray) -> tuple[int, ...]:
        """The groups that these features need and that are not planned yet, in order."""
        shown = feature_index_T[feature_index_T >= 0]
        return tuple(sorted(set(self._groups(shown).tolist()) - self.planned))

    def plan(self, feature_index_T: np.ndarray) -> tuple[int, ...]:
        """Returns the groups that these features need and that are not planned yet; marks them as planned."""
        groups = self.missing(feature_index_T)
        self.planned |= set(groups)
        return groups

    def _groups(self, feature_index_T: np.ndarray) -> np.ndarray:
        starts = [group.start for group in self.groups]
        return np.searchsorted(starts, np.maximum(feature_index_T, 0) * self.merge_unit, side="right") - 1

    def patches(self, number: int) -> np.ndarray | ShadowTensor:
        """The patches of a group."""
        group = self.groups[number]
        return self.vision.patches_PX[group.start : group.stop]

    def input(self, number: int, patches_PX: np.ndarray | ShadowTensor) -> VisionInput:
        """The input of the vision tower for a group with these patches."""
        group = self.groups[number]
        return pad(dataclasses.replace(cut(self.vision, group.start, group.stop), patches_PX=patches_PX), group.padded)


class FeatureWork(NamedTuple):
    """Groups to compute before a prefill, which then reads `kept.rows`."""

    rid: str
    kept: PromptFeatures
    groups: tuple[int, ...]


def padded_patches(patches: int, merge_unit: int) -> int:
    """The patches of the smallest compiled program that has room for `patches`."""
    return merge_unit * geometric(patches // merge_unit, LEAST_FEATURES)
