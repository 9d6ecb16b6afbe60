"""From patches in raster order to the window order in which the vision tower reads them.

The published tower permutes patches into attention windows on every forward pass. Here the permutation, the
2-D positions and both segmentations are computed once, on the host, with numpy; the model sees contiguous runs.

Raster order is that of the Hugging Face processors: media in order, frame pairs in time, then merge blocks row
by row, then the `merge ** 2` patches of a block row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ..inputs import VisionInput, frame_bound

Grid = tuple[int, int, int]  # frame pairs, patch rows, patch columns


@runtime_checkable
class WindowLayout(Protocol):
    """What of a `VisionConfig` decides the order of patches. `window_size` is in pixels."""

    @property
    def patch_size(self) -> int: ...
    @property
    def spatial_merge_size(self) -> int: ...
    @property
    def window_size(self) -> int: ...


@functools.lru_cache(maxsize=256)
def _order(grid: Grid, merge: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of one medium: block order `[M]`, positions `[P, 2]`, frame and window indices `[P]` from 0, read-only.

    `window` is in merge blocks. Windows at the right and lower edge are cut off, as in the published model.
    """
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    frame, row, column = (axis.ravel() for axis in np.indices((frames, rows, columns), dtype=np.int32))
    across = -(-columns // window)
    down = -(-rows // window)
    window_of_block = (frame * down + row // window) * across + column // window
    order = np.argsort(window_of_block, kind="stable")  # stable: raster order within a window
    inner_row, inner_column = (axis.ravel() for axis in np.indices((merge, merge), dtype=np.int32))
    positions = np.stack(
        [row[order][:, None] * merge + inner_row, column[order][:, None] * merge + inner_column], axis=-1
    ).reshape(-1, 2)
    unit = merge * merge
    result = (order, positions, np.repeat(frame[order], unit), np.repeat(window_of_block[order], unit))
    for array in result:
        array.setflags(write=False)  # shared by every caller through the cache
    return result


def pack_patches(
    patches_PX: np.ndarray, grid_thw: Sequence[Sequence[int]] | np.ndarray, vision_config: WindowLayout
) -> tuple[VisionInput, np.ndarray]:
    """Packs the patches of all media, given in raster order, into window order.

    `grid_thw` has a row (frame pairs, patch rows, patch columns) for each medium. Returns the `VisionInput` and
    `feature_order` `[M]`: the row, in the window-ordered merged features, of each merged feature in raster order.
    Raises ValueError where patches and grids do not fit together.
    """
    merge = vision_config.spatial_merge_size
    window = vision_config.window_size // vision_config.patch_size // merge
    if window < 1:
        raise ValueError(
            f"window_size {vision_config.window_size} is smaller than a merge block of "
            f"{merge} x {vision_config.patch_size} pixels"
        )
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_thw]
    for grid in grids:
        if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            raise ValueError(f"grid {grid}: rows and columns must be positive multiples of the merge size {merge}")
    num_patches = sum(t * h * w for t, h, w in grids)
    if num_patches != len(patches_PX):
        raise ValueError(f"{len(patches_PX)} patches, but the grids {grids} hold {num_patches}")

    order_M = np.empty(num_patches // merge**2, np.int64)
    positions_P2 = np.empty((num_patches, 2), np.int32)
    frame_segments_P = np.empty(num_patches, np.int32)
    window_segments_P = np.empty(num_patches, np.int32)
    start, frames, windows = 0, 0, 0
    for grid in grids:
        order, positions, frame, window_index = _order(grid, merge, window)
        stop = start + len(positions)
        np.add(order, start // merge**2, out=order_M[start // merge**2 : stop // merge**2])
        positions_P2[start:stop] = positions
        np.add(frame, frames + 1, out=frame_segments_P[start:stop])
        np.add(window_index, windows + 1, out=window_segments_P[start:stop])
        start, frames, windows = stop, frames + grid[0], windows + int(window_index[-1]) + 1

    blocks = patches_PX.reshape(len(order_M), -1)
    packed = blocks[order_M].reshape(patches_PX.shape)
    feature_order = np.empty(len(order_M), np.int32)
    feature_order[order_M] = np.arange(len(order_M), dtype=np.int32)
    bound = frame_bound(frame_segments_P)
    return VisionInput(packed, positions_P2, frame_segments_P, window_segments_P, frame_bound=bound), feature_order


def concatenate(parts: Sequence[VisionInput]) -> VisionInput:
    """One `VisionInput` of several, in order, with segment ids renumbered so that none is shared.

    Padding within a part stays padding. Raises ValueError for an empty list.
    """
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
    return VisionInput(
        np.pad(vision.patches_PX, ((0, missing), (0, 0))),
        np.pad(vision.positions_P2, ((0, missing), (0, 0))),
        np.pad(vision.frame_segments_P, (0, missing)),
        np.pad(vision.window_segments_P, (0, missing)),
        frame_bound=vision.frame_bound,
    )
