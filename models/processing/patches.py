"""Resizes frames, turns them into patches, and puts patches from raster order into the vision tower's window order.

In window order, windows are contiguous in the model. Raster order is that of the Hugging Face processors: media in
order, frame pairs in time, then merge blocks row by row, then the `merge ** 2` patches of a block row by row. This file
needs no JAX, because processes that only decode media use it.

Frames are resized bicubically, bit for bit as torchvision resizes the videos of the published processors. Pillow, which
resizes images (`images.py`), quantises the weights of the same antialiased kernel differently; about 0.3 % of a video's
bytes would differ, by one or two. This file does torch's fixed-point arithmetic (ATen `UpSampleKernel`, 16-bit weights)
as banded matrix products, whose sums are small enough to be exact in floating point.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from ..config import Grid, PatchLayout
from .settings import PixelSettings

BAND = 16  # output positions computed by one dense product
SMALL_PRODUCT = 2**18  # multiplications; larger products wake BLAS threads, which cost more than they save here
STRIP_PIXELS = 2**22  # pixels turned into floats at once; floats take four times the memory of bytes


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -0.5."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


@functools.lru_cache(maxsize=64)
def _bands(source: int, target: int) -> tuple[int, tuple[tuple[int, int, int, np.ndarray], ...]]:
    """The precision of the weights in bits, and the bands of outputs: the first output, the span of inputs (start,
    stop), integer weights `[outputs, inputs]` in a float type in which every sum with 8-bit pixels is exact."""
    scale = source / target
    support = 2 * max(scale, 1.0)
    center = scale * (np.arange(target) + 0.5)
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    last = np.minimum((center + support + 0.5).astype(np.int64), source)
    taps = first[:, None] + np.arange(math.ceil(support) * 2 + 1)
    weights = _cubic((taps - center[:, None] + 0.5) / max(scale, 1.0)) * (taps < last[:, None])
    weights /= weights.sum(axis=1, keepdims=True)

    precision = 0
    while precision < 22 and int(0.5 + weights.max() * 2 ** (precision + 1)) < 2**15:
        precision += 1
    whole = np.trunc(weights * 2**precision + np.copysign(0.5, weights))
    exact = np.float32 if np.abs(whole).sum(axis=1).max() * 255 + 2**precision < 2**24 else np.float64
    bands = []
    for start in range(0, target, BAND):
        rows = slice(start, min(start + BAND, target))
        low, high = int(first[rows].min()), int(last[rows].max())
        dense = np.zeros((rows.stop - start, high - low), exact)
        inside = taps[rows] < last[rows, None]
        row, _ = np.nonzero(inside)
        dense[row, taps[rows][inside] - low] = whole[rows][inside]
        bands.append((start, low, high, dense))
    return precision, tuple(bands)


def _along_last(planes: np.ndarray, target: int) -> np.ndarray:
    """Pixels `[..., n]` resized to `[..., target]`: whole numbers from 0 to 255, in float."""
    if planes.shape[-1] == target:
        return planes
    precision, bands = _bands(planes.shape[-1], target)
    lines = planes.reshape(-1, planes.shape[-1]).astype(bands[0][3].dtype, copy=False)
    result = np.empty((len(lines), target), lines.dtype)
    step = max(1, SMALL_PRODUCT // max(weights.size for *_, weights in bands))
    for top in range(0, len(lines), step):
        rows = slice(top, top + step)
        for start, low, high, weights in bands:
            result[rows, start : start + len(weights)] = lines[rows, low:high] @ weights.T
        part = result[rows]
        part += 2 ** (precision - 1)
        part *= 2.0**-precision
        np.floor(part, out=part)
        np.clip(part, 0, 255, out=part)
    return result.reshape(*planes.shape[:-1], target)


def resize_frame(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """A frame `[h, w, 3]` (uint8) resized to `[height, width, 3]` (uint8)."""
    if frame.shape[:2] == (height, width):
        return frame
    step = max(1, STRIP_PIXELS // frame.shape[1])
    strips = (frame[top : top + step].transpose(2, 0, 1) for top in range(0, len(frame), step))
    planes = np.concatenate([_along_last(np.ascontiguousarray(strip, np.float32), width) for strip in strips], axis=1)
    planes = _along_last(np.ascontiguousarray(planes.transpose(0, 2, 1)), height)
    return planes.transpose(2, 1, 0).astype(np.uint8)


def patchify(frames: np.ndarray, layout: PatchLayout) -> tuple[np.ndarray, Grid]:
    """Patches `[P, 3, temporal * patch ** 2]` (uint8) of frames `[frames, height, width, 3]`, and their grid. The last
    frame is repeated until the temporal patch divides the number of frames. An image becomes a frame pair."""
    time, patch, merge = layout.temporal_patch_size, layout.patch_size, layout.spatial_merge_size
    if missing := -len(frames) % time:
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    grid = (len(frames) // time, frames.shape[1] // patch, frames.shape[2] // patch)
    blocks = frames.reshape(grid[0], time, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3)
    ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(grid[0] * grid[1] * grid[2], 3, time * patch * patch), grid


def normalise(patches: np.ndarray, pixels: PixelSettings, *, fused: bool) -> np.ndarray:
    """Normalised patches `[P, X]` (float32) of uint8 patches `[P, 3, n]`. transformers' Pillow backend rescales, then
    normalises; its video processor scales mean and deviation instead (`fused`), which differs in the last bit."""
    values = patches.astype(np.float32)
    mean = np.asarray(pixels.mean, np.float32)[:, None]
    std = np.asarray(pixels.std, np.float32)[:, None]
    if fused:
        scale = np.float32(1.0 / pixels.rescale_factor)
        mean, std = mean * scale, std * scale
    elif pixels.rescale_factor == 1 / 255:
        values /= np.float32(255)  # equals the rounded product in float64 for all 256 values, and is five times faster
    else:
        values = (patches.astype(np.float64) * pixels.rescale_factor).astype(np.float32)
    values -= mean
    values /= std
    return values.reshape(len(values), 3 * patches.shape[2])


@functools.lru_cache(maxsize=256)
def _order(grid: Grid, merge: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The window order of one medium: block order `[M]`, positions `[P, 2]`, frame and window indices `[P]` from 0.
    `window` is in merge blocks; 0 makes each frame pair one window. Windows at the right and lower edge are cut off."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    window = window or max(rows, columns)
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
    """The window order of media; `grid_thw` has a row (frame pairs, patch rows, patch columns) for each medium. Raises
    ValueError for a grid that does not divide into merge blocks, and for windows smaller than a block."""
    merge = layout.spatial_merge_size
    window = layout.window_size // layout.patch_size // merge
    if layout.window_size and not window:
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
