"""Resizes 8-bit frames bicubically, bit for bit as torchvision resizes the videos of the published processors.

Torch and Pillow interpolate with the same antialiased kernel, one axis after the other, but quantise its weights
differently: about 0.3 % of all bytes of a real video differ, by one or two. Pillow defines images (`images.py`), torch
defines videos. This file does torch's fixed-point arithmetic (ATen `UpSampleKernel`, 16-bit weights) as banded matrix
products, whose sums are small enough to be exact in floating point.
"""

import functools
import math

import numpy as np

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
    """The precision of the weights in bits, and the bands of outputs.

    A band is its start, the span of inputs (start, stop) and the integer weights `[outputs, inputs]`, in a float type
    in which every sum with 8-bit pixels is exact.
    """
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
    """`[..., n]` pixels to `[..., target]`, still whole numbers from 0 to 255, in float."""
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
