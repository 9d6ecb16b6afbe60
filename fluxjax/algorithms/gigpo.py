"""Group-in-group policy optimisation (GiGPO; Feng et al., arXiv:2505.10978): groups of turns in the group of episodes.

    A(turn) = A_E(episode) + A_S(turn)

A_E is GRPO's advantage. A_S is the same formula for the returns of all turns of the group that begin in one state. A
turn's return is the sum of its reward and of the rewards of later turns, each times `discount` for each turn between.
Turns begin in the same state if they follow the prompt, or equal observations: equal token ids, and media of equal
content. The paper's experiments weigh both terms equally, too. The loss is GRPO's.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from ..base.scored import turns_of
from ..base.types import Group
from ..config import AlgorithmConfig
from .grpo import GRPO, relative, rewards_of


class GiGPO(GRPO):
    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        return [group.with_turn_advantages(_of_turns(group, cfg)) for group in groups]


def _of_turns(group: Group, cfg: AlgorithmConfig) -> list[list[float]]:
    """Returns the advantages of the turns of each response."""
    totals, advantages = rewards_of(group), list[list[float]]()
    returns: dict[Hashable, dict[tuple[int, int], float]] = {}  # by state, then by response and turn
    for k, (sample, whole) in enumerate(zip(group.samples, relative(totals, cfg.normalize_std).tolist(), strict=True)):
        rewards, value = sample.response.turn_rewards(float(totals[k])), 0.0
        advantages.append([whole] * len(rewards))
        seen = [ids for _, ids in turns_of(sample.response)]
        states = ["prompt", *zip(seen, sample.response.observed_media, strict=False)]
        for turn in reversed(range(len(rewards))):
            value = rewards[turn] + cfg.discount * value
            returns.setdefault(states[turn], {})[k, turn] = value
    for alike in returns.values():
        values = relative(np.array([*alike.values()]), cfg.normalize_std).tolist()
        for (k, turn), value in zip(alike, values, strict=True):
            advantages[k][turn] += value
    return advantages
