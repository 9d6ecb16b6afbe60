"""The patches of prompts and microbatches as inputs of the vision tower: packed, joined, padded."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from sharding.spread.route import ExchangeRoute

from ..config import PatchLayout
from ..inputs import PromptInput, VisionInput, frame_bound
from ..shadow import ShadowTensor
from .patches import Arrangement, arrange

ARRAYS = ("patches_PX", "positions_P2", "frame_segments_P", "window_segments_P")


def arranged(arrangement: Arrangement, packed_PX: np.ndarray | ShadowTensor) -> VisionInput:
    """The tower's input, of patches that are in window order."""
    return VisionInput(
        packed_PX,
        arrangement.positions_P2,
        arrangement.frame_segments_P,
        arrangement.window_segments_P,
        frame_bound=frame_bound(arrangement.frame_segments_P),
    )


def pack_patches(
    patches_PX: np.ndarray, grid_thw: Sequence[Sequence[int]] | np.ndarray, layout: PatchLayout
) -> tuple[VisionInput, np.ndarray]:
    """Packs the patches of all media, given in raster order, into window order; see `Arrangement.feature_order`.

    Raises ValueError where patches and grids do not fit together.
    """
    arrangement = arrange(grid_thw, layout)
    return arranged(arrangement, arrangement.packed(patches_PX)), arrangement.feature_order


def concatenate(parts: Sequence[VisionInput]) -> VisionInput:
    """The parts in order as one `VisionInput`. Padding within a part stays padding. Raises ValueError for no parts."""
    if not parts:
        raise ValueError("nothing to concatenate: a batch without media has vision=None")
    return VisionInput(
        np.concatenate([part.patches_PX for part in parts]),
        np.concatenate([part.positions_P2 for part in parts]),
        _renumbered([part.frame_segments_P for part in parts]),
        _renumbered([part.window_segments_P for part in parts]),
        frame_bound=max(part.frame_bound for part in parts) if all(part.frame_bound for part in parts) else 0,
    )


def _renumbered(segments: Sequence[np.ndarray]) -> np.ndarray:
    """The segment ids of several parts, in order, renumbered so that no two parts share an id; 0 stays padding."""
    result, used = [], 0
    for ids in segments:
        result.append(np.where(ids == 0, 0, ids + used).astype(np.int32))
        used += int(ids.max(initial=0))
    return np.concatenate(result)


def pad(vision: VisionInput, num_patches: int) -> VisionInput:
    """`vision` with padding (segment 0, zero pixels) at the end, `num_patches` in all; ValueError if it has more."""
    missing = num_patches - vision.num_patches
    if missing < 0:
        raise ValueError(f"{vision.num_patches} patches do not fit into {num_patches}")
    if missing == 0:
        return vision
    return jax.tree.map(lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]), vision)


def cut(vision: VisionInput, start: int, stop: int) -> VisionInput:
    """The patches `start .. stop` by themselves: whole frame pairs."""
    part = jax.tree.map(lambda x: x[start:stop], vision)
    return dataclasses.replace(part, frame_bound=frame_bound(part.frame_segments_P))


def blank(num_patches: int, patch_values: int) -> VisionInput:
    """Padding: zero pixels in segment 0."""
    return VisionInput(
        patches_PX=np.zeros((num_patches, patch_values), np.float32),
        positions_P2=np.zeros((num_patches, 2), np.int32),
        frame_segments_P=np.zeros(num_patches, np.int32),
        window_segments_P=np.zeros(num_patches, np.int32),
        frame_bound=1,
    )


def side_by_side(shards: Sequence[VisionInput], bound: int, way: ExchangeRoute | None = None) -> VisionInput:
    """The buffers of all shards along one axis; segment ids stay each shard's own."""
    if len(shards) == 1:
        return dataclasses.replace(shards[0], frame_bound=bound, route=way)
    arrays = {name: np.concatenate([getattr(shard, name) for shard in shards]) for name in ARRAYS}
    return dataclasses.replace(shards[0], **arrays, frame_bound=bound, route=way)


def common_bound(inputs: Iterable[PromptInput]) -> int:
    """The largest `frame_bound` of the inputs. It is static: each different value would be compiled anew."""
    return max((prompt.frame_bound for prompt in inputs), default=1)
