"""Advantages from the rewards of groups: the few ways in which algorithms compare a response with others."""

from collections.abc import Sequence

import numpy as np

from ..base.types import Group, has_variance

VARIANCE_EPSILON = 1e-8  # under the root, where advantages are normalised over all tokens of a step
STD_EPSILON = 1e-6  # in the unit of the reward; keeps nearly equal rewards from becoming huge advantages
with_advantages = Group.with_advantages  # (group, advantages_G): the group with these, one a sample


def rewards_of(group: Group) -> np.ndarray:
    """Returns the rewards of the group's samples, in float64. Raises ValueError, naming the prompt, for a reward that
    is not finite."""
    rewards_G = np.array([sample.reward.value for sample in group.samples], np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"prompt {group.prompt.id}: rewards must be finite, got {rewards_G.tolist()}")
    return rewards_G


def all_ones(groups: Sequence[Group]) -> list[Group]:
    """The advantage 1 for every response, whatever its reward."""
    return [with_advantages(group, [1.0] * len(group.samples)) for group in groups]


def centred(group: Group) -> np.ndarray:
    """`R_i - mean(R)`; exactly 0 for equal rewards."""
    rewards_G = rewards_of(group)
    if not has_variance(group):  # by comparison: the computed mean of equal numbers may differ in the last bit
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def relative_to_group(groups: Sequence[Group], *, normalize_std: bool) -> list[Group]:
    """Returns each group with `R_i - mean(R)` as its advantages; `normalize_std` divides them by `std(R) + 1e-6`
    (divisor G - 1)."""

    def relative(group: Group) -> np.ndarray:
        advantages_G = centred(group)
        if normalize_std and has_variance(group):
            advantages_G /= rewards_of(group).std(ddof=1) + STD_EPSILON
        return advantages_G

    return [with_advantages(group, relative(group)) for group in groups]
