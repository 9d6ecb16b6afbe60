"""Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300, equation 3), the base of its successors.

The loss of token t of response i, with A_i the group's relative advantage (no critic):

    -w min(r A_i, clip(r, 1 - clip_low, 1 + clip_high) A_i) + kl_coefficient * k3(reference, policy)
        - entropy_coefficient * entropy,
    r = policy(o_t) / behaviour(o_t),  w = 1

For A_i < 0, `dual_clip` A_i bounds the minimum, see `dual_clipped`. The behaviour log-probs are the engine's, reported
as it sampled the token, so r also corrects for differences between engine and trainer; `cfg.importance` chooses another
correction, w and r: see `importance`. The KL term may have another estimator, or be in the reward: see `regularised`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.types import Group, TrainBatch, has_variance
from ..config import AlgorithmConfig
from .advantages import relative_to_group
from .importance import correction
from .loss import clipped_surrogate, dual_clipped, masked, regularised
from .rl_algorithm import RLAlgorithm


def advantages(groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
    """Returns the groups with `A_i = (R_i - mean(R)) / (std(R) + 1e-6)` (section 4.1.2); without the division if
    `cfg.normalize_std` is off. `std` has the divisor G - 1. Equal rewards give exactly 0."""
    return relative_to_group(groups, normalize_std=cfg.normalize_std)


def zero_variance_groups(groups: Sequence[Group]) -> int:
    """Counts the groups whose rewards are all equal, which therefore teach nothing."""
    return sum(not has_variance(group) for group in groups)


def token_loss(
    logprobs_BT: Float[Array, "B T"], entropies_BT: Float[Array, "B T"], batch: TrainBatch, cfg: AlgorithmConfig
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
    """Returns the loss in the head of this file, and its metrics: `ratio`, r; `clip_fraction`, 1 where the bound cuts
    the gradient off; `dual_clip_fraction`, 1 where the dual clip does; and the metrics of `regularised`."""
    trained_BT = batch.loss_weights_BT != 0.0
    log_ratio_BT, weight_BT = correction(logprobs_BT, batch, cfg.importance)
    ratio_BT = jnp.exp(log_ratio_BT)
    objective_BT, clipped_BT = clipped_surrogate(ratio_BT, batch.advantages_BT, cfg.clip_low, cfg.clip_high)
    metrics = {"ratio": masked(ratio_BT, trained_BT), "clip_fraction": masked(clipped_BT, trained_BT)}
    if cfg.dual_clip > 0.0:
        objective_BT, beyond_BT = dual_clipped(objective_BT, ratio_BT, batch.advantages_BT, cfg.dual_clip)
        metrics["dual_clip_fraction"] = masked(beyond_BT, trained_BT)
    return regularised(-weight_BT * objective_BT, metrics, logprobs_BT, entropies_BT, batch, cfg)


class GRPO(RLAlgorithm):
    """GRPO, by the two functions above; its subclasses replace one of the two."""

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        return advantages(groups, cfg)

    def token_loss(
        self,
        logprobs_BT: Float[Array, "B T"],
        entropies_BT: Float[Array, "B T"],
        batch: TrainBatch,
        cfg: AlgorithmConfig,
    ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
        return token_loss(logprobs_BT, entropies_BT, batch, cfg)

    def idle_without_advantage(self, cfg: AlgorithmConfig) -> bool:
        """Says whether the loss is the surrogate alone: it is proportional to the advantage; KL and entropy terms are
        not."""
        return not (cfg.kl_coefficient or cfg.entropy_coefficient)
