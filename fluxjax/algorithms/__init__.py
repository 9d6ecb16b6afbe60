"""Losses and advantages: a module for each algorithm, their common terms, and the extension point for users' own.

`rl_algorithm` says what an algorithm is, `lookup` has the built-in ones by name.
"""

from typing import TYPE_CHECKING

from sharding.door import door

from .lookup import ALGORITHMS, find_algorithm, own_code
from .rl_algorithm import RLAlgorithm

if TYPE_CHECKING:
    from .ppo import PPO

__all__ = ["ALGORITHMS", "PPO", "RLAlgorithm", "find_algorithm", "own_code"]
__getattr__ = door(__name__, ppo=("PPO",))
