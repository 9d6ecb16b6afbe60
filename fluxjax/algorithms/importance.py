"""One correction for everything that lies between the policy that generated a token and the one that is trained.

Stale weights, responses whose segments come from several versions, replay, an engine that computes otherwise: all are
tokens sampled by a behaviour policy, with a weight version each. So each token has a weight (Flux, component 3)

    w = C(proximal / behaviour) * decay**lag

The proximal policy is the trainer's at the start of the training step. With one optimizer step, that is the value of
the policy itself, as a constant; with several, its log-probs are computed once, before the first
(`TrainBatch.proximal_logprobs_BT`). `lag` counts the versions since the token's own, a training step each; a segment
that is fresher weighs more.
C (`ImportanceConfig.kind`) is the identity, or `min(., high)` (truncated importance sampling, Yao et al., "Your
efficient RL framework secretly brings you off-policy RL training", 2025), or 0 outside [low, high] (IcePop, Ling team,
2025). At the level of sequences the geometric mean over the response stands for each of its tokens' ratios (GSPO,
arXiv:2507.18071, equation 7).

With `decoupled` a clipped objective bounds how far the policy moves from the proximal one, and w corrects for the
rest (Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298, section 5.2):

    w * min(r A, clip(r) A),    r = policy / proximal

In the first optimizer step r is 1 and nothing is clipped: the gradient is that of w A log(policy), however stale a
token is. So with one optimizer step a training step, `decoupled` clips nothing at all.
Otherwise r = policy / behaviour, which has the factor proximal / behaviour in it already; what remains of w is
`w / (proximal / behaviour)`: exactly 1 without C and decay.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..base.types import TrainBatch
from ..config import Importance, ImportanceConfig, ImportanceLevel
from .loss import k3, masked

LIMIT = 20.0  # nats; log-ratios beyond count as this one: its square, summed over any step, is finite in float32

# What a microbatch adds to a step's sums: see `metrics`.
_WEIGHTS, _SQUARES, _CLIPPED = "importance/weights", "importance/squares", "importance/clipped"
_KL, _EXCESS, _EXCESS_SQUARES, _LAGS = "staleness/kl", "staleness/excess", "staleness/excess_squares", "staleness/lags"
_LAG_MAX = "staleness/lag_max"
_SUMS = (_WEIGHTS, _SQUARES, _CLIPPED, _KL, _EXCESS, _EXCESS_SQUARES, _LAGS)
TALLIED = (*_SUMS, _LAG_MAX)


def log_ratio(policy: Any, behaviour: Any) -> Any:
    """`log(policy / behaviour)` of numpy or JAX log-probs, within +-20 nats; there is no gradient beyond.

    What is not finite stays so: it is no extreme but a fault, and the learner skips such a step."""
    difference = policy - behaviour
    xp = difference.__array_namespace__()
    return xp.where(xp.isfinite(difference), xp.clip(difference, -LIMIT, LIMIT), difference)


def log_weight(ratio: Any, lag: Any, cfg: ImportanceConfig) -> tuple[Any, Any]:
    """Returns (log w, whether C changed the ratio) for numpy or JAX arrays, by the formula in the head of this file.

    `ratio` is `log(proximal / behaviour)` in nats, of tokens or responses; a `lag` of -1 counts as 0. Masked: `-inf`.
    """
    xp = ratio.__array_namespace__()
    changed = xp.zeros_like(ratio, dtype=bool)
    corrected = ratio
    if cfg.kind is Importance.TRUNCATE:
        changed = ratio > math.log(cfg.high)
        corrected = xp.where(changed, math.log(cfg.high), ratio)
    elif cfg.kind is Importance.MASK:
        changed = ratio > math.log(cfg.high)
        if cfg.low > 0.0:
            changed = changed | (ratio < math.log(cfg.low))
        corrected = xp.where(changed, -math.inf, ratio)
    if cfg.decay < 1.0:
        corrected = corrected + math.log(cfg.decay) * xp.maximum(lag, 0).astype(ratio.dtype)
    return corrected, changed


def proximal(logprobs_BT: Float[Array, "B T"], batch: TrainBatch) -> Float[Array, "B T"]:
    """The log-probs of the proximal policy, a constant; `logprobs_BT` are the policy's."""
    stored_BT = batch.proximal_logprobs_BT
    return jax.lax.stop_gradient(logprobs_BT) if stored_BT is None else stored_BT


def correction(
    logprobs_BT: Float[Array, "B T"], batch: TrainBatch, cfg: ImportanceConfig
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns, for a clipped objective, log(policy over what it clips around), which is differentiable, and its factor,
    a constant; 0 where a token is not trained on. `logprobs_BT` are the policy's.

    `batch.response_log_ratios_BT` must be filled in at the level of sequences, by
    `fluxjax.batch.loss_inputs.with_importance`.
    """
    trained_BT = batch.loss_weights_BT != 0.0
    proximal_BT = proximal(logprobs_BT, batch)
    corrected_BT = _corrected(proximal_BT, batch, cfg)
    log_weight_BT, _ = log_weight(corrected_BT, batch.lags_BT, cfg)
    if not cfg.decoupled:
        log_weight_BT = log_weight_BT - corrected_BT
    around_BT = proximal_BT if cfg.decoupled else batch.behaviour_logprobs_BT
    log_ratio_BT = masked(log_ratio(logprobs_BT, around_BT), trained_BT)
    return log_ratio_BT, jnp.where(trained_BT, jnp.exp(log_weight_BT), 0.0)


def tally(
    logprobs_BT: Float[Array, "B T"], batch: TrainBatch, generated_BT: Bool[Array, "B T"], cfg: ImportanceConfig
) -> tuple[dict[str, Float[Array, ""]], dict[str, Float[Array, ""]]]:
    """Returns (sums, maxima) over the tokens of a microbatch that an engine generated, for `metrics`."""
    proximal_BT = proximal(logprobs_BT, batch)
    own_BT = masked(log_ratio(proximal_BT, batch.behaviour_logprobs_BT), generated_BT)
    log_weight_BT, changed_BT = log_weight(_corrected(proximal_BT, batch, cfg), batch.lags_BT, cfg)
    weight_BT = jnp.where(generated_BT, jnp.exp(log_weight_BT), 0.0)
    excess_BT = jnp.expm1(own_BT)  # above 1, near which ratios are: their variance is then far from cancellation
    lag_BT = jnp.where(generated_BT, batch.lags_BT, 0).astype(jnp.float32)
    summed = {
        _WEIGHTS: weight_BT,
        _SQUARES: weight_BT**2,
        _CLIPPED: jnp.where(generated_BT, changed_BT, False).astype(jnp.float32),
        _KL: k3(own_BT),
        _EXCESS: excess_BT,
        _EXCESS_SQUARES: excess_BT**2,
        _LAGS: lag_BT,
    }
    return {name: jnp.sum(values_BT) for name, values_BT in summed.items()}, {_LAG_MAX: jnp.max(lag_BT)}


def metrics(tallied: Mapping[str, float], generated: float) -> dict[str, float]:
    """Returns the metrics of a step over its `generated` tokens, at least one, from the sums and maxima of `tally`.

    `importance/ess`: normalised effective sample size `(sum w)**2 / (n sum w**2)`, 1 if all weights are equal, 0 if
    all tokens are masked. `importance/mean`: of w, before any normalisation. `importance/clipped`: the share of tokens
    whose ratio was truncated or masked. `staleness/kl`: estimate of KL(behaviour || policy) in nats, by k3.
    `staleness/variance`: of the tokens' ratios policy / behaviour, uncorrected. `staleness/lag_mean` and `lag_max`:
    versions between the weights that generated a token and those that its training step begins with. Policy means the
    proximal one.
    """
    mean = {name: tallied[name] / generated for name in _SUMS}
    squares = mean[_SQUARES]
    return {
        "importance/ess": min(mean[_WEIGHTS] ** 2 / squares, 1.0) if squares else 0.0,
        "importance/mean": mean[_WEIGHTS],
        _CLIPPED: mean[_CLIPPED],
        _KL: mean[_KL],
        "staleness/variance": max(mean[_EXCESS_SQUARES] - mean[_EXCESS] ** 2, 0.0),
        "staleness/lag_mean": mean[_LAGS],
        _LAG_MAX: tallied[_LAG_MAX],
    }


def _corrected(proximal_BT: Array, batch: TrainBatch, cfg: ImportanceConfig) -> Array:
    """The log-ratio that C is applied to."""
    if cfg.level is ImportanceLevel.SEQUENCE:
        return batch.response_log_ratios_BT
    return masked(log_ratio(proximal_BT, batch.behaviour_logprobs_BT), batch.loss_weights_BT != 0.0)
