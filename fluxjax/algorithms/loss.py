"""The terms that policy losses are made of, and the weights that turn token losses into a step's mean."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..base.types import TrainBatch
from ..config import AlgorithmConfig, KlEstimator, LossAggregation


def response_weights(lengths: np.ndarray, aggregation: LossAggregation, max_new_tokens: int) -> np.ndarray:
    """Returns the loss weight of each token of response `i` of a step, so that the step's loss is a weighted sum.

    `lengths` (int, one entry for each response of the *entire* step) are tokens. With N responses of lengths |o_i|:

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
    """Returns the factor of `response_weights`' divisor that is common to all responses: tokens of the step, or
    responses. The factor of a step is the sum of its parts' factors; 0 if there is nothing to train on."""
    lengths = np.asarray(lengths, np.int64)
    if aggregation is LossAggregation.TOKEN_MEAN:
        return int(lengths.sum())
    if aggregation is LossAggregation.SEQUENCE_MEAN:
        return int(np.count_nonzero(lengths))
    return len(lengths) * max_new_tokens


def masked(values_BT: Float[Array, "B T"], trained_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Sets the value of a token that is not trained on to zero, with zero gradient.

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


def dual_clipped(
    objective_BT: Float[Array, "B T"], ratio_BT: Float[Array, "B T"], advantages_BT: Float[Array, "B T"], bound: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns `max(objective, c A)` where A < 0 (Ye et al., arXiv:1912.09729, equation 5). PPO's minimum has no lower
    bound: one stale token with a negative advantage and a large ratio could outweigh a step.

    Also returns 1.0 where `c` (`bound`, above 1) cuts the gradient off, else 0.0.
    """
    beyond_BT = (advantages_BT < 0.0) & (ratio_BT > bound)
    return jnp.where(beyond_BT, bound * advantages_BT, objective_BT), beyond_BT.astype(ratio_BT.dtype)


def k3(log_ratio: Any) -> Any:
    """Returns the estimator `exp(d) - d - 1` of KL(p || q) for tokens drawn from p, with `d = log q - log p`.

    It is unbiased and never negative (Schulman, "Approximating KL Divergence", 2020; GRPO's equation 4 has q =
    reference).
    """
    return log_ratio.__array_namespace__().expm1(log_ratio) - log_ratio


def kl_estimate(log_ratio: Any, estimator: KlEstimator) -> Any:
    """Estimates, in numpy or JAX arrays, KL(p || q) for tokens drawn from p, with `d = log q - log p` (Schulman,
    "Approximating KL Divergence", 2020).

    k1 = -d: unbiased, of either sign; as a loss it has no gradient on average, so it is for rewards. k2 = d**2 / 2:
    biased, but as a loss its gradient is that of KL(p || q), on-policy. k3: see `k3`.
    """
    if estimator is KlEstimator.K1:
        return -log_ratio
    return 0.5 * log_ratio**2 if estimator is KlEstimator.K2 else k3(log_ratio)


def regularised(
    loss_BT: Float[Array, "B T"],
    metrics: dict[str, Float[Array, "B T"]],
    logprobs_BT: Float[Array, "B T"],
    entropies_BT: Float[Array, "B T"],
    batch: TrainBatch,
    cfg: AlgorithmConfig,
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
    """Returns `loss - entropy_coefficient * entropy + kl_coefficient * KL(policy || reference)` for tokens that are
    trained on, else 0. The loss has no KL term if the reward has it. The further metric `reference_kl` is the estimated
    KL in nats."""
    trained_BT = batch.loss_weights_BT != 0.0
    loss_BT = masked(loss_BT, trained_BT)
    if cfg.entropy_coefficient > 0.0:
        loss_BT = loss_BT - cfg.entropy_coefficient * masked(entropies_BT, trained_BT)
    if cfg.kl_coefficient > 0.0:
        behind_BT = masked(batch.reference_logprobs_BT - logprobs_BT, trained_BT)
        reference_kl_BT = kl_estimate(behind_BT, cfg.kl_estimator)
        metrics = metrics | {"reference_kl": reference_kl_BT}
        if not cfg.kl_in_reward:
            loss_BT = loss_BT + cfg.kl_coefficient * reference_kl_BT
    return loss_BT, metrics
