"""Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300, equation 3), the base of its successors.

The advantage A_i of response i is relative to its group, so that no critic is needed. The loss of token t is

    -w min(r A_i, clip(r, 1 - clip_low, 1 + clip_high) A_i) + kl_coefficient * k3(reference, policy)
        - entropy_coefficient * entropy,
    r = policy(o_t) / behaviour(o_t),  w = 1

With `dual_clip`, the minimum is at least `dual_clip * A_i` if A_i < 0. The engine reports the behaviour log-prob of
each token that it samples, so r also corrects for differences between engine and trainer. `cfg.importance` chooses
other definitions of w and r (see `loss`). The KL term may have another estimator, or be in the reward (`regularised`).

DAPO and Dr.GRPO are GRPO with other settings; the configuration chooses the settings by the algorithm's name:

- DAPO (Yu et al., arXiv:2503.14476, equation 8): a wider upper bound (`clip_high` 0.28) lets unlikely tokens become
  more likely; the mean is over all tokens of a step, so that all tokens have equal weights. The paper's dynamic
  sampling is `rollout.dynamic_sampling`, its overlong reward shaping is the reward `overlong`.
- Dr.GRPO, "GRPO done right" (Liu et al., arXiv:2503.20783, section 3.2), removes two biases. Advantages are not divided
  by std(R): the division favours prompts that are easy or hard. A token counts 1 / (responses * max_new_tokens):
  GRPO's factor 1 / |o_i| favours long answers among wrong ones.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..base.types import Group, TrainBatch, differ, has_variance
from ..config import AlgorithmConfig
from .loss import clipped_surrogate, correction, dual_clipped, masked, regularised
from .rl_algorithm import LossAndMetrics, RLAlgorithm, TokenValues

STD_EPSILON = 1e-6  # in the unit of rewards; bounds the advantages of nearly equal rewards


def rewards_of(group: Group) -> np.ndarray:
    """Returns the rewards of the group's samples, in float64. Raises ValueError for a reward that is not finite."""
    rewards_G = np.array([sample.reward.value for sample in group.samples], np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"prompt {group.prompt.id}: rewards must be finite, got {rewards_G.tolist()}")
    return rewards_G


def relative(rewards: np.ndarray, normalize: bool) -> np.ndarray:
    """Returns `R_i - mean(R)`, divided by `std(R) + 1e-6` with `normalize`; exactly 0 for equal rewards."""
    if not differ(rewards.tolist()):  # the computed mean of equal numbers may differ from them
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_EPSILON if normalize else 1.0)


def zero_variance_groups(groups: Sequence[Group]) -> int:
    """Counts the groups whose rewards are all equal, but for rounding."""
    return sum(not has_variance(group) for group in groups)


def clipped_loss(
    logprobs_BT: TokenValues, advantages_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
) -> LossAndMetrics:
    """Returns the loss without its KL and entropy terms, for the given advantages, and its metrics."""
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
    """GRPO. A subclass replaces `advantages` or `token_loss`."""

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """Returns the groups with the advantages `A_i = (R_i - mean(R)) / (std(R) + 1e-6)` (section 4.1.2). `std` has
        the divisor G - 1; with `cfg.normalize_std` off, nothing is divided. Equal rewards give exactly 0."""
        return [group.with_advantages(relative(rewards_of(group), cfg.normalize_std)) for group in groups]

    def token_loss(
        self, logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
    ) -> LossAndMetrics:
        """Returns the loss of the module's docstring, and metrics of each token: `ratio` is r; `clip_fraction` is 1 if
        clipping removes the gradient, `dual_clip_fraction` if dual clipping does. `regularised` adds metrics."""
        loss_BT, metrics = clipped_loss(logprobs_BT, batch.advantages_BT, batch, cfg)
        return regularised(loss_BT, metrics, logprobs_BT, entropies_BT, batch, cfg)

    def idle_without_advantage(self, cfg: AlgorithmConfig) -> bool:
        """Returns True if KL and entropy have no weight: the rest of the loss is proportional to the advantage."""
        return not (cfg.kl_coefficient or cfg.entropy_coefficient)


advantages, token_loss = GRPO().advantages, GRPO().token_loss
