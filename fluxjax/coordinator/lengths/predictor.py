"""How long a response will get, learnt online from prompts, from earlier epochs and from the rest of its group.

Flux, insight 2 ("long-tail rollouts are predictable": prompt length, task, history, complexity); Flexes section 4.4
projects KV-cache use with it. ln(tokens) of response j of prompt i is modelled as

    weights[source] . features(i) + effect(i) + noise(j),

weights by ridge regression (`ridge.py`), each source's shrunk towards those of all sources; the prompt's effect
shrunk by how many of its responses are known; both variances estimated a source. The rest is `survival.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...base.types import Prompt
from ..saved import SavedState, State
from .ridge import LengthFit, features, prior_variances
from .survival import Prediction, censored, ends_by, given_survival

__all__ = ["LengthPredictor", "Prediction"]

_TYPICAL = math.log(256)  # tokens, before anything was seen
_POOLED = prior_variances(2.0, 0.5, 0.05)
_SOURCE = prior_variances(1.5, 0.3, 0.05)
_VARIANCE = 0.6  # of ln(length), between prompts and again within one, before anything was seen
_STRENGTH = 16  # observations that this counts like
_SMALLEST = 1e-4  # variance of ln(length): lengths that follow from the prompt still differ by rounding
_HISTORY = 0.5  # weight of an earlier epoch's responses beside those of the epoch after it
_FOLLOW = 1 / 1024  # of a response's deviation, by which the source's level moves: policies learn to answer longer
_CACHED = 1 << 16  # prompts whose features are kept


class _Level:
    """A regression with its two variances of ln(length): for one source, or for all of them."""

    def __init__(self, prior: np.ndarray, memory: int) -> None:
        self.fit = LengthFit(prior, memory)
        self.within = self.between = _VARIANCE
        self.shift = 0.0  # of ln(length) lately, beside the regression
        self.sums = [0.0] * 4  # squares within groups and how many, squares of residuals and how many (groups)

    def learn(self, x: np.ndarray, y: float, weight: float, within: float | None, residual: float) -> bool:
        """Enters a response with its squared deviation from its group (None: it is the group's first) and from the
        regression. Returns whether to settle now."""
        if within is None:  # the fit knows the group of the others, so that their residuals are too small
            self.sums[2] += residual
            self.sums[3] += 1
        else:
            self.sums[0] += within
            self.sums[1] += 1
        return self.fit.add(x, y, weight)

    def settle(self, parent: _Level | None, towards: np.ndarray) -> None:
        """Estimates everything anew, shrunk towards the parent's variances and the weights given."""
        squares, pairs, residuals, groups = self.sums
        within, between = (parent.within, parent.between) if parent else (_VARIANCE, _VARIANCE)
        total = (_STRENGTH * (within + between) + residuals) / (_STRENGTH + groups)
        within *= total / (within + between)
        self.within = max((_STRENGTH * within + squares) / (_STRENGTH + pairs), _SMALLEST)
        self.between = max(total - self.within, 0.02 * total, _SMALLEST)
        # Responses of one prompt share its effect: together they count like fewer independent ones.
        size = (pairs + groups) / max(groups, 1.0)
        kept = self.fit.solve(towards, self.within + size * self.between)
        self.sums = [kept * value for value in self.sums]

    def state_dict(self) -> State:
        return {
            "fit": self.fit.state_dict(),
            "within": self.within,
            "between": self.between,
            "shift": self.shift,
            "sums": self.sums,
        }

    def load_state_dict(self, state: SavedState) -> None:
        self.fit.load_state_dict(state["fit"])
        self.within, self.between, self.shift = state["within"], state["between"], state["shift"]
        self.sums = list(state["sums"])


class _Known:
    """The responses seen of a prompt: of its latest draw, and in `past` what its earlier draws left."""

    __slots__ = ("count", "draw", "fixed", "past", "past_count", "total")

    def __init__(
        self,
        draw: int,
        count: float = 0.0,  # responses of this draw; a censored one counts as far as it tells
        total: float = 0.0,  # of their ln(length)
        fixed: float = 0.0,  # the regression's value at the last of them
        past_count: float = 0.0,  # responses of earlier draws, discounted
        past: float = 0.0,  # their mean deviation from the regression of their time
    ) -> None:
        self.draw, self.count, self.total, self.fixed = draw, count, total, fixed
        self.past_count, self.past = past_count, past

    def add(self, y: float, weight: float, fixed: float) -> None:
        self.count += weight
        self.total += weight * y
        self.fixed = fixed

    def current(self, draw: int) -> tuple[float, float]:
        return (self.count, self.total) if draw == self.draw else (0.0, 0.0)

    def earlier(self, draw: int) -> tuple[float, float]:
        """Returns count and mean deviation of what was seen before this draw."""
        if draw == self.draw or not self.count:
            return self.past_count, self.past
        kept = _HISTORY * self.past_count
        count = kept + self.count
        return count, (kept * self.past + self.total - self.count * self.fixed) / count

    def begin(self, draw: int) -> None:
        self.past_count, self.past = self.earlier(draw)
        self.draw, self.count, self.total = draw, 0.0, 0.0

    def state(self) -> list[int | float]:
        return [self.draw, self.count, self.total, self.fixed, self.past_count, self.past]


_UNKNOWN = _Known(-1)


class LengthPredictor:
    """See the module's docstring. `limit`: tokens a response has at most (0: no limit); `memory`: responses of a
    source after which older ones have lost most of their weight, so that the model follows the policy."""

    def __init__(self, limit: int = 0, memory: int = 16_384) -> None:
        if limit < 0 or memory < 1:
            raise ValueError(f"limit is {limit} and memory {memory} tokens; they must be at least 0 and 1")
        self.limit = limit
        self._memory = memory
        self._pooled = _Level(_POOLED, memory)
        self._pooled.fit.weights[0] = _TYPICAL
        self._start = self._pooled.fit.weights.copy()
        self._sources: dict[str, _Level] = {}
        self._known: dict[tuple[str, str], _Known] = {}
        self._cache: dict[tuple[str, str], tuple[np.ndarray, _Level, int, float, float]] = {}

    def predict(self, prompt: Prompt, done: Sequence[int] = (), running: int = 0) -> Prediction:
        """Predicts the length of a response to `prompt`, in tokens.

        `done`: lengths of the group's finished responses; empty: those observed for this draw of the prompt.
        `running`: tokens that the response has already; the prediction is conditional on its going on.
        """
        level = self._sources.get(prompt.source, self._pooled)
        _, fixed, variance = self._regression(prompt, level)
        known = self._known.get((prompt.source, prompt.id), _UNKNOWN)
        if not done:
            count, total = known.current(prompt.draw)
        else:
            first = math.sqrt(level.between + variance + level.within)
            count = total = 0.0
            for tokens in done:
                y, weight = math.log(max(tokens, 1)), 1.0
                if self.limit and tokens >= self.limit:
                    tail = censored(fixed, first, tokens)
                    y, weight = tail.working, tail.information
                count, total = count + weight, total + weight * y
        mu, sigma = _posterior(level, fixed, variance, count, total, *known.earlier(prompt.draw))
        return given_survival(mu, sigma, running, self.limit)

    def ends_by(self, prompt: Prompt, tokens: int, running: int = 0) -> float:
        """Returns the probability that a response which has `running` tokens and goes on ends with at most `tokens`."""
        if 0 < self.limit <= tokens:
            return 1.0
        level = self._sources.get(prompt.source, self._pooled)
        _, fixed, variance = self._regression(prompt, level)
        known = self._known.get((prompt.source, prompt.id), _UNKNOWN)
        mu, sigma = _posterior(level, fixed, variance, *known.current(prompt.draw), *known.earlier(prompt.draw))
        return ends_by(mu, sigma, tokens, running)

    def observe(self, prompt: Prompt, length: int, finished: bool = True) -> None:
        """Enters a response of `length` tokens. Not `finished`: it was stopped with so many tokens (a censored
        observation: it would have been longer). A response that fills `limit` is taken for unfinished, too."""
        if length < 0:
            raise ValueError(f"prompt {prompt.source}/{prompt.id}: a response of {length} tokens")
        level = self._level(prompt.source)
        known = self._known.setdefault((prompt.source, prompt.id), _Known(prompt.draw))
        x, fixed, variance = self._regression(prompt, level)
        if known.draw != prompt.draw:
            known.begin(prompt.draw)
        n = known.count
        mu, sigma = _posterior(level, fixed, variance, n, known.total, known.past_count, known.past)
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
        if self._pooled.learn(x, y, weight, within, residual):
            self._pooled.settle(None, self._start)
        if level.learn(x, y, weight, within, residual):
            level.settle(self._pooled, self._pooled.fit.weights)

    def _level(self, source: str) -> _Level:
        level = self._sources.get(source)
        if level is None:
            level = self._sources[source] = _Level(_SOURCE, self._memory)
            level.settle(self._pooled, self._pooled.fit.weights)
        return level

    def _regression(self, prompt: Prompt, level: _Level) -> tuple[np.ndarray, float, float]:
        """Returns features, expected ln(length), and the variance of that expectation."""
        key = prompt.source, prompt.id
        cached = self._cache.get(key)
        if cached is not None and cached[1] is level and cached[2] == level.fit.version:
            return cached[0], cached[3] + level.shift, cached[4]
        if cached is None and len(self._cache) >= _CACHED:
            self._cache.clear()
        x = features(prompt) if cached is None else cached[0]
        fixed, variance = float(level.fit.weights @ x), float(x @ level.fit.covariance @ x)
        self._cache[key] = x, level, level.fit.version, fixed, variance
        return x, fixed + level.shift, variance

    def state_dict(self) -> State:
        """Leaves out the features, which are computed again when they are needed."""
        return {
            "pooled": self._pooled.state_dict(),
            "sources": {source: level.state_dict() for source, level in self._sources.items()},
            "prompts": [[*key, *known.state()] for key, known in self._known.items()],
        }

    def load_state_dict(self, state: SavedState) -> None:
        self._pooled.load_state_dict(state["pooled"])
        self._sources = {source: _Level(_SOURCE, self._memory) for source in state["sources"]}
        for source, level in self._sources.items():
            level.load_state_dict(state["sources"][source])
        self._known = {(source, id): _Known(*rest) for source, id, *rest in state["prompts"]}
        self._cache = {}


def _posterior(
    level: _Level, fixed: float, variance: float, count: float, total: float, past_count: float, past: float
) -> tuple[float, float]:
    """Returns mean and standard deviation of ln(length) of the prompt's next response. Its effect has the prior
    N(fixed, between + variance); `count` responses sum to `total`, `past_count` earlier ones deviate by `past`."""
    prior = level.between + variance
    precision = 1 / prior + (count + past_count) / level.within
    effect = (total - count * fixed + past_count * past) / (level.within * precision)
    return fixed + effect, math.sqrt(level.within + 1 / precision)
