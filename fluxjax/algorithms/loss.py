"""The terms of policy losses, and the weights that turn token losses into a step's mean.

One term corrects for every difference between the policy that generated a token and the policy in training. Such
differences come from stale weights, responses of several versions, replay, and an engine that rounds differently. In
every case, a behaviour policy sampled the tokens, each under a weight version. So each token has a weight (Flux,
component 3)

    w = C(proximal / behaviour) * decay**lag

The proximal policy is the trainer's at the start of the training step. If that step has one optimizer step,
proximal log-probs are the policy's, as constants. Otherwise they are in `TrainBatch.proximal_logprobs_BT`.
`lag` counts the versions (training steps) since the token's version; newer tokens weigh more. C (`cfg.kind`)
is the identity, or `min(ratio, high)` (truncated importance sampling, Yao et al., "Your efficient RL framework secretly
brings you off-policy RL training", 2025), or 0 outside [low, high] (IcePop, Ling team, 2025). At the level of
sequences, each token has the geometric mean of its response's ratios (GSPO, arXiv:2507.18071, equation 7).

With `decoupled`, a clipped objective bounds how far the policy moves from the proximal policy, and w corrects for all
other differences (Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298, section 5.2):

    w * min(r A, clip(r) A),    r = policy / proximal

In the first optimizer step r is 1 and no token is clipped: the gradient is that of w A log(policy), however stale a
token is. So with one optimizer step in each training step, `decoupled` never clips.
Without `decoupled`, r = policy / behaviour already contains the factor proximal / behaviour. The remaining factor
`w / (proximal / behaviour)` is exactly 1 without C and decay.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..base.types import TrainBatch
from ..config import AlgorithmConfig, Importance, ImportanceConfig, ImportanceLevel, KlEstimator, LossAggregation

LIMIT = 20.0  # nats; a larger log-ratio counts as this limit, so that sums of squared ratios are finite in float32

# The names of the sums and of the maximum that `importance_tally` returns.
_SUMS = tuple(f"importance/{name}" for name in ("weights", "squares", "clipped"))
_SUMS += tuple(f"staleness/{name}" for name in ("kl", "excess", "excess_squares", "lags"))
TALLIED = (*_SUMS, "staleness/lag_max")


def response_weights(lengths: np.ndarray, aggregation: LossAggregation, max_new_tokens: int) -> np.ndarray:
    """Returns, for each response `i` of a step, the loss weight of a token. Raises ValueError if there are no tokens.

    `lengths` are the numbers of tokens of all responses of the *entire* step. With N responses of lengths |o_i|:

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
    """Returns the factor of `response_weights`' divisor that is common to all responses: tokens of the step, responses
    that are not empty, or `N max_new_tokens`. A step's factor is the sum of its parts' factors."""
    lengths = np.asarray(lengths, np.int64)
    if aggregation is LossAggregation.TOKEN_MEAN:
        return int(lengths.sum())
    if aggregation is LossAggregation.SEQUENCE_MEAN:
        return int(np.count_nonzero(lengths))
    return len(lengths) * max_new_tokens


def masked(values_BT: Float[Array, "B T"], trained_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Sets the value of a token that is not trained on to zero, with zero gradient. Call this function *before* any
    exponential: log-probs at untrained tokens are arbitrary, and `inf * 0` is NaN."""
    return jnp.where(trained_BT, values_BT, 0.0)


def clipped_surrogate(
    ratio_BT: Float[Array, "B T"], advantages_BT: Float[Array, "B T"], clip_low: float, clip_high: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns PPO's pessimistic objective `min(r A, clip(r, 1 - low, 1 + high) A)` (arXiv:1707.06347, equation 7).
    Different bounds are DAPO's clip-higher (arXiv:2503.14476, equation 8). Also returns, for each token, 1.0 if a bound
    cuts the gradient off, else 0.0."""
    clipped_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    objective_BT = jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    above = (advantages_BT > 0.0) & (ratio_BT > 1.0 + clip_high)
    below = (advantages_BT < 0.0) & (ratio_BT < 1.0 - clip_low)
    return objective_BT, (above | below).astype(ratio_BT.dtype)


def dual_clipped(
    objective_BT: Float[Array, "B T"], ratio_BT: Float[Array, "B T"], advantages_BT: Float[Array, "B T"], bound: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns `max(objective, c A)` where A < 0 (Ye et al., arXiv:1912.09729, equation 5). PPO's minimum has no lower
    bound: one stale token with a negative advantage and a large ratio could outweigh a step. Also returns, for each
    token, 1.0 if `c` (`bound`, above 1) cuts the gradient off, else 0.0."""
    beyond_BT = (advantages_BT < 0.0) & (ratio_BT > bound)
    return jnp.where(beyond_BT, bound * advantages_BT, objective_BT), beyond_BT.astype(ratio_BT.dtype)


def kl_estimate(log_ratio: Any, estimator: KlEstimator) -> Any:
    """Estimates, in numpy or JAX arrays, KL(p || q) for tokens sampled from p; `log_ratio` is `d = log q - log p`
    (Schulman, "Approximating KL Divergence", 2020). k1 = -d is unbiased and of either sign. It is for rewards only: as
    a loss, its mean gradient is 0. k2 = d**2 / 2 is biased, but as a loss its gradient is that of KL(p || q),
    on-policy. k3 = exp(d) - d - 1 is unbiased and never negative (in GRPO's equation 4, q is the reference)."""
    if estimator is KlEstimator.K1:
        return -log_ratio
    if estimator is KlEstimator.K2:
        return 0.5 * log_ratio**2
    return log_ratio.__array_namespace__().expm1(log_ratio) - log_ratio


def regularised(
    loss_BT: Float[Array, "B T"],
    metrics: dict[str, Float[Array, "B T"]],
    logprobs_BT: Float[Array, "B T"],
    entropies_BT: Float[Array, "B T"],
    batch: TrainBatch,
    cfg: AlgorithmConfig,
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
    """Returns `loss - entropy_coefficient * entropy + kl_coefficient * KL(policy || reference)` for trained tokens,
    else 0. The loss has no KL term if the reward has it. A KL coefficient adds the metric `reference_kl` (nats)."""
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


# --- importance -----------------------------------------------------------------------------------


def log_ratio(policy: Any, behaviour: Any) -> Any:
    """Returns `log(policy / behaviour)` of numpy or JAX log-probs, cut to +-20 nats; the gradient beyond is 0.
    Infinities and NaN stay: they are faults, and the learner skips a step that has them."""
    difference = policy - behaviour
    xp = difference.__array_namespace__()
    return xp.where(xp.isfinite(difference), xp.clip(difference, -LIMIT, LIMIT), difference)


def log_weight(ratio: Any, lag: Any, cfg: ImportanceConfig) -> tuple[Any, Any]:
    """Returns (log w, whether C changed the ratio), by the formula in the head of this file. `ratio` is `log(proximal /
    behaviour)` in nats, of tokens or responses; a `lag` of -1 counts as 0. A masked token has the log-weight `-inf`."""
    xp = ratio.__array_namespace__()
    changed = xp.zeros_like(ratio, dtype=bool)
    corrected, (low, high) = ratio, cfg.bounds
    if cfg.kind is Importance.TRUNCATE:
        changed = ratio > math.log(high)
        corrected = xp.where(changed, math.log(high), ratio)
    elif cfg.kind is Importance.MASK:
        changed = ratio > math.log(high)
        if low > 0.0:
            changed = changed | (ratio < math.log(low))
        corrected = xp.where(changed, -math.inf, ratio)
    if cfg.decay < 1.0:
        corrected = corrected + math.log(cfg.decay) * xp.maximum(lag, 0).astype(ratio.dtype)
    return corrected, changed


def proximal(logprobs_BT: Float[Array, "B T"], batch: TrainBatch) -> Float[Array, "B T"]:
    """Returns the log-probs of the proximal policy, a constant; `logprobs_BT` are the policy's."""
    stored_BT = batch.proximal_logprobs_BT
    return jax.lax.stop_gradient(logprobs_BT) if stored_BT is None else stored_BT


def correction(
    logprobs_BT: Float[Array, "B T"], batch: TrainBatch, cfg: ImportanceConfig
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns the differentiable log(policy / centre) and the constant weight of a clipped objective. The centre is the
    proximal policy if `decoupled`, else the behaviour policy. Tokens that are not trained on have 0 in both results.
    `logprobs_BT` are the policy's. At the level of sequences, `fluxjax.learner.loss_inputs.with_importance` must have
    filled in `batch.response_log_ratios_BT`."""
    trained_BT = batch.loss_weights_BT != 0.0
    proximal_BT = proximal(logprobs_BT, batch)
    corrected_BT = _corrected(proximal_BT, batch, cfg)
    log_weight_BT, _ = log_weight(corrected_BT, batch.lags_BT, cfg)
    if not cfg.decoupled:
        log_weight_BT = log_weight_BT - corrected_BT
    around_BT = proximal_BT if cfg.decoupled else batch.behaviour_logprobs_BT
    log_ratio_BT = masked(log_ratio(logprobs_BT, around_BT), trained_BT)
    return log_ratio_BT, jnp.where(trained_BT, jnp.exp(log_weight_BT), 0.0)


def importance_tally(
    logprobs_BT: Float[Array, "B T"], batch: TrainBatch, generated_BT: Bool[Array, "B T"], cfg: ImportanceConfig
) -> tuple[dict[str, Float[Array, ""]], dict[str, Float[Array, ""]]]:
    """Returns (sums, maxima) over the generated tokens of a microbatch, for `importance_metrics`."""
    proximal_BT = proximal(logprobs_BT, batch)
    own_BT = masked(log_ratio(proximal_BT, batch.behaviour_logprobs_BT), generated_BT)
    log_weight_BT, changed_BT = log_weight(_corrected(proximal_BT, batch, cfg), batch.lags_BT, cfg)
    weight_BT = jnp.where(generated_BT, jnp.exp(log_weight_BT), 0.0)
    excess_BT = jnp.expm1(own_BT)  # ratio - 1: the variance of ratios near 1 loses no digits to cancellation
    lag_BT = jnp.where(generated_BT, batch.lags_BT, 0).astype(jnp.float32)
    clipped_BT = jnp.where(generated_BT, changed_BT, False).astype(jnp.float32)
    summed = weight_BT, weight_BT**2, clipped_BT, kl_estimate(own_BT, KlEstimator.K3), excess_BT, excess_BT**2, lag_BT
    sums = {name: jnp.sum(values_BT) for name, values_BT in zip(_SUMS, summed, strict=True)}
    return sums, {"staleness/lag_max": jnp.max(lag_BT)}


def importance_metrics(tallied: Mapping[str, float], generated: float) -> dict[str, float]:
    """Returns the metrics of a step over its `generated` tokens, at least one, from the results of `importance_tally`.

    `importance/ess`: normalised effective sample size `(sum w)**2 / (n sum w**2)`, 1 if all weights are equal, 0 if all
    tokens are masked. `importance/mean`: the mean of w, before any normalisation. `importance/clipped`: the share of
    tokens whose ratio was truncated or masked. `staleness/kl`: the k3 estimate of KL(behaviour || policy) in nats.
    `staleness/variance`: the variance of the tokens' uncorrected ratios policy / behaviour. `staleness/lag_mean` and
    `lag_max`: versions between the weights that generated a token and the weights at the start of its training step.
    "Policy" is the proximal policy here.
    """
    weight, squares, clipped, kl, excess, excess_squares, lag = (tallied[name] / generated for name in _SUMS)
    return {
        "importance/ess": min(weight**2 / squares, 1.0) if squares else 0.0,
        "importance/mean": weight,
        "importance/clipped": clipped,
        "staleness/kl": kl,
        "staleness/variance": max(excess_squares - excess**2, 0.0),
        "staleness/lag_mean": lag,
        "staleness/lag_max": tallied["staleness/lag_max"],
    }


def _corrected(proximal_BT: Array, batch: TrainBatch, cfg: ImportanceConfig) -> Array:
    """Returns the log-ratio that C corrects, of each token or of its response."""
    if cfg.level is ImportanceLevel.SEQUENCE:
        return batch.response_log_ratios_BT
    return masked(log_ratio(proximal_BT, batch.behaviour_logprobs_BT), batch.loss_weights_BT != 0.0)
