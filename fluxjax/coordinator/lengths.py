"""Predicts the length of a response, learning online from prompts, earlier epochs and other responses of the group.

Papers: Flux, insight 2 ("long-tail rollouts are predictable": prompt length, task, history, complexity); Flexes,
section 4.4, which projects KV-cache use by the prediction. The model of ln(tokens) of response j of prompt i is

    weights[source] . features(i) + effect(i) + noise(j),

with weights by ridge regression (`Level`). Each source's weights are shrunk towards the weights of all sources. A
prompt's effect is shrunk less if more of its responses were observed. The variances of effect and noise are estimated
for each source. `expected_tokens` conditions the prediction on the tokens that a running response already has.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib

import numpy as np
from scipy.special import erfcx, log_ndtr

from ..base.types import MediaKind, Prompt, SavedState, State

WORDS = 32  # features of hashed words: prompts that share words tend to have responses of similar lengths
_WORD = re.compile(r"[^\W\d_]+")
_DIGIT = re.compile(r"\d")
_MARK = re.compile(r"[\\^_={}()\[\]+*/<>$|-]")
_SOLVE_EVERY = 32  # responses between two solutions of the regression; fewer at first, more after thousands
# The number of later responses after which a response has lost most of its weight. The model thus follows the policy.
_MEMORY = 16_384
_TYPICAL = math.log(256)  # ln(tokens) of a response, before any observation
_VARIANCE = 0.6  # variance of ln(length) between prompts, and also within a prompt, before any observation
_STRENGTH = 16  # the number of observations that the prior variance counts as
_SMALLEST = 1e-4  # the least variance of ln(length)


def features(prompt: Prompt) -> np.ndarray:
    """Returns f64[FEATURES], roughly in [-2, 2]: an intercept; the logs of text length, words, digits and formula
    marks; the share of digits and marks; the logs of images and videos; then hashed words."""
    text = prompt.text
    words = _WORD.findall(text.lower())
    digits, marks = len(_DIGIT.findall(text)), len(_MARK.findall(text))
    images = sum(media.kind is MediaKind.IMAGE for media in prompt.media)
    x = np.zeros(FEATURES)
    length = max(len(text), 1)
    x[:_DENSE] = (
        1.0,
        math.log(length / 128),
        math.log((1 + len(words)) / 24),
        math.log1p(digits) - 1,
        math.log1p(marks) - 1,
        4 * (digits + marks) / length - 0.5,
        math.log1p(images),
        math.log1p(len(prompt.media) - images),
    )
    for word in set(words):
        code = zlib.crc32(word.encode())
        x[_DENSE + code % WORDS] += 1.0 if code & 0x10000 else -1.0
    return x


_DENSE = 8
FEATURES = _DENSE + WORDS


class Level:
    """A recursive ridge regression of ln(length) on `features`, with the variances of ln(length) `within` and `between`
    prompts. A level covers all sources, or one source; a source's `parent` is the level of all sources. Sufficient
    statistics are exact. Weights are solved for again after every few responses, over about the last `_MEMORY`."""

    def __init__(self, parent: Level | None = None) -> None:
        self._parent = parent
        # Standard deviations of the weights, in ln(tokens) per unit of the feature.
        intercept, dense, words = (2.0, 0.5, 0.05) if parent is None else (1.5, 0.3, 0.05)
        prior = np.array([intercept] + [dense] * (_DENSE - 1) + [words] * WORDS) ** 2
        self._precision = np.diag(1 / prior)  # the inverse prior variances of the weights
        self.gram = np.zeros((FEATURES, FEATURES))
        self.moment = np.zeros(FEATURES)
        # (x, y, weight) that `gram` and `moment` do not include yet
        self._pending: list[tuple[np.ndarray, float, float]] = []
        self.fresh = 0  # responses since the last solution
        self.responses = 0.0  # the number of responses; older responses count less
        self.weights = np.zeros(FEATURES)
        self.weights[0] = _TYPICAL
        self._start = self.weights.copy()
        self.covariance = np.diag(prior)
        self.version = 0  # grows by one at every solution
        self.within = self.between = _VARIANCE
        self.shift = 0.0  # recent change of ln(length) that the regression does not explain
        self.sums = [0.0] * 4  # squares within groups, their count, squared residuals, their count
        if parent is not None:
            self._settle()

    def learn(self, x: np.ndarray, y: float, weight: float, within: float | None, residual: float) -> None:
        """Enters a response with its squared deviation `within` its group (None for the first) and squared residual."""
        # Only the residual of a group's first response counts. The residuals of later responses are too small, since
        # the regression has learnt from the first response.
        if within is None:
            self.sums[2] += residual
            self.sums[3] += 1
        else:
            self.sums[0] += within
            self.sums[1] += 1
        self._pending.append((x, y, weight))
        self.fresh += 1
        self.responses += 1
        if self.fresh >= max(min(_SOLVE_EVERY, 1 + self.responses // 8), self.responses // 64):
            self._settle()

    def _settle(self) -> None:
        """Estimates variances and weights again, shrunk towards the parent's, or without a parent towards the prior."""
        parent, (squares, pairs, residuals, groups) = self._parent, self.sums
        within, between = (parent.within, parent.between) if parent else (_VARIANCE, _VARIANCE)
        total = (_STRENGTH * (within + between) + residuals) / (_STRENGTH + groups)
        within *= total / (within + between)
        self.within = max((_STRENGTH * within + squares) / (_STRENGTH + pairs), _SMALLEST)
        self.between = max(total - self.within, 0.02 * total, _SMALLEST)
        # Responses of one prompt share its effect, and count together like fewer independent responses.
        size = (pairs + groups) / max(groups, 1.0)
        self._solve(parent.weights if parent else self._start, self.within + size * self.between)
        kept = (1 - 1 / _MEMORY) ** self.fresh  # the factor on all observations so far
        self.gram *= kept
        self.moment *= kept
        self.responses *= kept
        self.sums = [kept * value for value in self.sums]
        self.fresh = 0
        self.version += 1

    def _solve(self, towards: np.ndarray, noise: float) -> None:
        """Solves for the weights, shrunk towards `towards`. `noise` is the effective variance of an observation."""
        if self._pending:  # one matrix product is much cheaper than many small ones
            rows, targets, weights = zip(*self._pending, strict=True)
            x, scale = np.array(rows), np.array(weights)
            scaled = scale[:, None] * x
            self.gram += scaled.T @ x
            self.moment += scaled.T @ np.array(targets)
            self._pending.clear()
        self.covariance = np.linalg.inv(self._precision + self.gram / noise)
        self.weights = towards + self.covariance @ ((self.moment - self.gram @ towards) / noise)

    def state_dict(self) -> State:
        regression: State = {name: getattr(self, name).tolist() for name in _ARRAYS}
        regression |= {name: getattr(self, name) for name in _COUNTS}
        regression["pending"] = [[x.tolist(), y, weight] for x, y, weight in self._pending]
        return {"fit": regression} | {name: getattr(self, name) for name in _VARIANCES}

    def load_state_dict(self, state: SavedState) -> None:
        regression = state["fit"]
        for name in _ARRAYS:
            setattr(self, name, np.array(regression[name], np.float64))
        for name in _COUNTS:
            setattr(self, name, regression[name])
        for name in _VARIANCES:
            setattr(self, name, state[name])
        self._pending = [(np.array(x, np.float64), y, weight) for x, y, weight in regression["pending"]]


_ARRAYS = ("gram", "moment", "weights", "covariance")
_COUNTS = ("fresh", "responses", "version")
_VARIANCES = ("within", "between", "shift", "sums")


def log_tail(z: float) -> float:
    """Returns ln P(Z > z) for a standard normal Z."""
    return float(log_ndtr(-z))


def expected_tokens(mu: float, sigma: float, running: int = 0, limit: int = 0) -> float:
    """Returns E[min(L, limit) | L > running] for ln L normal with mean `mu` and deviation `sigma`; 0 is no limit."""
    if limit and running >= limit:
        return float(running)
    start, end = _standard(mu, sigma, running), _standard(mu, sigma, limit) if limit else math.inf
    alive = log_tail(start)  # all probabilities below are conditional on L > running
    # E[L; L > x] is exp(mu + sigma^2 / 2) P(Z > z - sigma)
    beyond = log_tail(start - sigma)
    before_limit = math.exp(mu + 0.5 * sigma * sigma + beyond - alive) * -math.expm1(log_tail(end - sigma) - beyond)
    mean = before_limit + limit * math.exp(log_tail(end) - alive)
    return max(min(mean, float(limit)) if limit else mean, float(running))


def ends_by(mu: float, sigma: float, tokens: int, running: int = 0) -> float:
    """Returns P(L <= tokens | L > running), for the same L as `expected_tokens`."""
    if tokens <= running:
        return 0.0
    return -math.expm1(log_tail(_standard(mu, sigma, tokens)) - log_tail(_standard(mu, sigma, running)))


def _standard(mu: float, sigma: float, tokens: float) -> float:
    """Returns the distance of ln(tokens) from `mu` in units of `sigma`; -inf for 0 tokens."""
    return (math.log(tokens) - mu) / sigma if tokens else -math.inf


def censored(mu: float, sigma: float, tokens: int) -> tuple[float, float, float, float]:
    """Returns (working, information, mean, variance) for an unfinished response of `tokens` tokens, as the Tobit model
    sees it. The observation `working` of ln(length), with the weight `information`, moves an estimate of mu as the
    response does (one Newton step). A finished response has the weight 1; for few tokens the weight is nearly 0. `mean`
    and `variance` are the moments of ln(length), given the response."""
    z = (math.log(max(tokens, 1)) - mu) / sigma
    # Density(z) / P(Z > z), which is also E[Z | Z > z] (inverse Mills ratio).
    ratio = math.sqrt(2 / math.pi) / float(erfcx(z / math.sqrt(2)))
    ahead = ratio - z
    information = min(1.0, ratio * ahead)
    return mu + sigma / ahead, information, mu + sigma * ratio, sigma * sigma * max(0.0, 1 - ratio * ahead)


_HISTORY = 0.5  # weight of an earlier epoch's responses relative to the next epoch's
_FOLLOW = 1 / 1024  # share of a response's deviation that moves `Level.shift`: policies learn to answer longer
_REMEMBER = 0.99  # weight of earlier errors at each new response
_CACHED = 1 << 16  # prompts whose features are cached


@dataclasses.dataclass(slots=True)
class _SeenResponses:
    """The observed responses of a prompt: of its latest draw, and in `past` a summary of its earlier draws."""

    draw: int
    count: float = 0.0  # responses of this draw; a censored response counts by its information
    total: float = 0.0  # sum of ln(length) of these responses
    fixed: float = 0.0  # the regression's value at the last of these responses
    past_count: float = 0.0  # responses of earlier draws, discounted
    past: float = 0.0  # mean deviation of ln(length) of earlier draws from the regression of that time

    def at(self, draw: int) -> _SeenResponses:
        """Returns the observations as of this draw of the prompt. A later draw turns all into a summary."""
        if draw == self.draw:
            return self
        if not self.count:
            return _SeenResponses(draw, past_count=self.past_count, past=self.past)
        kept = _HISTORY * self.past_count
        count = kept + self.count
        past = (kept * self.past + self.total - self.count * self.fixed) / count
        return _SeenResponses(draw, past_count=count, past=past)


class LengthPredictor:
    """The predictor that the module's docstring describes. `limit`: the most tokens of a response (0: no limit).
    Observations since the last prediction are entered in the order of draws, not of arrival. Predictions do not depend
    on time, unless some predictions are made while responses run."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._wrong, self._right = 0.0, 1e-9  # tokens by which recent predictions were wrong, and tokens that came
        # (draw, sample, ...) of responses that are not entered yet
        self._observed: list[tuple[int, int, Prompt, int, bool]] = []
        self._pooled = Level()
        self._sources: dict[str, Level] = {}
        self._known: dict[tuple[str, str], _SeenResponses] = {}
        self._cache: dict[tuple[str, str], tuple[np.ndarray, Level, int, float, float]] = {}

    def predict(self, prompt: Prompt, running: int = 0) -> float:
        """Predicts the length in tokens of an entire response to `prompt` that has `running` tokens and goes on."""
        return expected_tokens(*self._expected(prompt), running, self.limit)

    @property
    def error(self) -> float:
        """The distance between recent predictions and lengths, as a share of the lengths; 0 without any."""
        return self._wrong / self._right

    def ends_by(self, prompt: Prompt, tokens: int, running: int = 0) -> float:
        """Returns the probability that a running response with `running` tokens ends with at most `tokens`."""
        if 0 < self.limit <= tokens:
            return 1.0
        return ends_by(*self._expected(prompt), tokens, running)

    def _expected(self, prompt: Prompt) -> tuple[float, float]:
        self._enter_observed()
        level = self._sources.get(prompt.source, self._pooled)
        _, fixed, variance = self._regression(prompt, level)
        known = self._known.get((prompt.source, prompt.id))
        return _posterior(level, fixed, variance, known.at(prompt.draw) if known else _SeenResponses(prompt.draw))

    def observe(self, prompt: Prompt, length: int, finished: bool = True, sample: int = 0) -> None:
        """Notes response number `sample` of a draw, with `length` tokens. A response that is not `finished` was stopped
        early, and counts as a censored observation. A response that fills `limit` counts as unfinished, too."""
        self._observed.append((prompt.draw, sample, prompt, length, finished))

    def _enter_observed(self) -> None:
        observed, self._observed = self._observed, []
        for _, _, prompt, length, finished in sorted(observed, key=lambda observation: observation[:2]):
            self._enter(prompt, length, finished)

    def _enter(self, prompt: Prompt, length: int, finished: bool) -> None:
        if prompt.source not in self._sources:
            self._sources[prompt.source] = Level(self._pooled)
        level, key = self._sources[prompt.source], (prompt.source, prompt.id)
        known = self._known[key] = self._known.get(key, _SeenResponses(prompt.draw)).at(prompt.draw)
        x, fixed, variance = self._regression(prompt, level)
        mu, sigma = _posterior(level, fixed, variance, known)
        n = known.count
        if finished:
            self._wrong = _REMEMBER * self._wrong + abs(expected_tokens(mu, sigma, 0, self.limit) - length)
            self._right = _REMEMBER * self._right + length
        if finished and not 0 < self.limit <= length:
            expected = y = math.log(max(length, 1))
            weight = 1.0
            within = (y - known.total / n) ** 2 * n / (n + 1) if n else None
            residual = (y - fixed) ** 2
        else:
            y, weight, expected, spread = censored(mu, sigma, length)
            within = level.within * ((expected - mu) ** 2 + spread) / sigma**2 if n else None
            residual = (expected - fixed) ** 2 + spread
        # The regression's own uncertainty is no variance of the responses.
        residual *= (level.within + level.between) / (level.within + level.between + variance)
        known.count, known.total, known.fixed = known.count + weight, known.total + weight * y, fixed
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
        """Returns the state without the features, which are computed again when needed."""
        self._enter_observed()
        return {
            "pooled": self._pooled.state_dict(),
            "sources": {source: level.state_dict() for source, level in self._sources.items()},
            "prompts": [[*key, *dataclasses.astuple(known)] for key, known in self._known.items()],
        }

    def load_state_dict(self, state: SavedState) -> None:
        self._observed = []
        self._pooled.load_state_dict(state["pooled"])
        self._sources = {source: Level(self._pooled) for source in state["sources"]}
        for source, level in self._sources.items():
            level.load_state_dict(state["sources"][source])
        self._known = {(source, id): _SeenResponses(*rest) for source, id, *rest in state["prompts"]}
        self._cache = {}


def _posterior(level: Level, fixed: float, variance: float, known: _SeenResponses) -> tuple[float, float]:
    """Returns mean and standard deviation of ln(length) of the prompt's next response. The prior of the prompt's mean
    is N(fixed, between + variance)."""
    prior = level.between + variance
    precision = 1 / prior + (known.count + known.past_count) / level.within
    deviation = known.total - known.count * fixed + known.past_count * known.past
    return fixed + deviation / (level.within * precision), math.sqrt(level.within + 1 / precision)
