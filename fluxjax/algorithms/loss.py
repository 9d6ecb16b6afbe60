"""The terms that policy losses are made of, and the weights that turn token losses into a step's mean."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..config import LossAggregation


def response_weights(lengths: np.ndarray, aggregation: LossAggregation, max_new_tokens: int) -> np.ndarray:
    """The loss weight of each token of response `i` of a step, so that the step's loss is a plain weighted sum.

    `lengths` (int, one entry a response of the *whole* step) are tokens. With N responses of lengths |o_i|:

    - token mean: `1 / sum_j |o_j|` (DAPO, arXiv:2503.14476, equation 8);
    - sequence mean: `1 / (N |o_i|)` (GRPO, DeepSeekMath, arXiv:2402.03300, equation 3), N without empty responses;
    - constant: `1 / (N max_new_tokens)` (Dr.GRPO, arXiv:2503.20783, section 3.2: no bias towards short answers).
    """
    divisor = normaliser(lengths, aggregation, max_new_tokens)
    if not np.any(lengths):
        raise ValueError("no response of this step has a token: there is nothing to train on")
    if aggregation is LossAggregation.SEQUENCE_MEAN:
        return (1.0 / (divisor * np.maximum(np.asarray(lengths, np.int64), 1))).astype(np.float32)
    return np.full(len(lengths), 1.0 / divisor).astype(np.float32)


def normaliser(lengths: np.ndarray, aggregation: LossAggregation, max_new_tokens: int) -> int:
    """Returns the divisor of `response_weights`, which depends on more than the response itself: tokens of the step,
    or responses. It adds over parts of a step; 0 if there is nothing to train on."""
    lengths = np.asarray(lengths, np.int64)
    if aggregation is LossAggregation.TOKEN_MEAN:
        return int(lengths.sum())
    if aggregation is LossAggregation.SEQUENCE_MEAN:
        return int(np.count_nonzero(lengths))
    return len(lengths) * max_new_tokens


def masked(values_BT: Float[Array, "B T"], trained_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Zero, with zero gradient, where a token is not trained on.

    Apply it *before* any exponential: log-probs at untrained tokens are arbitrary, and `inf * 0` is NaN.
    """
    return jnp.where(trained_BT, values_BT, 0.0)


def clipped_surrogate(
    ratio_BT: Float[Array, "B T"], advantages_BT: Float[Array, "B T"], clip_low: float, clip_high: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """PPO's pessimistic objective `min(r A, clip(r, 1 - low, 1 + high) A)` (arXiv:1707.06347, equation 7).

    Different bounds are DAPO's clip-higher (arXiv:2503.14476, equation 8). Also returns 1.0 where the bound cuts
    the gradient off, else 0.0.
    """
    clipped_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    objective_BT = jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    above = (advantages_BT > 0.0) & (ratio_BT > 1.0 + clip_high)
    below = (advantages_BT < 0.0) & (ratio_BT < 1.0 - clip_low)
    return objective_BT, (above | below).astype(ratio_BT.dtype)


def k3(log_ratio_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """The estimator `exp(d) - d - 1` of KL(p || q) for tokens drawn from p, with `d = log q - log p`.

    Unbiased and never negative (Schulman, "Approximating KL Divergence", 2020; GRPO's equation 4 has q = reference).
    """
    return jnp.expm1(log_ratio_BT) - log_ratio_BT
