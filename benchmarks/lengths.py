"""Samples sequence lengths like those of ODC's three data sets; the data sets themselves are not used. numpy only.

    lengths = mean_of(1.0, longest=65536, target=16000)     # a lognormal with a mean of 16,000 tokens, cut off at 64k
    tokens = lengths.draw(np.random.default_rng(0), 32)

All three are lognormal, without sequences that would be longer than the longest. `KNOWN` has the published facts of
each data set and their sources. The spreads are not published; `odc_simulated.fitted` fits each to one bubble rate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable

import numpy as np

GRID = 1024  # points of a table of the distribution function
NORMAL = statistics.NormalDist()


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: their logarithm is normal around the logarithm of `median` with deviation
    `spread`. Lengths above `longest` do not occur, so the true median is smaller. Raises ValueError for a parameter
    that is not positive."""

    median: float
    spread: float
    longest: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} of lengths must be positive, not {getattr(self, field.name)}")

    @functools.cached_property
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Rising shares of the sequences, from 0 to 1, and the logarithms of the largest lengths of these shares."""
        middle, top = math.log(self.median), math.log(self.longest)
        logs = np.linspace(0.0, top, GRID)
        below = np.array([NORMAL.cdf((x - middle) / self.spread) for x in logs.tolist()])
        if not below[-1]:  # the mass rounds to 0: all lengths are `longest`
            return np.array([0.0, 1.0]), np.array([top, top])
        rising = np.r_[np.diff(below) > 0, True]  # drops lengths with equal shares: no lookup finds them
        return below[rising] / below[-1], logs[rising]

    def at(self, shares: np.ndarray) -> np.ndarray:
        """Returns the lengths, int, that the given shares (in [0, 1)) of all sequences do not exceed, in the shape of
        `shares`."""
        return np.exp(np.interp(shares, *self.table)).astype(int).clip(1, self.longest)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`[count]` int: independent lengths. Equal generators sample equal shares, whatever the parameters."""
        return self.at(rng.random(count))

    def mean(self, of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> float:
        """The mean of a function of the length; by default of the length itself, in tokens."""
        return float(np.mean(of(self.at((np.arange(2000) + 0.5) / 2000))))

    def scaled(self, factor: float) -> Lengths:
        """The lengths with every sequence longer by the same factor, as in ODC's parametric study (section 5.3)."""
        return Lengths(self.median * factor, self.spread, round(self.longest * factor))


def mean_of(spread: float, longest: int, target: float, of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Lengths:
    """The lengths of this spread for which the mean of `of`, a function that rises with the length, is `target`. Raises
    ValueError if the longest sequence is too short for this mean."""
    low, high = -8.0, 4.0  # logarithms of the median over the longest
    for _ in range(40):
        half = (low + high) / 2
        enough = Lengths(longest * math.exp(half), spread, longest).mean(of) >= target
        low, high = (low, half) if enough else (half, high)
    found = Lengths(longest * math.exp(high), spread, longest)
    if not 0.99 < found.mean(of) / target < 1.01:
        raise ValueError(f"no lengths up to {longest} tokens with a spread of {spread:g} have a mean of {target:g}")
    return found


@dataclasses.dataclass(frozen=True)
class Known:
    """The published facts of a data set: `longest` and `mean` in tokens, or, instead of the mean, `work`: the compute
    of an average sample over that of LongAlign, with the same `model`. `source` names the sources of these facts."""

    longest: int
    source: str
    mean: float = 0.0
    work: float = 0.0
    model: str = "1.5B"


AIME = "model card of DeepSeek-R1 (answers of at most 32,768 tokens); samples a second of LB-Mini, Tables 3 and 5"
KNOWN = {
    # LongAlign's own paper says 8k to 64k tokens. With a mean of 16k, nothing above 8k is as uneven as Table 6.
    "longalign": Known(65536, "ODC, Table 1 (64k) and appendix E (an eighth of each: 2k on average)", mean=16000),
    # 2.5 times LongAlign's compute: cut at 32k, as by others, not even a data set of only 32k sequences has so much.
    "swe_smith": Known(
        65536, "ODC's public example (one limit for all data); samples a second of LB-Mini, Table 5", work=432 / 172
    ),
    "aime_1.5B": Known(32768, AIME, work=432 / 811.8, model="1.5B"),
    "aime_7B": Known(32768, AIME, work=145.7 / 312.6, model="7B"),
    "aime_14B": Known(32768, AIME, work=69 / 145.6, model="14B"),
}
