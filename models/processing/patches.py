"""Turns frames into patches, and puts patches from raster order into the vision tower's window order.

The published tower permutes patches into attention windows on every forward pass. Here the permutation, the
2-D positions and both segmentations are computed once, on the host, with numpy; the model sees contiguous runs.

Raster order is that of the Hugging Face processors: media in order, frame pairs in time, then merge blocks row by row,
then the `merge ** 2` patches of a block row by row. This file imports no JAX, since decoding needs none.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from ..config import PatchLayout
from ..qwen2_5_vl.positions import Grid
from .settings import PixelSettings


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

    Two orders of the same arithmetic are in use, and they differ in the last bit: transformers' Pillow backend (its
    reference for images) rescales and then normalises; its video processor scales mean and deviation (`fused`).
    """
    values = patches.astype(np.float32)
    mean = np.asarray(pixels.mean, np.float32)[:, None]
    std = np.asarray(pixels.std, np.float32)[:, None]
    if fused:
        scale = np.float32(1.0 / pixels.rescale_factor)
        mean, std = mean * scale, std * scale
    elif pixels.rescale_factor == 1 / 255:
        values /= np.float32(255)  # for all 256 values equal to the rounded product in float64, and five times faster
    else:
        values = (patches.astype(np.float64) * pixels.rescale_factor).astype(np.float32)
    values -= mean
    values /= std
    return values.reshape(len(values), 3 * patches.shape[2])


@functools.lru_cache(maxsize=256)
def _order(grid: Grid, merge: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The window order of one medium: block order `[M]`, positions `[P, 2]`, frame and window indices `[P]` from 0.

    `window` is in merge blocks. Windows at the right and lower edge are cut off, as in the published model. Arrays are
    read-only.
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


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """The window order of the patches of several media, which depends on their grids alone."""

    order_M: np.ndarray  # i64: at each position of the window order, the merge block's number in raster order
    positions_P2: np.ndarray  # i32
    frame_segments_P: np.ndarray  # i32
    window_segments_P: np.ndarray  # i32

    @property
    def feature_order(self) -> np.ndarray:
        """`[M]` (i32): the row, in the window-ordered merged features, of each merged feature in raster order."""
        result = np.empty(len(self.order_M), np.int32)
        result[self.order_M] = np.arange(len(self.order_M), dtype=np.int32)
        return result

    def packed(self, patches_PX: np.ndarray) -> np.ndarray:
        """The patches, given in raster order, in window order. Raises ValueError for a wrong number of patches."""
        if len(patches_PX) != len(self.positions_P2):
            raise ValueError(f"{len(patches_PX)} patches, but the grids hold {len(self.positions_P2)}")
        return patches_PX.reshape(len(self.order_M), -1)[self.order_M].reshape(patches_PX.shape)


def arrange(grid_thw: Sequence[Sequence[int]] | np.ndarray, layout: PatchLayout) -> Arrangement:
    """`grid_thw` has a row (frame pairs, patch rows, patch columns) for each medium. Raises ValueError for a grid that
    does not divide into merge blocks, and for windows smaller than a block."""
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
    return Arrangement(order_M, positions_P2, frame_segments_P, window_segments_P)
