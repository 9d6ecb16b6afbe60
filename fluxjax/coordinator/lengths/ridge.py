"""Features of a prompt that tell how long its answers get, and a ridge regression that learns from each response."""

from __future__ import annotations

import math
import re
import zlib

import numpy as np

from ...base.types import MediaKind, Prompt
from ..saved import SavedState, State

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
        pending = regression.get("pending", [])  # not in checkpoints of earlier releases
        self._pending = [(np.array(x, np.float64), y, weight) for x, y, weight in pending]


_ARRAYS = ("gram", "moment", "weights", "covariance")
_COUNTS = ("fresh", "responses", "version")
_VARIANCES = ("within", "between", "shift", "sums")
