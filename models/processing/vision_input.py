"""Turns frames into normalised patches, and brings these from raster order into the vision tower's window order.

The published tower permutes patches into attention windows on every forward pass. Here the permutation, the
2-D positions and both segmentations are computed once, on the host, with numpy; the model sees contiguous runs.

Raster order is that of the Hugging Face processors: media in order, frame pairs in time, then merge blocks row
by row, then the `merge ** 2` patches of a block row by row.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from sharding.spread.route import Route

from ..config import PatchLayout
from ..inputs import VisionInput, frame_bound
from ..qwen2_5_vl.positions import Grid
from .settings import PixelSettings

ARRAYS = ("patches_PX", "positions_P2", "frame_segments_P", "window_segments_P")


def patchify(frames: np.ndarray, layout: PatchLayout) -> tuple[np.ndarray, Grid]:
    """Patches `[P, 3, temporal * patch ** 2]` (uint8) of frames `[frames, height, width, 3]`, and their grid.

    The last frame is repeated until the temporal patch divides their number: an image becomes a frame pair.
    Patches are bytes here, since floats would be four times the memory to move.
    """
    time, patch, merge = layout.temporal_patch_size, layout.patch_size, layout.spatial_merge_size
    if missing := -len(frames) % time:
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    grid = (len(frames) // time, frames.shape[1] // patch, frames.shape[2] // patch)
    blocks = frames.reshape(grid[0], time, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3)
    ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(grid[0] * grid[1] * grid[2], 3, time * patch * patch), grid


def normalise(patches: np.ndarray, pixels: PixelSettings, *, fused: bool) -> np.ndarray:
    """Patches `[P, X]` (float32) of uint8 patches `[P, 3, n]`.

    Two orders of the same arithmetic are in use, and they differ in the last bit: transformers' Pillow backend
    (its reference for images) rescales and then normalises; its video processor folds the scale into mean and
    deviation (`fused`).
    """
    values = patches.astype(np.float32)
    mean = np.asarray(pixels.mean, np.float32)[:, None]
    std = np.asarray(pixels.std, np.float32)[:, None]
    if fused:
        scale = np.float32(1.0 / pixels.rescale_factor)
        mean, std = mean * scale, std * scale
    elif pixels.rescale_factor == 1 / 255:
        values /= np.float32(255)  # equal to the product in float64, rounded, for all 256 values; and five times faster
    else:
        values = (patches.astype(np.float64) * pixels.rescale_factor).astype(np.float32)
    values -= mean
    values /= std
    return values.reshape(len(values), -1)


@functools.lru_cache(maxsize=256)
def _order(grid: Grid, merge: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The window order of one medium: block order `[M]`, positions `[P, 2]`, frame and window indices `[P]` from 0.

    `window` is in merge blocks. Windows at the right and lower edge are cut off, as in the published model. The arrays
    are read-only.
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
    patches_PX: np.ndarray, grid_thw: Sequence[Sequence[int]] | np.ndarray, layout: PatchLayout
) -> tuple[VisionInput, np.ndarray]:
    """Packs the patches of all media, given in raster order, into window order.

    `grid_thw` has a row (frame pairs, patch rows, patch columns) for each medium. Returns the `VisionInput` and
    `feature_order` `[M]`: the row, in the window-ordered merged features, of each merged feature in raster order.
    Raises ValueError where patches and grids do not fit together.
    """
    merge = layout.spatial_merge_size
    window = layout.window_size // layout.patch_size // merge
    if window < 1:
        raise ValueError(
            f"window_size {layout.window_size} is smaller than a merge block of {merge} x {layout.patch_size} pixels"
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
    """Segment ids of several parts, in order, none of which is shared by two parts; 0 stays padding."""
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
    return jax.tree.map(lambda x: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), vision)


def blank(num_patches: int, patch_values: int) -> VisionInput:
    """Padding: zero pixels in segment 0."""
    return VisionInput(
        patches_PX=np.zeros((num_patches, patch_values), np.float32),
        positions_P2=np.zeros((num_patches, 2), np.int32),
        frame_segments_P=np.zeros(num_patches, np.int32),
        window_segments_P=np.zeros(num_patches, np.int32),
        frame_bound=1,
    )


def side_by_side(shards: Sequence[VisionInput], bound: int, way: Route | None = None) -> VisionInput:
    """The buffers of all shards along one axis; segment ids stay each shard's own."""
    if len(shards) == 1:
        return dataclasses.replace(shards[0], frame_bound=bound, route=way)
    arrays = {name: np.concatenate([getattr(shard, name) for shard in shards]) for name in ARRAYS}
    return dataclasses.replace(shards[0], **arrays, frame_bound=bound, route=way)


def common_bound(visions: Iterable[VisionInput | None]) -> int:
    """The largest `frame_bound` of all of them: it is static, and each other value would be compiled anew."""
    there = [vision for vision in visions if vision is not None]
    return max((vision.frame_bound or frame_bound(vision.frame_segments_P) for vision in there), default=1)
