"""Dr.GRPO, "GRPO done right" (Liu et al., arXiv:2503.20783, section 3.2): GRPO without its two biases.

    A_i = R_i - mean(R)                             not divided by std(R), which favours prompts that are easy or hard
    1 / (responses * max_new_tokens) each token     not 1 / |o_i|, which favours long answers among wrong ones

The name sets both (`normalize_std`, `loss_aggregation`).
"""

from .grpo import GRPO


class DrGRPO(GRPO):
    """GRPO with the settings that the configuration takes over for Dr.GRPO (`fluxjax.config.algorithms`)."""
