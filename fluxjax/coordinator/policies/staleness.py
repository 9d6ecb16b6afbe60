"""How far the policy has moved away from what generated its data, as one number in [0, 1] (Flux, component 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...config import AdaptiveAsyncConfig


def staleness(metrics: Mapping[str, float], settings: AdaptiveAsyncConfig) -> float:
    """Returns the weighted sum of three metrics of a step, each divided by the value that counts as 1.

    KL(behaviour || policy) in nats, `staleness/kl`; `log1p` of the variance of importance weights,
    `staleness/variance`; the mean number of versions between generation and training, `staleness/lag_mean`. A step
    without them (a batch that no engine generated) has staleness 0.
    """
    kl = metrics.get("staleness/kl", 0.0) / settings.kl_normalizer
    variance = math.log1p(max(metrics.get("staleness/variance", 0.0), 0.0)) / settings.variance_normalizer
    gap = metrics.get("staleness/lag_mean", 0.0) / max(settings.max_staleness, 1)
    total = settings.kl_weight * kl + settings.variance_weight * variance + settings.gap_weight * gap
    return min(max(total, 0.0), 1.0) if math.isfinite(total) else 1.0
