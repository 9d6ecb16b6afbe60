"""DAPO (Yu et al., arXiv:2503.14476, equation 8): GRPO with clip-higher and a mean over all tokens of a step.

    -1 / sum_j |o_j| sum_i sum_t min(r A_i, clip(r, 1 - 0.2, 1 + 0.28) A_i)

The wider upper bound lets unlikely tokens become more likely; a long answer counts by its tokens. The name sets both
(`clip_high`, `loss_aggregation`). The rest of the paper is elsewhere: dynamic sampling is `rollout.dynamic_sampling`,
which a run must ask for, and overlong reward shaping is a reward.
"""

from .grpo import GRPO


class DAPO(GRPO):
    """GRPO with the settings that the configuration takes over for DAPO (`fluxjax.config.algorithms.OWN_SETTINGS`)."""
