"""The forms that measured times are fitted to: non-negative coefficients, least squares of relative errors."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from .tables import ModelSizes

Number = int | float | np.integer | np.floating | np.ndarray


class CostError(ValueError):
    """A time that cannot be told, measured values that cannot be fitted, or a file that is no cost model."""


@dataclasses.dataclass(frozen=True)
class AttentionFit:
    """Seconds of one forward attention launch: `per_square * sum L^2 + per_token * sum L` for each channel (a query
    head's components; heads times head size), plus `per_launch`."""

    per_square: float
    per_token: float
    per_launch: float

    def seconds(self, squares: Number, tokens: Number, channels: Number) -> Number:
        """The seconds without the launch. `squares` is the sum of squared lengths."""
        return channels * (self.per_square * squares + self.per_token * tokens)


@dataclasses.dataclass(frozen=True)
class Link:
    """Seconds of an all-to-all: `alpha + sent * (per_byte + congestion * flying)`.

    `sent` are the bytes that a device sends over this link, `flying` those that are under way in its whole group at
    once: what makes long sequences slower than in proportion.
    """

    alpha: float
    per_byte: float
    congestion: float

    def seconds(self, sent: Number, flying: Number) -> Number:
        return self.alpha + sent * (self.per_byte + self.congestion * flying)


def link_bytes(model: ModelSizes, tokens: Number, degree: int, node: int) -> tuple[Number, Number]:
    """Returns (sent, flying) of both all-to-alls of an attention over `tokens` tokens: the bytes that a device sends to
    the others of its group (in a group wider than a node, to other nodes: the rest is faster and at the same time), and
    the bytes that all devices of the group send to each other."""
    total = model.wire_bytes(degree) * tokens
    receivers = degree - node if degree > node else degree - 1
    return total * receivers / degree**2, total * (degree - 1) / degree


def fit_attention(runs: Mapping[tuple[int, int], float], model: ModelSizes) -> AttentionFit:
    """Fits `{(sequences, tokens of each): seconds}` of one layer of `model`.

    If the total of tokens is the same everywhere, `per_token` and `per_launch` can't be told apart, and all of it goes
    to the tokens. Raises CostError for less than two measurements.
    """
    if len(runs) < 2:
        raise CostError(f"attention needs at least two measurements, got {len(runs)}")
    count, length = np.array(list(runs), float).T
    tokens, channels = count * length, model.heads * model.head_size
    columns = [channels * count * length**2, channels * tokens]
    if np.ptp(tokens) > 0:
        columns.append(np.ones_like(tokens))
    found = non_negative(np.stack(columns, axis=1), np.array(list(runs.values())))
    return AttentionFit(float(found[0]), float(found[1]), float(found[2]) if len(found) > 2 else 0.0)


def fit_link(
    runs: Mapping[tuple[int, int], float], model: ModelSizes, node: int, most_alpha: float | None = None
) -> Link:
    """Fits `{(degree, tokens): seconds}`, all within a node or all beyond.

    `most_alpha` bounds `alpha`: where nothing short was measured, a free fit gives it milliseconds that no start of a
    collective takes and that would rule all short sequences. Raises CostError for less than two measurements.
    """
    if len(runs) < 2:
        raise CostError(f"an all-to-all needs at least two measurements, got {len(runs)}")
    sent, flying = np.array([link_bytes(model, tokens, degree, node) for degree, tokens in runs]).T
    seconds = np.array(list(runs.values()))
    columns = np.stack([np.ones_like(sent), sent, sent * flying], axis=1)
    found = non_negative(columns, seconds)
    if most_alpha is not None and found[0] > most_alpha:  # convex: then the bound is where the best lies
        rest = non_negative(columns[:, 1:], seconds - most_alpha, weights=1 / seconds)
        found = np.array([most_alpha, *rest])
    return Link(*map(float, found))


def non_negative(columns: np.ndarray, seconds: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Finds the coefficients `[columns]` of at least 0 with the least sum of squared relative errors (or weighted by
    `weights`). Raises CostError for times that are not positive and finite."""
    from scipy.optimize import nnls  # takes half a second to import, and most users of a cost model fit nothing

    weights = 1 / seconds if weights is None else weights
    if not np.isfinite(seconds).all() or not np.isfinite(weights).all() or (weights <= 0).any():
        raise CostError(f"measured seconds must be positive and finite, got {seconds.tolist()}")
    scale = np.abs(columns).max(axis=0)
    coefficients, _ = nnls(columns / scale * weights[:, None], seconds * weights)
    return coefficients / scale


def goodness(measured: Sequence[float], fitted: Sequence[float]) -> dict[str, int | float]:
    """Computes `r2` of the seconds, and the worst and mean relative error."""
    seconds, guess = np.array(measured), np.array(fitted)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    relative = np.abs(guess / seconds - 1)
    return {
        "measurements": len(seconds),
        "r2": round(1 - float(((guess - seconds) ** 2).sum()) / spread, 4) if spread else 0.0,
        "worst_relative_error": round(float(relative.max()), 4),
        "mean_relative_error": round(float(relative.mean()), 4),
    }
