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


def prior_variances(intercept: float, dense: float, words: float) -> np.ndarray:
    """Returns f64[FEATURES], from standard deviations of the weights in ln(tokens) a unit of the feature."""
    return np.array([intercept] + [dense] * (_DENSE - 1) + [words] * WORDS) ** 2


class LengthFit:
    """Recursive ridge regression of ln(length) on `features`, shrunk towards given weights.

    Sufficient statistics are exact; weights are solved for again after every few responses. Older responses count
    less: `memory` is how many responses the fit looks back.
    """

    def __init__(self, prior: np.ndarray, memory: int) -> None:
        self._precision = np.diag(1 / prior)  # of the weights before any response
        self._keep = 1 - 1 / memory
        self._gram = np.zeros((FEATURES, FEATURES))
        self._moment = np.zeros(FEATURES)
        self._pending: list[tuple[np.ndarray, float, float]] = []  # (x, y, weight), not yet in the two above
        self._fresh = 0  # responses since the last solution
        self.responses = 0.0  # with older ones discounted
        self.weights = np.zeros(FEATURES)
        self.covariance = np.diag(prior)
        self.version = 0  # grows with every solution

    def add(self, x: np.ndarray, y: float, weight: float) -> bool:
        """Enters a response. Returns whether weights should be solved for now."""
        self._pending.append((x, y, weight))
        self._fresh += 1
        self.responses += 1
        return self._fresh >= max(min(_SOLVE_EVERY, 1 + self.responses // 8), self.responses // 64)

    def solve(self, towards: np.ndarray, noise: float) -> float:
        """Solves for the weights, shrunk towards `towards`; `noise` is the variance of ln(length) of a response.
        Returns the weight that everything entered before has from now on."""
        self._enter()
        self.covariance = np.linalg.inv(self._precision + self._gram / noise)
        self.weights = towards + self.covariance @ ((self._moment - self._gram @ towards) / noise)
        keep = self._keep**self._fresh
        self._gram *= keep
        self._moment *= keep
        self.responses *= keep
        self._fresh = 0
        self.version += 1
        return keep

    def _enter(self) -> None:
        """Enters all pending responses together: one product of matrices is much cheaper than many small ones."""
        if self._pending:
            rows, targets, weights = zip(*self._pending, strict=True)
            x, scale = np.array(rows), np.array(weights)
            scaled = scale[:, None] * x
            self._gram += scaled.T @ x
            self._moment += scaled.T @ np.array(targets)
            self._pending.clear()

    def state_dict(self) -> State:
        return {
            "gram": self._gram.tolist(),
            "moment": self._moment.tolist(),
            "pending": [[x.tolist(), y, weight] for x, y, weight in self._pending],
            "fresh": self._fresh,
            "responses": self.responses,
            "weights": self.weights.tolist(),
            "covariance": self.covariance.tolist(),
            "version": self.version,
        }

    def load_state_dict(self, state: SavedState) -> None:
        self._gram = np.array(state["gram"], np.float64)
        self._moment = np.array(state["moment"], np.float64)
        pending = state.get("pending", [])  # not in checkpoints of earlier releases
        self._pending = [(np.array(x, np.float64), y, weight) for x, y, weight in pending]
        self._fresh = state["fresh"]
        self.responses = state["responses"]
        self.weights = np.array(state["weights"], np.float64)
        self.covariance = np.array(state["covariance"], np.float64)
        self.version = state["version"]
