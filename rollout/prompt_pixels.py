"""The pixels of an engine's prompts: fetched while the device computes, and turned into features.

A prompt with too many patches for one program is computed in groups of frame pairs. Attention of the vision tower never
leaves a frame pair, so features do not depend on the frame pairs that are computed together. Features stay on the
device while the prompt is prefilled.
"""

import concurrent.futures
import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jax import Array

from models.inputs import ModelInput, VisionInput, cut, pad
from models.shadow import Fetch, Rows, ShadowTensor

from .slots import geometric

THREADS = 4  # threads that wait for pixels
AHEAD_JOBS = 64  # the most waiting requests whose pixels are fetched ahead
AHEAD_PATCHES = 8192  # the most patches that are fetched ahead of `take`: about those of one or two turns
LEAST_FEATURES = 16  # the fewest features of a compiled program


class FetchedPixels:
    """Fetches the patches of prompts by `fetch`. One thread at a time may use it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._wanted: deque[ShadowTensor] = deque()  # tensors to fetch, in this order
        self._held: dict[tuple[Rows, ...], concurrent.futures.Future[list[np.ndarray]]] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="rollout-pixels")

    def expect(self, tensors: Iterable[ShadowTensor]) -> None:
        """Announces all tensors that `take` will get, in order, and begins to fetch them. Drops all other patches."""
        self._wanted = deque(tensors)
        wanted = {tensor.elsewhere for tensor in self._wanted}
        for rows in self._held.keys() - wanted:
            self._held.pop(rows).cancel()
        self._begin()

    def _begin(self) -> None:
        held = sum(len(rows) for tensor_rows in self._held for rows in tensor_rows)
        while self._wanted and (not self._held or held + len(self._wanted[0]) <= AHEAD_PATCHES):
            tensor = self._wanted.popleft()
            if tensor.elsewhere and tensor.elsewhere not in self._held:
                self._held[tensor.elsewhere] = self._threads.submit(self._fetched, tensor.elsewhere)
                held += len(tensor)

    def _fetched(self, rows: tuple[Rows, ...]) -> list[np.ndarray]:
        fetched = list(self._fetch(rows))
        for piece, patches in zip(rows, fetched, strict=True):
            if not np.isfinite(patches).all():
                raise ValueError(f"patches {piece.start} to {piece.stop} of {piece.ticket} have NaN or infinity")
        return fetched

    def take(self, tensor: ShadowTensor) -> np.ndarray:
        """Returns the patches of a tensor when they are fetched, and keeps no copy. Raises the errors of `fetch`,
        ShadowError for patches of another shape, and ValueError for pixels that are not finite."""
        rows = tensor.elsewhere
        if not rows:
            return tensor.materialize(lambda _: [])
        future = self._held.pop(rows, None) or self._threads.submit(self._fetched, rows)
        self._begin()
        fetched = future.result()
        return tensor.materialize(lambda _: fetched)

    def close(self) -> None:
        """Cancels waiting fetches; running fetches end by themselves. May be called again."""
        self.expect(())
        self._threads.shutdown(wait=False, cancel_futures=True)


class FrameGroup(NamedTuple):
    """Neighbouring frame pairs that are computed together: patches `start .. stop - 1`, padded to `padded` patches."""

    start: int
    stop: int
    padded: int
    row: int  # row of its first feature in `PromptFeatures.rows`


@dataclasses.dataclass(eq=False)
class PromptFeatures:
    """The features of one prompt, `rows` `[size, width of a feature]`, computed group by group. Each group has rows for
    its padding, too, so that groups may be computed in any order."""

    vision: VisionInput
    merge_unit: int
    groups: tuple[FrameGroup, ...]
    size: int  # the number of rows
    planned: set[int] = dataclasses.field(default_factory=set)  # numbers of the groups that are computed or planned
    rows: Array | None = None

    @staticmethod
    def of(prompt: ModelInput, merge_unit: int, most: int) -> "PromptFeatures":
        """Divides a prompt into groups of at most `most` patches, or of one larger frame pair."""
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
        """Returns the `missing` groups, and marks them as planned."""
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
    """The number of patches that `patches` are padded to, so that few programs are compiled."""
    return merge_unit * geometric(patches // merge_unit, LEAST_FEATURES)
