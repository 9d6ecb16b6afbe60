"""REINFORCE++ (Hu et al., arXiv:2501.03262): no critic; advantages are normalised over all tokens of a step.

    A_i = (R_i - mean) / std,     R_i = reward - kl_coefficient * sum_t log(policy / reference)(o_t)

with mean and variance over all tokens of the step; a token has the advantage of its response. The KL term is in the
reward (section 3; `kl_in_reward`, estimator k1). Here all tokens of a response have the same KL term; in the paper,
token t has the sum over the tokens from t on. The loss is PPO's clipped loss, as in GRPO. The variant with a baseline
first subtracts each group's mean, and has the KL term in the loss (estimator k2).
"""

from collections.abc import Sequence

import numpy as np

from ..base.types import Group
from ..config import AlgorithmConfig
from .grpo import GRPO, relative, rewards_of
from .ppo import VARIANCE_EPSILON


class ReinforcePlusPlus(GRPO):
    whole_step = True

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        return _normalised_over_tokens(groups, [rewards_of(group) for group in groups])


class ReinforcePlusPlusBaseline(GRPO):
    whole_step = True

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        return _normalised_over_tokens(groups, [relative(rewards_of(group), False) for group in groups])


def _normalised_over_tokens(groups: Sequence[Group], values: Sequence[np.ndarray]) -> list[Group]:
    """Returns `(value - mean) / sqrt(variance + 1e-8)`, with both over the step's tokens (divisor: tokens - 1)."""
    flat = np.concatenate([*values, np.zeros(0)])
    tokens = np.array([sample.response.num_trained for group in groups for sample in group.samples], np.int64)
    count = tokens.sum()
    if count < 2:
        return [group.with_advantages(np.zeros(len(group.samples))) for group in groups]
    mean = (flat * tokens).sum() / count
    variance = ((flat - mean) ** 2 * tokens).sum() / (count - 1)
    scale = np.sqrt(variance + VARIANCE_EPSILON)
    return [group.with_advantages((values_G - mean) / scale) for group, values_G in zip(groups, values, strict=True)]
