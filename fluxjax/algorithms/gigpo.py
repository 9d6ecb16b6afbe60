"""Group-in-group policy optimisation (GiGPO; Feng et al., arXiv:2505.10978): groups of turns in the group of episodes.

    A(turn) = A_E(episode) + A_S(turn)

A_E is GRPO's advantage. A_S is the same formula for the returns of all turns of the group that begin in one state. A
turn's return is the sum of its reward and of the rewards of later turns, each times `discount` for each turn between.
The first turns of a group begin in the same state, the prompt. Other turns do if they follow equal observations: equal
token ids, and media of equal content. The paper's experiments weigh both terms equally, too. The loss is GRPO's.
"""

from collections.abc import Hashable, Sequence
from itertools import zip_longest

import numpy as np

from ..base.scored import ENVIRONMENT, Response, numbers_of, turn_numbers
from ..base.types import Group
from ..config import AlgorithmConfig
from .grpo import GRPO, relative, rewards_of


class GiGPO(GRPO):
    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        return [group.with_turn_advantages(_of_turns(group, cfg)) for group in groups]


def _of_turns(group: Group, cfg: AlgorithmConfig) -> list[list[float]]:
    totals, advantages = rewards_of(group), list[list[float]]()
    returns: dict[Hashable, dict[tuple[int, int], float]] = {}  # by state, then by response and turn
    for k, (sample, whole) in enumerate(zip(group.samples, relative(totals, cfg.normalize_std).tolist(), strict=True)):
        rewards, value = sample.response.turn_rewards(float(totals[k])), 0.0
        advantages.append([whole] * len(rewards))
        for turn, state in reversed([*zip(range(len(rewards)), _states(sample.response), strict=False)]):
            value = rewards[turn] + cfg.discount * value
            returns.setdefault(state, {})[k, turn] = value
    for alike in returns.values():
        values = relative(np.array([*alike.values()]), cfg.normalize_std).tolist()
        for (k, turn), value in zip(alike, values, strict=True):
            advantages[k][turn] += value
    return advantages


def _states(response: Response) -> list[Hashable]:
    """Returns the states in which turns begin: the prompt, and the (token ids, media) of observations."""
    numbers = numbers_of(response.data)
    turns, seen = turn_numbers(numbers.versions), numbers.versions == ENVIRONMENT
    ids = [tuple(numbers.tokens[seen & (turns == turn)].tolist()) for turn in np.unique(turns[seen])]
    return ["prompt", *zip_longest(ids, response.observed_media)]
