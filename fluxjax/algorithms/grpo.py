"""Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300, equation 3), the base of its successors.

The loss of token t of response i, with A_i the advantage relative to its group (no critic):

    -w min(r A_i, clip(r, 1 - clip_low, 1 + clip_high) A_i) + kl_coefficient * k3(reference, policy)
        - entropy_coefficient * entropy,
    r = policy(o_t) / behaviour(o_t),  w = 1

For A_i < 0, `dual_clip` A_i bounds the minimum, see `dual_clipped`. The engine reports the behaviour log-prob of each
token that it samples, so r also corrects for differences between engine and trainer; `cfg.importance` chooses another
correction, w and r: see `loss`. The KL term may have another estimator, or be in the reward: see `regularised`.

Two of its successors are GRPO with other settings; the configuration sets them when it is given their names:

- DAPO (Yu et al., arXiv:2503.14476, equation 8): a wider upper bound (`clip_high` 0.28) lets unlikely tokens become
  more likely; the mean is over all tokens of a step, so a long answer counts by its tokens. The paper's dynamic
  sampling is `rollout.dynamic_sampling`, its overlong reward shaping is a reward.
- Dr.GRPO, "GRPO done right" (Liu et al., arXiv:2503.20783, section 3.2), without two biases: advantages are not divided
  by std(R), which favours prompts that are easy or hard; a token counts 1 / (responses * max_new_tokens), and not
  1 / |o_i|, which favours long answers among wrong ones.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..base.types import Group, TrainBatch, has_variance
from ..config import AlgorithmConfig
from .loss import clipped_surrogate, correction, dual_clipped, masked, regularised
from .rl_algorithm import LossAndMetrics, RLAlgorithm, TokenValues

STD_EPSILON = 1e-6  # in the unit of the reward; keeps nearly equal rewards from becoming huge advantages


def rewards_of(group: Group) -> np.ndarray:
    """Returns the rewards of the group's samples, in float64. Raises ValueError, naming the prompt, for a reward that
    is not finite."""
    rewards_G = np.array([sample.reward.value for sample in group.samples], np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"prompt {group.prompt.id}: rewards must be finite, got {rewards_G.tolist()}")
    return rewards_G


def centred(group: Group) -> np.ndarray:
    """Returns `R_i - mean(R)`; exactly 0 for equal rewards."""
    rewards_G = rewards_of(group)
    if not has_variance(group):  # by comparison: the computed mean of equal numbers may differ in the last bit
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def advantages(groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
    """Returns the groups with `A_i = (R_i - mean(R)) / (std(R) + 1e-6)` (section 4.1.2); without the division if
    `cfg.normalize_std` is off. `std` has the divisor G - 1. Equal rewards give exactly 0."""

    def relative(group: Group) -> np.ndarray:
        advantages_G = centred(group)
        if cfg.normalize_std and has_variance(group):
            advantages_G /= rewards_of(group).std(ddof=1) + STD_EPSILON
        return advantages_G

    return [group.with_advantages(relative(group)) for group in groups]


def zero_variance_groups(groups: Sequence[Group]) -> int:
    """Counts the groups whose rewards are all equal: they teach nothing."""
    return sum(not has_variance(group) for group in groups)


def token_loss(
    logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
) -> LossAndMetrics:
    """Returns the loss in the head of this file, and its metrics: `ratio`, r; `clip_fraction`, 1 if the bound cuts
    the gradient off; `dual_clip_fraction`, 1 if the dual clip cuts it off; and the metrics of `regularised`."""
    loss_BT, metrics = clipped_loss(logprobs_BT, batch.advantages_BT, batch, cfg)
    return regularised(loss_BT, metrics, logprobs_BT, entropies_BT, batch, cfg)


def clipped_loss(
    logprobs_BT: TokenValues, advantages_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
) -> LossAndMetrics:
    """Returns the first term of the loss in the head of this file, for any advantages, and its metrics."""
    trained_BT = batch.loss_weights_BT != 0.0
    log_ratio_BT, weight_BT = correction(logprobs_BT, batch, cfg.importance)
    ratio_BT = jnp.exp(log_ratio_BT)
    objective_BT, clipped_BT = clipped_surrogate(ratio_BT, advantages_BT, cfg.clip_low, cfg.clip_high)
    metrics = {"ratio": masked(ratio_BT, trained_BT), "clip_fraction": masked(clipped_BT, trained_BT)}
    if cfg.dual_clip > 0.0:
        objective_BT, beyond_BT = dual_clipped(objective_BT, ratio_BT, advantages_BT, cfg.dual_clip)
        metrics["dual_clip_fraction"] = masked(beyond_BT, trained_BT)
    return -weight_BT * objective_BT, metrics


class GRPO(RLAlgorithm):
    """GRPO, by the functions `advantages` and `token_loss`; its subclasses replace one of the two."""

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        return advantages(groups, cfg)

    def token_loss(
        self, logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
    ) -> LossAndMetrics:
        return token_loss(logprobs_BT, entropies_BT, batch, cfg)

    def idle_without_advantage(self, cfg: AlgorithmConfig) -> bool:
        """Says whether the loss is the surrogate alone, which is proportional to the advantage: KL and entropy terms
        are not."""
        return not (cfg.kl_coefficient or cfg.entropy_coefficient)
