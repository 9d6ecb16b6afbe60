"""REINFORCE with a leave-one-out baseline (Ahmadian et al., "Back to Basics", arXiv:2402.14740, equation 8).

    A_i = R_i - mean of R_j over j != i

This is G / (G - 1) times GRPO's advantage before the division by the standard deviation. The baseline adds no bias. A
response is one action: the log-probs of its tokens are summed (aggregation by a constant). The loss is GRPO's. At a
ratio of 1, the gradient is REINFORCE's; clipping cuts off the gradient of tokens whose ratio is far from 1.
"""

from collections.abc import Sequence

from ..base.types import Group
from ..config import AlgorithmConfig
from .grpo import GRPO, relative, rewards_of


class RLOO(GRPO):
    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """Returns advantages by the formula above; a response that is alone in its group has the advantage 0."""
        centred = [(group, relative(rewards_of(group), False), len(group.samples)) for group in groups]
        return [group.with_advantages(values_G * G / max(G - 1, 1)) for group, values_G, G in centred]
