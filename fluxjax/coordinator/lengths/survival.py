"""A lognormal length given that a response already has so many tokens, and what an unfinished one tells.

Natural-log units throughout: ln(length) is normal with mean `mu` and standard deviation `sigma`. Standard results on
truncated and censored normal variables; nothing here keeps state.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

_ROOT2 = math.sqrt(2)
_DENSITY = 1 / math.sqrt(2 * math.pi)
_FAR = 25.0  # standard deviations beyond which the tail is taken for a power law, before `erfc` underflows
_NORMAL = statistics.NormalDist()


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """Length of a whole response in tokens, those that it already has included.

    `confidence` is the predicted probability that the length lies within a factor of two of `mean`.
    """

    mean: float
    p90: float
    confidence: float


def upper_tail(z: float) -> float:
    """P(Z > z) for a standard normal Z."""
    return 0.5 * math.erfc(z / _ROOT2)


def hazard(z: float) -> float:
    """density(z) / P(Z > z), also E[Z | Z > z] (inverse Mills ratio)."""
    if z > _FAR:
        return z + 1 / z
    return _DENSITY * math.exp(-0.5 * z * z) / upper_tail(z)


def given_survival(mu: float, sigma: float, running: int = 0, limit: int = 0) -> Prediction:
    """The length min(L, limit) given L > running; `limit` 0: none."""
    if limit and running >= limit:
        return Prediction(float(running), float(running), 1.0)
    start = (math.log(running) - mu) / sigma if running else -math.inf
    if start > _FAR:
        return _power_law(hazard(start) / sigma, running, limit)
    alive = upper_tail(start)
    end = (math.log(limit) - mu) / sigma if limit else math.inf
    moment = math.exp(mu + 0.5 * sigma * sigma) * (upper_tail(start - sigma) - upper_tail(end - sigma))
    mean = (moment + limit * upper_tail(end)) / alive
    p90 = math.exp(mu - sigma * _NORMAL.inv_cdf(0.1 * alive))
    if limit:
        mean, p90 = min(mean, float(limit)), min(p90, float(limit))
    mean, p90 = max(mean, float(running)), max(p90, float(running))
    low = max((math.log(0.5 * mean) - mu) / sigma, start)
    high = math.inf if 0 < limit <= 2 * mean else (math.log(2 * mean) - mu) / sigma
    return Prediction(mean, p90, min(1.0, (upper_tail(low) - upper_tail(high)) / alive))


def ends_by(mu: float, sigma: float, tokens: int, running: int = 0) -> float:
    """P(L <= tokens | L > running)."""
    if tokens <= running:
        return 0.0
    start = (math.log(running) - mu) / sigma if running else -math.inf
    end = (math.log(tokens) - mu) / sigma
    if start > _FAR:
        return 1 - (running / tokens) ** max(hazard(start) / sigma, 1.1)
    return 1 - upper_tail(end) / upper_tail(start)


def _power_law(rate: float, running: int, limit: int) -> Prediction:
    """Far in the tail, P(L > x | L > running) is nearly (running / x)**rate."""
    rate = max(rate, 1.1)
    ratio = limit / running if limit else math.inf
    mean = running * (rate - ratio ** (1 - rate)) / (rate - 1)
    p90 = running * min(10 ** (1 / rate), ratio)
    within = 1.0 if 0 < limit <= 2 * mean else 1 - (running / (2 * mean)) ** rate
    return Prediction(mean, p90, within)


@dataclasses.dataclass(frozen=True, slots=True)
class Censored:
    """A response known to have more than so many tokens, as the Tobit model sees it (natural log units).

    `working` with weight `information` moves an estimate of mu like the likelihood of the censored observation does
    (one Newton step); `mean` and `variance` are those of ln(length) given what is known.
    """

    working: float
    information: float  # of one finished response; in (0, 1)
    mean: float
    variance: float


def censored(mu: float, sigma: float, tokens: int) -> Censored:
    """What `tokens` of an unfinished response tell. Few tokens tell nothing: `information` is then nearly 0."""
    z = (math.log(max(tokens, 1)) - mu) / sigma
    ratio = hazard(z)
    ahead = ratio - z
    return Censored(
        working=mu + sigma / ahead,
        information=min(1.0, ratio * ahead),
        mean=mu + sigma * ratio,
        variance=sigma * sigma * max(0.0, 1 - ratio * ahead),
    )
