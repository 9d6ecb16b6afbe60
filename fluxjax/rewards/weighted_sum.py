"""The reward of a source: one, or the weighted sum of several, with weights that may change during the run."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from ..base.scored import Completion, Reward
from ..config.schedules import RunSchedule
from .guarded import GuardedReward


@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """The rewards of a source by name, and their weights; no weights: it has just one.

    Of several, the first one says what is correct. A reward that failed adds nothing to the sum.
    """

    rewards: Mapping[str, GuardedReward]
    weights: Mapping[str, RunSchedule]

    @property
    def changes(self) -> bool:
        """Says whether the sum depends on the run's progress."""
        return any(low != high for low, high in (weight.bounds for weight in self.weights.values()))

    @property
    def takes_time(self) -> bool:
        """Says whether there is more to it than built-in rules."""
        return any(reward.caller is not None for reward in self.rewards.values())

    async def score(self, completion: Completion, progress: float) -> Reward:
        """Returns the reward of a completion with the weights at `progress`, in [0, 1]; its parts are not weighted."""
        if not self.weights:
            (reward,) = self.rewards.values()
            return await reward.score(completion)
        found = await asyncio.gather(*(reward.score(completion) for reward in self.rewards.values()))
        named = dict(zip(self.rewards, found, strict=True))
        parts = {name: reward.value for name, reward in named.items()}
        parts |= {f"{name}/{part}": value for name, reward in named.items() for part, value in reward.parts.items()}
        return Reward(
            sum(self.weights[name].value(progress) * reward.value for name, reward in named.items()),
            found[0].correct,
            "; ".join(f"{name}: {reward.reason}" for name, reward in named.items() if reward.reason),
            parts,
            max(reward.seconds for reward in found),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what its rewards want to have kept in checkpoints, by name."""
        states = {name: getattr(reward.reward, "state_dict", None) for name, reward in self.rewards.items()}
        return {name: state() for name, state in states.items() if callable(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, reward in self.rewards.items():
            if name in state and callable(load := getattr(reward.reward, "load_state_dict", None)):
                load(state[name])
