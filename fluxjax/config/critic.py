"""The section of `Config` that says how the critic learns that some algorithms have (PPO), and what is made of its
values."""

import dataclasses

from .bounds import not_negative, positive, within


@dataclasses.dataclass(slots=True)
class CriticConfig:
    # Its other settings are optim's, its minibatches and epochs algorithm's.
    lr: float = positive(1e-3)  # of the critic's own optimizer; for large models ten times the policy's, as a rule
    # Steps in which only the critic learns: the policy, and the schedule of its learning rate, begin after them.
    warmup_steps: int = not_negative(0)
    value_clip: float = not_negative(0.5)  # a value's loss is bounded this far from the one before the step; 0: never
    gamma: float = within(1.0, "[0, 1]")  # what a reward is worth one token before
    gae_lambda: float = within(0.95, "[0, 1]")  # 1: advantages from whole returns; 0: from the next token's value
    whiten: bool = True  # advantages of a step have the mean 0 and the variance 1 over its tokens
