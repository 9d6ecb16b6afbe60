"""Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300), with the switches of its successors.

The loss of token t of response i, with A_i the group's relative advantage (no critic):

    -w min(r A_i, clip(r, 1 - clip_low, 1 + clip_high) A_i) + kl_coefficient * k3(reference, policy)
        - entropy_coefficient * entropy,
    r = policy(o_t) / behaviour(o_t),  w = 1

Behaviour log-probs are those that the engine reported when it sampled the token, so r also corrects for what
differs between engine and trainer; `cfg.importance` chooses another correction, w and r: see `importance`.
`normalize_std=False` with the constant aggregation is Dr.GRPO (arXiv:2503.20783); `clip_high > clip_low` with the
token mean is DAPO's clip-higher (arXiv:2503.14476).
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.types import Group, TrainBatch, has_variance
from ..config import AlgorithmConfig
from .importance import correction
from .loss import clipped_surrogate, k3, masked

STD_EPSILON = 1e-6  # in the unit of the reward; keeps nearly equal rewards from becoming huge advantages


def advantages(groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
    """`A_i = (R_i - mean(R)) / (std(R) + 1e-6)` within each group (section 4.1.2); without the division if
    `cfg.normalize_std` is off. `std` has the divisor G - 1. Equal rewards give exactly 0."""
    return [_with_advantages(group, cfg.normalize_std) for group in groups]


def _with_advantages(group: Group, normalize_std: bool) -> Group:
    rewards_G = np.array([sample.reward.value for sample in group.samples], np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"prompt {group.prompt.id}: rewards must be finite, got {rewards_G.tolist()}")
    if not has_variance(group):  # by comparison: the computed mean of equal numbers may differ in the last bit
        advantages_G = np.zeros_like(rewards_G)
    else:
        advantages_G = rewards_G - rewards_G.mean()
        if normalize_std:
            advantages_G /= rewards_G.std(ddof=1) + STD_EPSILON
    samples = tuple(
        dataclasses.replace(sample, advantage=float(value))
        for sample, value in zip(group.samples, advantages_G, strict=True)
    )
    return dataclasses.replace(group, samples=samples)


def zero_variance_groups(groups: Sequence[Group]) -> int:
    """Counts the groups of equal rewards throughout, which therefore teach nothing: all right, or all wrong."""
    return sum(not has_variance(group) for group in groups)


def token_loss(
    logprobs_BT: Float[Array, "B T"], entropies_BT: Float[Array, "B T"], batch: TrainBatch, cfg: AlgorithmConfig
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
    """The loss in the head of this file. Metrics: `ratio`, r; `clip_fraction` 1 where the bound cuts the gradient off;
    and if there is a reference `reference_kl`, KL(policy || reference) in nats by the k3 estimate.
    """
    trained_BT = batch.loss_weights_BT != 0.0
    log_ratio_BT, weight_BT = correction(logprobs_BT, batch, cfg.importance)
    ratio_BT = jnp.exp(log_ratio_BT)
    objective_BT, clipped_BT = clipped_surrogate(ratio_BT, batch.advantages_BT, cfg.clip_low, cfg.clip_high)
    loss_BT = masked(-weight_BT * objective_BT, trained_BT)
    metrics = {"ratio": masked(ratio_BT, trained_BT), "clip_fraction": masked(clipped_BT, trained_BT)}
    if cfg.entropy_coefficient > 0.0:
        loss_BT = loss_BT - cfg.entropy_coefficient * masked(entropies_BT, trained_BT)
    if cfg.kl_coefficient > 0.0:
        reference_kl_BT = k3(masked(batch.reference_logprobs_BT - logprobs_BT, trained_BT))
        loss_BT = loss_BT + cfg.kl_coefficient * reference_kl_BT
        metrics["reference_kl"] = reference_kl_BT
    return loss_BT, metrics
