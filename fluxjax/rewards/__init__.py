"""Rewards: a plain dict of rules, and the scorer that applies a source's rewards to one response at a time.

JAX is not imported here: processes that score need none.
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
