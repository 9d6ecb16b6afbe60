"""Losses and advantages: a module for each algorithm, their common terms, and the extension point for users' own.

`rl_algorithm` says what an algorithm is, `lookup` has the built-in ones by name.
"""

from .lookup import ALGORITHMS, find_algorithm, own_code
from .ppo import PPO
from .rl_algorithm import RLAlgorithm

__all__ = ["ALGORITHMS", "PPO", "RLAlgorithm", "find_algorithm", "own_code"]
