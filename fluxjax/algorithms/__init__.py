"""Losses and advantages: a module an algorithm, what they are made of, and the extension point for one's own.

`rl_algorithm` says what an algorithm is, `lookup` has them by name.
"""

from .lookup import ALGORITHMS, find_algorithm, own_code
from .ppo import PPO
from .rl_algorithm import RLAlgorithm

__all__ = ["ALGORITHMS", "PPO", "RLAlgorithm", "find_algorithm", "own_code"]
