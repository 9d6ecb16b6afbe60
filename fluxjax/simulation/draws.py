"""Random numbers that are functions of their names: seed, kind, draw, attempt, sample. Order changes nothing."""

from __future__ import annotations

import math

import numpy as np

_MASK = (1 << 64) - 1


def key(*names: int) -> int:
    """64 bits from whole numbers, each of which matters (the finaliser of splitmix64, chained)."""
    mixed = 0
    for name in names:
        mixed = (mixed + name + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed


def uniform(*names: int) -> float:
    """In (0, 1)."""
    return ((key(*names) >> 12) + 0.5) * 2.0**-52


def exponential(mean: float, *names: int) -> float:
    return -mean * math.log(uniform(*names))


def generator(*names: int) -> np.random.Generator:
    """A stream of its own for these names."""
    return np.random.Generator(np.random.Philox(key=key(*names)))
