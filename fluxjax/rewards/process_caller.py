"""Calls rewards within their time, in processes that can be killed."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base.scored import Completion, Reward
from ..base.worker_pool import WorkerDied, WorkerError, WorkerPool, WorkerTimeout
from ..config import RewardKindConfig
from .answers import Failing, RewardFailure, as_batch, as_reward
from .calls import Caller, Slots
from .named import Callee, FoundReward, find_reward

MEMORY_GIB = 4.0  # that a process of a user's reward may need beside what it imports


class ProcessCaller(Caller):
    """Calls a reward that has an import path in processes: one that takes too long, or too much memory, is killed."""

    def __init__(self, found: FoundReward, bounds: RewardKindConfig, slots: Slots) -> None:
        super().__init__(slots, Callee.of(found.value).batched)
        self._pool = WorkerPool(
            f"{__name__}:scoring_function",
            bounds.concurrency,
            seconds=bounds.seconds,
            memory_gib=MEMORY_GIB,
            name=found.name,
            made_with={"name": found.name, "arguments": dict(found.arguments)},
        )

    async def call(self, completions: Sequence[Completion]) -> list[Any]:
        try:
            answers = await self._pool.acall(pickle.dumps(list(completions)))
        except WorkerTimeout as error:
            raise RewardFailure(Failing.TIMED_OUT, str(error)) from None
        except WorkerDied as error:
            raise RewardFailure(Failing.DIED, error.reason) from None
        except WorkerError as error:
            raise RewardFailure(Failing.RAISED, str(error)) from None
        return [RewardFailure(Failing.INVALID, *a) if len(a) == 1 else Reward(*a) for a in answers]

    def close(self) -> None:
        self._pool.close()


def scoring_function(reward: Mapping[str, Any]) -> Callable[[bytes], list[Sequence[Any]]]:
    """Returns the function by which a process scores: by the reward of this `name` and `arguments`, built once.

    The function takes completions as the run pickled them, and returns an answer for each as plain values, or for all
    the one reason why they have none: the run takes no objects from a user's code."""
    callee = Callee.of(find_reward(**reward))

    def scored(completions: bytes) -> list[Sequence[Any]]:
        batch = pickle.loads(completions)
        result = callee.function(*callee.arguments(batch))
        try:
            answers = as_batch(result, len(batch)) if callee.batched else [result]
        except RewardFailure as failure:
            return [[failure.reason]] * len(batch)
        return [plain_answer(answer) for answer in answers]

    return scored


def plain_answer(result: Any) -> Sequence[Any]:
    """Returns the values of an answer's `Reward`, or alone the reason why it is none."""
    try:
        return dataclasses.astuple(as_reward(result))
    except RewardFailure as failure:
        return [failure.reason]
