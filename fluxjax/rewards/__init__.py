"""Rewards: the built-in rewards by name, and the scorer that applies a source's rewards to responses.

Importing this package imports no JAX.
"""

from ..base.scored import Completion, Prompt, Reward
from .named import REWARDS, find_reward
from .rules import digits, exact, number, positions
from .scorer import Scorer

__all__ = [
    "REWARDS",
    "Completion",
    "Prompt",
    "Reward",
    "Scorer",
    "digits",
    "exact",
    "find_reward",
    "number",
    "positions",
]
