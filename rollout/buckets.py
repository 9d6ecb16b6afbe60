"""Rounds sizes up to a few values, so that few shapes are compiled. Pure functions: shapes, and with them the last
bits of a result, never depend on what an engine did before."""

from __future__ import annotations


def doubling(size: int, least: int, most: int | None = None) -> int:
    """The smallest of `least, 2 least, 4 least, ...` that holds `size`, but no more than `most`."""
    bucket = least
    while bucket < size:
        bucket *= 2
    return bucket if most is None else min(bucket, max(most, size))


def geometric(size: int, least: int) -> int:
    """Like `doubling`, with a value half-way between each two: 16, 24, 32, 48, 64, 96, ..."""
    bucket = doubling(size, least)
    if bucket > least and size <= bucket * 3 // 4:
        bucket = bucket * 3 // 4
    return bucket
