"""How long a response will get, learnt online from prompts, from earlier epochs and from the rest of its group.

Flux, insight 2 ("long-tail rollouts are predictable": prompt length, task, history, complexity); Flexes section 4.4
projects KV-cache use with it. ln(tokens) of response j of prompt i is modelled as

    weights[source] . features(i) + effect(i) + noise(j),

weights by ridge regression (`ridge.py`), each source's shrunk towards those of all sources; the prompt's effect
shrunk by how many of its responses are known; both variances estimated a source. `given_survival` corrects for what a
response that runs on has survived.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtri_exp

from ...base.types import Prompt
from ..saved import SavedState, State
from .ridge import Level, features


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


_HISTORY = 0.5  # weight of an earlier epoch's responses beside those of the epoch after it
_FOLLOW = 1 / 1024  # of a response's deviation, by which the source's level moves: policies learn to answer longer
_CACHED = 1 << 16  # prompts whose features are kept


@dataclasses.dataclass(slots=True)
class _Known:
    """The responses seen of a prompt: of its latest draw, and in `past` what its earlier draws left."""

    draw: int
    count: float = 0.0  # responses of this draw; a censored one counts as far as it tells
    total: float = 0.0  # of their ln(length)
    fixed: float = 0.0  # the regression's value at the last of them
    past_count: float = 0.0  # responses of earlier draws, discounted
    past: float = 0.0  # their mean deviation from the regression of their time

    def add(self, y: float, weight: float, fixed: float) -> None:
        self.count += weight
        self.total += weight * y
        self.fixed = fixed

    def at(self, draw: int) -> _Known:
        """Returns what is known at this draw of the prompt: itself, or all of it as what earlier draws left."""
        if draw == self.draw:
            return self
        if not self.count:
            return _Known(draw, past_count=self.past_count, past=self.past)
        kept = _HISTORY * self.past_count
        count = kept + self.count
        past = (kept * self.past + self.total - self.count * self.fixed) / count
        return _Known(draw, past_count=count, past=past)


class LengthPredictor:
    """See the module's docstring. `limit`: tokens a response has at most (0: no limit)."""

    def __init__(self, limit: int = 0) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit} tokens; it must be at least 0")
        self.limit = limit
        self._pooled = Level()
        self._sources: dict[str, Level] = {}
        self._known: dict[tuple[str, str], _Known] = {}
        self._cache: dict[tuple[str, str], tuple[np.ndarray, Level, int, float, float]] = {}

    def predict(self, prompt: Prompt, running: int = 0) -> Prediction:
        """Predicts the length of a response to `prompt`, in tokens, given that it has `running` already and goes on."""
        return given_survival(*self._expected(prompt), running, self.limit)

    def ends_by(self, prompt: Prompt, tokens: int, running: int = 0) -> float:
        """Returns the probability that a response which has `running` tokens and goes on ends with at most `tokens`."""
        if 0 < self.limit <= tokens:
            return 1.0
        return ends_by(*self._expected(prompt), tokens, running)

    def _expected(self, prompt: Prompt) -> tuple[float, float]:
        """Returns mean and standard deviation of ln(length) of the prompt's next response."""
        level = self._sources.get(prompt.source, self._pooled)
        _, fixed, variance = self._regression(prompt, level)
        known = self._known.get((prompt.source, prompt.id))
        return _posterior(level, fixed, variance, known.at(prompt.draw) if known else _Known(prompt.draw))

    def observe(self, prompt: Prompt, length: int, finished: bool = True) -> None:
        """Enters a response of `length` tokens. Not `finished`: it was stopped with so many tokens (a censored
        observation: it would have been longer). A response that fills `limit` is taken for unfinished, too."""
        if length < 0:
            raise ValueError(f"prompt {prompt.source}/{prompt.id}: a response of {length} tokens")
        if prompt.source not in self._sources:
            self._sources[prompt.source] = Level(self._pooled)
        level, key = self._sources[prompt.source], (prompt.source, prompt.id)
        known = self._known[key] = self._known.get(key, _Known(prompt.draw)).at(prompt.draw)
        x, fixed, variance = self._regression(prompt, level)
        mu, sigma = _posterior(level, fixed, variance, known)
        n = known.count
        if finished and not 0 < self.limit <= length:
            expected = y = math.log(max(length, 1))
            weight = 1.0
            within = (y - known.total / n) ** 2 * n / (n + 1) if n else None
            residual = (y - fixed) ** 2
        else:
            tail = censored(mu, sigma, length)
            expected, y, weight = tail.mean, tail.working, tail.information
            within = level.within * ((expected - mu) ** 2 + tail.variance) / sigma**2 if n else None
            residual = (expected - fixed) ** 2 + tail.variance
        # What the regression does not know yet is no variance of the responses.
        residual *= (level.within + level.between) / (level.within + level.between + variance)
        known.add(y, weight, fixed)
        level.shift += _FOLLOW * (expected - mu)
        for regression in (self._pooled, level):
            regression.learn(x, y, weight, within, residual)

    def _regression(self, prompt: Prompt, level: Level) -> tuple[np.ndarray, float, float]:
        """Returns features, expected ln(length), and the variance of that expectation."""
        key = prompt.source, prompt.id
        cached = self._cache.get(key)
        if cached is not None and cached[1] is level and cached[2] == level.version:
            return cached[0], cached[3] + level.shift, cached[4]
        if cached is None and len(self._cache) >= _CACHED:
            self._cache.clear()
        x = features(prompt) if cached is None else cached[0]
        fixed, variance = float(level.weights @ x), float(x @ level.covariance @ x)
        self._cache[key] = x, level, level.version, fixed, variance
        return x, fixed + level.shift, variance

    def state_dict(self) -> State:
        """Leaves out the features, which are computed again when they are needed."""
        return {
            "pooled": self._pooled.state_dict(),
            "sources": {source: level.state_dict() for source, level in self._sources.items()},
            "prompts": [[*key, *dataclasses.astuple(known)] for key, known in self._known.items()],
        }

    def load_state_dict(self, state: SavedState) -> None:
        self._pooled.load_state_dict(state["pooled"])
        self._sources = {source: Level(self._pooled) for source in state["sources"]}
        for source, level in self._sources.items():
            level.load_state_dict(state["sources"][source])
        self._known = {(source, id): _Known(*rest) for source, id, *rest in state["prompts"]}
        self._cache = {}


def _posterior(level: Level, fixed: float, variance: float, known: _Known) -> tuple[float, float]:
    """Returns mean and standard deviation of ln(length) of the prompt's next response. Its effect has the prior
    N(fixed, between + variance)."""
    prior = level.between + variance
    precision = 1 / prior + (known.count + known.past_count) / level.within
    deviation = known.total - known.count * fixed + known.past_count * known.past
    return fixed + deviation / (level.within * precision), math.sqrt(level.within + 1 / precision)
