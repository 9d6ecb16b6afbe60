"""The models that can judge, as a judge sees them: a question goes in, a text comes out."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class Question:
    """A user's turn, and how the answer to it is drawn. `images` are data URLs or addresses, in the prompt's order."""

    text: str
    images: tuple[str, ...]
    seed: int  # the same question is answered alike, as far as the model repeats draws
    temperature: float  # 0: greedy
    max_tokens: int
    deadline: float  # by time.monotonic: nobody waits for an answer after it


@dataclasses.dataclass(frozen=True)
class Answer:
    text: str
    whole: bool = True  # False: it was cut off at `max_tokens`


@runtime_checkable
class JudgeModel(Protocol):
    """A model that answers questions. `ask` is called on the run's event loop, for several questions at once; a call
    may be cancelled. What is asked again is asked with another seed and a temperature above 0."""

    async def ask(self, question: Question) -> Answer:
        """Returns the answer. Raises `RewardFailure`, or anything, where there will be none."""
        ...
