"""A lognormal length, given that a response already has so many tokens, and what an unfinished response tells.

Natural-log units throughout: ln(length) is normal with mean `mu` and standard deviation `sigma`. Standard results on
truncated and censored normal variables; nothing here keeps state.
"""

from __future__ import annotations

import dataclasses
import math

from scipy.special import erfcx, log_ndtr, ndtri_exp


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """The length of a whole response in tokens, those that it already has included.

    `confidence` is the predicted probability that the length lies within a factor of two of `mean`.
    """

    mean: float
    p90: float
    confidence: float


def log_tail(z: float) -> float:
    """Returns ln P(Z > z) for a standard normal Z."""
    return float(log_ndtr(-z))


def given_survival(mu: float, sigma: float, running: int = 0, limit: int = 0) -> Prediction:
    """Predicts the length min(L, limit) given L > running; `limit` 0: none."""
    if limit and running >= limit:
        return Prediction(float(running), float(running), 1.0)
    start, end = _standard(mu, sigma, running), _standard(mu, sigma, limit) if limit else math.inf
    alive = log_tail(start)  # what is known: everything below is given that
    # E[L; L > x] is exp(mu + sigma^2 / 2) P(Z > z - sigma)
    beyond = log_tail(start - sigma)
    before_limit = math.exp(mu + 0.5 * sigma * sigma + beyond - alive) * -math.expm1(log_tail(end - sigma) - beyond)
    mean = before_limit + limit * math.exp(log_tail(end) - alive)
    p90 = math.exp(mu - sigma * float(ndtri_exp(alive + math.log(0.1))))
    if limit:
        mean, p90 = min(mean, float(limit)), min(p90, float(limit))
    mean, p90 = max(mean, float(running)), max(p90, float(running))
    low = max(_standard(mu, sigma, 0.5 * mean), start)
    high = math.inf if 0 < limit <= 2 * mean else _standard(mu, sigma, 2 * mean)
    return Prediction(mean, p90, min(1.0, math.exp(log_tail(low) - alive) - math.exp(log_tail(high) - alive)))


def ends_by(mu: float, sigma: float, tokens: int, running: int = 0) -> float:
    """Returns P(L <= tokens | L > running)."""
    if tokens <= running:
        return 0.0
    return -math.expm1(log_tail(_standard(mu, sigma, tokens)) - log_tail(_standard(mu, sigma, running)))


def _standard(mu: float, sigma: float, tokens: float) -> float:
    """Returns ln(tokens) in standard deviations from its mean."""
    return (math.log(tokens) - mu) / sigma if tokens else -math.inf


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
    """Returns what `tokens` of an unfinished response tell. Few tokens tell nothing: `information` is then nearly 0."""
    z = (math.log(max(tokens, 1)) - mu) / sigma
    # Density(z) / P(Z > z), which is also E[Z | Z > z] (inverse Mills ratio).
    ratio = math.sqrt(2 / math.pi) / float(erfcx(z / math.sqrt(2)))
    ahead = ratio - z
    return Censored(
        working=mu + sigma / ahead,
        information=min(1.0, ratio * ahead),
        mean=mu + sigma * ratio,
        variance=sigma * sigma * max(0.0, 1 - ratio * ahead),
    )
