"""Predicts how long a response will get, learning online from prompts, from earlier epochs and the rest of its group.

Flux, insight 2 ("long-tail rollouts are predictable": prompt length, task, history, complexity); Flexes section 4.4
projects KV-cache use with it. ln(tokens) of response j of prompt i is modelled as

    weights[source] . features(i) + effect(i) + noise(j),

weights by ridge regression (`Level`), each source's shrunk towards those of all sources; the prompt's effect
shrunk by how many of its responses are known; both variances estimated a source. `given_survival` corrects for what a
response that runs on has survived.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtri_exp

from ..base.types import MediaKind, Prompt
from .saved import SavedState, State

WORDS = 32  # hashed words: prompts that share words are similar, and so are their lengths
_WORD = re.compile(r"[^\W\d_]+")
_DIGIT = re.compile(r"\d")
_MARK = re.compile(r"[\\^_={}()\[\]+*/<>$|-]")
_SOLVE_EVERY = 32  # responses between two solutions, more of them when thousands are known
_MEMORY = 16_384  # responses after which older ones have lost most of their weight: the model follows the policy
_TYPICAL = math.log(256)  # tokens, before anything was seen
_VARIANCE = 0.6  # of ln(length), between prompts and again within one, before anything was seen
_STRENGTH = 16  # observations that this counts like
_SMALLEST = 1e-4  # variance of ln(length): lengths that follow from the prompt still differ by rounding


def features(prompt: Prompt) -> np.ndarray:
    """Returns f64[FEATURES], roughly in [-2, 2]: intercept, logs of text length, of words, digits and formula marks,
    counts of images and videos, then hashed words."""
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


def _prior_variances(intercept: float, dense: float, words: float) -> np.ndarray:
    """Returns f64[FEATURES], from standard deviations of the weights in ln(tokens) a unit of the feature."""
    return np.array([intercept] + [dense] * (_DENSE - 1) + [words] * WORDS) ** 2


class Level:
    """A recursive ridge regression of ln(length) on `features`, with the variances of ln(length) `within` prompts and
    `between` them: for all sources together, or for one, shrunk towards its `parent`, that of all.

    Sufficient statistics are exact; weights are solved for again after every few responses. Older responses count
    less: `_MEMORY` is how many responses the regression looks back.
    """

    def __init__(self, parent: Level | None = None) -> None:
        self._parent = parent
        prior = _prior_variances(2.0, 0.5, 0.05) if parent is None else _prior_variances(1.5, 0.3, 0.05)
        self._precision = np.diag(1 / prior)  # of the weights before any response
        self.gram = np.zeros((FEATURES, FEATURES))
        self.moment = np.zeros(FEATURES)
        self._pending: list[tuple[np.ndarray, float, float]] = []  # (x, y, weight), not yet in the two above
        self.fresh = 0  # responses since the last solution
        self.responses = 0.0  # with older ones discounted
        self.weights = np.zeros(FEATURES)
        self.weights[0] = _TYPICAL
        self._start = self.weights.copy()
        self.covariance = np.diag(prior)
        self.version = 0  # grows with every solution
        self.within = self.between = _VARIANCE
        self.shift = 0.0  # of ln(length) lately, beside the regression
        self.sums = [0.0] * 4  # squares within groups and how many, squares of residuals and how many (groups)
        if parent is not None:
            self._settle()

    def learn(self, x: np.ndarray, y: float, weight: float, within: float | None, residual: float) -> None:
        """Enters a response with its squared deviation from its group (None: it is the group's first) and from the
        regression."""
        if within is None:  # the regression knows the group of the others, so that their residuals are too small
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
        """Estimates everything anew, shrunk towards the parent's variances and weights."""
        parent, (squares, pairs, residuals, groups) = self._parent, self.sums
        within, between = (parent.within, parent.between) if parent else (_VARIANCE, _VARIANCE)
        total = (_STRENGTH * (within + between) + residuals) / (_STRENGTH + groups)
        within *= total / (within + between)
        self.within = max((_STRENGTH * within + squares) / (_STRENGTH + pairs), _SMALLEST)
        self.between = max(total - self.within, 0.02 * total, _SMALLEST)
        # Responses of one prompt share its effect: together they count like fewer independent ones.
        size = (pairs + groups) / max(groups, 1.0)
        self._solve(parent.weights if parent else self._start, self.within + size * self.between)
        kept = (1 - 1 / _MEMORY) ** self.fresh  # the weight that everything entered so far has from now on
        self.gram *= kept
        self.moment *= kept
        self.responses *= kept
        self.sums = [kept * value for value in self.sums]
        self.fresh = 0
        self.version += 1

    def _solve(self, towards: np.ndarray, noise: float) -> None:
        """Solves for the weights, shrunk towards `towards`; `noise` is the variance of ln(length) of a response."""
        if self._pending:  # all together: one product of matrices is much cheaper than many small ones
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
class _SeenResponses:
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

    def at(self, draw: int) -> _SeenResponses:
        """Returns what is known at this draw of the prompt: itself, or all of it as what earlier draws left."""
        if draw == self.draw:
            return self
        if not self.count:
            return _SeenResponses(draw, past_count=self.past_count, past=self.past)
        kept = _HISTORY * self.past_count
        count = kept + self.count
        past = (kept * self.past + self.total - self.count * self.fixed) / count
        return _SeenResponses(draw, past_count=count, past=past)


class LengthPredictor:
    """See the module's docstring. `limit`: tokens a response has at most (0: no limit).

    What came since the last prediction is entered in the order of draws, whoever ended first: where nothing is asked
    while responses run, predictions do not depend on time.
    """

    def __init__(self, limit: int = 0) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit} tokens; it must be at least 0")
        self.limit = limit
        self._observed: list[tuple[int, int, Prompt, int, bool]] = []  # from draw and sample on; not entered yet
        self._pooled = Level()
        self._sources: dict[str, Level] = {}
        self._known: dict[tuple[str, str], _SeenResponses] = {}
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
        self._enter_observed()
        level = self._sources.get(prompt.source, self._pooled)
        _, fixed, variance = self._regression(prompt, level)
        known = self._known.get((prompt.source, prompt.id))
        return _posterior(level, fixed, variance, known.at(prompt.draw) if known else _SeenResponses(prompt.draw))

    def observe(self, prompt: Prompt, length: int, finished: bool = True, sample: int = 0) -> None:
        """Enters a response of `length` tokens, the `sample`-th of its draw. Not `finished`: it was stopped with so
        many tokens (a censored observation: it would have been longer). A response that fills `limit` is taken for
        unfinished, too."""
        if length < 0:
            raise ValueError(f"prompt {prompt.source}/{prompt.id}: a response of {length} tokens")
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
    """Returns mean and standard deviation of ln(length) of the prompt's next response. Its effect has the prior
    N(fixed, between + variance)."""
    prior = level.between + variance
    precision = 1 / prior + (known.count + known.past_count) / level.within
    deviation = known.total - known.count * fixed + known.past_count * known.past
    return fixed + deviation / (level.within * precision), math.sqrt(level.within + 1 / precision)
