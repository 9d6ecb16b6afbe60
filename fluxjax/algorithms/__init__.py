"""Losses and advantages: a module for each algorithm, their common terms, and the extension point for users' own."""

from typing import TYPE_CHECKING

from sharding.door import door

from .rl_algorithm import ALGORITHMS, RLAlgorithm, find_algorithm, own_code

if TYPE_CHECKING:
    from .grpo import rewards_of
    from .ppo import PPO

__all__ = ["ALGORITHMS", "PPO", "RLAlgorithm", "find_algorithm", "own_code", "rewards_of"]
__getattr__ = door(__name__, grpo=("rewards_of",), ppo=("PPO",))
