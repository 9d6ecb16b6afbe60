"""Random numbers as functions of names (seed, kind, draw, attempt, sample), so that order changes nothing.

Apart from `workload.py` and `faults.py`, which both use it: the latter is loaded with the configuration, without JAX.
"""

import math

import numpy as np

_MASK = (1 << 64) - 1


def key(*names: int) -> int:
    """Mixes whole numbers, each of which matters, into 64 bits (the finaliser of splitmix64, chained)."""
    mixed = 0
    for name in names:
        mixed = (mixed + name + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed


def uniform(*names: int) -> float:
    """Returns a uniform number in (0, 1)."""
    return ((key(*names) >> 12) + 0.5) * 2.0**-52


def exponential(mean: float, *names: int) -> float:
    return -mean * math.log(uniform(*names))


def generator(*names: int) -> np.random.Generator:
    """Returns a stream of random numbers for these names alone."""
    return np.random.Generator(np.random.Philox(key=key(*names)))
