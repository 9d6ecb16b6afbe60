"""Rewards: a plain dict of rules, and the scorer that applies them one sample at a time."""

from .rules import digits, exact, number, positions
from .scorer import REWARDS, RewardFunction, Scorer, find_reward

__all__ = ["REWARDS", "RewardFunction", "Scorer", "digits", "exact", "find_reward", "number", "positions"]
