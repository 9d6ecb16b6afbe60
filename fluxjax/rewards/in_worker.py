"""Scores in a process that can be killed: the function that a `ProcessCaller` has `base/worker_pool.py` call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from .answers import RewardFailure, as_batch, to_message
from .named import Callee, find_reward


def scoring_function(reward: Mapping[str, Any]) -> Callable[[bytes], list[Any]]:
    """Returns the function that scores completions by the reward of this `name` and `arguments`, which is built once.

    The function takes completions as the run pickled them, and returns an answer for each as plain values, or for all
    the one reason why they have none: the run takes no objects from a user's code."""
    callee = Callee.of(find_reward(reward["name"], arguments=reward["arguments"]))

    def scored(completions: bytes) -> list[Any]:
        batch = pickle.loads(completions)
        result = callee.function(*callee.arguments(batch))
        try:
            answers = as_batch(result, len(batch)) if callee.batched else [result]
        except RewardFailure as failure:
            return [[failure.reason]] * len(batch)
        return [to_message(answer) for answer in answers]

    return scored
