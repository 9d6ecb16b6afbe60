"""Turns frames into normalised patches in raster order, bit for bit as the published processors compute them."""

from __future__ import annotations

import numpy as np

from .settings import PatchLayout, PixelSettings
from .vision_input import Grid


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
