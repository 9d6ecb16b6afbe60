"""Calls rewards within their time, in processes that can be killed."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from ..base.scored import Completion
from ..base.worker_pool import WorkerDied, WorkerError, WorkerPool, WorkerTimeout
from ..config import RewardKindConfig
from .answers import Failing, RewardFailure, from_message
from .named import FoundReward

MEMORY_GIB = 4.0  # that a process of a user's reward may need beside what it imports


class ProcessCaller:
    """Calls a reward that has an import path in processes: one that takes too long, or too much memory, is killed."""

    def __init__(self, found: FoundReward, bounds: RewardKindConfig) -> None:
        self._pool = WorkerPool(
            "fluxjax.rewards.in_worker:scoring_function",
            bounds.concurrency,
            seconds=bounds.seconds,
            memory_gib=MEMORY_GIB,
            name=found.name,
            made_with={"name": found.name, "arguments": dict(found.arguments)},
        )

    async def call(self, completions: Sequence[Completion]) -> list[Any]:
        try:
            answers = await self._pool.acall(pickle.dumps(list(completions)))
            return [from_message(answer) for answer in answers]
        except WorkerTimeout as error:
            raise RewardFailure(Failing.TIMED_OUT, str(error)) from None
        except WorkerDied as error:
            raise RewardFailure(Failing.DIED, error.reason) from None
        except WorkerError as error:
            raise RewardFailure(Failing.RAISED, str(error)) from None

    def close(self) -> None:
        self._pool.close()
