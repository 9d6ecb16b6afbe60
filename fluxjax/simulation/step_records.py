"""The record of a simulated step, and the metrics that a trainer would report of it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable

from ..base.types import Group


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step of a run. Seconds are virtual. A step lasts from the end of the optimizer step before to the end of its
    own."""

    step: int
    round: str  # short, long; empty where the policy does not distinguish
    end: float
    seconds: float
    rollout: float  # of `seconds`: something was generated
    train: float
    longest: int  # tokens of the longest response that arrived
    trained_tokens: int  # of responses
    lag_mean: float  # versions, over the tokens trained on
    lag_max: int


def lags(groups: Iterable[Group], version: int) -> Counter[int]:
    """Counts the tokens trained on by the number of versions that they are old."""
    counts: Counter[int] = Counter()
    for sample in (sample for group in groups for sample in group.samples):
        versions = sample.response.versions
        if versions and versions[0] == versions[-1]:  # within a response they only grow
            counts[version - versions[0]] += len(versions)
        else:
            for token_version, count in Counter(versions).items():
                counts[version - token_version] += count
    return counts


def staleness_metrics(counts: Counter[int], drift: float) -> dict[str, float]:
    """Computes a trainer's metrics by a law of the simulation: each update moves a token's log-probability by a normal
    variable of standard deviation `drift`, independently. Log-ratios over a lag of k versions then are normal with
    variance v = k drift^2 and mean -v/2: KL(behaviour || policy) is v/2, ratios have mean 1 and variance exp(v) - 1."""
    total = max(sum(counts.values()), 1)

    def mean(of: Callable[[int], float]) -> float:
        return sum(count * of(lag) for lag, count in sorted(counts.items())) / total

    return {
        "staleness/lag_mean": mean(lambda lag: lag),
        "staleness/lag_max": float(max(counts, default=0)),
        "staleness/kl": mean(lambda lag: lag * drift**2 / 2),
        "staleness/variance": mean(lambda lag: math.expm1(min(lag * drift**2, 50.0))),
    }
