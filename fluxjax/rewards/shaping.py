"""Rewards for the form of an answer, not for its content: its format, and DAPO's penalty for length. Also the reward
that an environment gives.

Rewards for form are meant to be added to other rewards. Their `Reward.correct` says whether the form is right.
"""

import dataclasses
import re

from ..base.errors import ConfigError
from ..base.scored import Completion, Reward
from ..base.worker_pool import WorkerPool, WorkerTimeout
from ..config.bounds import as_config_error, bounded, positive
from .extraction import sendable
from .named import BuiltIn
from .rules import RIGHT, WRONG

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THOUGHT_AND_ANSWER = re.compile(
    r"\s*+<think>\s*+(?!</think>).*</think>\s*+<answer>\s*+(?!</answer>).*</answer>\s*", re.DOTALL
)


@dataclasses.dataclass(eq=False)
class Format(BuiltIn):
    """Gives 1 if the entire text has the format, else 0.

    The format is `<think>…</think><answer>…</answer>`: each tag once, text in both pairs, only white space outside them
    (DeepSeek-R1, arXiv:2501.12948, section 2.2.2). A `pattern` replaces this format: the text must match by
    `re.fullmatch`, and a full stop matches any character. Some patterns take for ever for some texts. Texts are matched
    in a process that is killed after `seconds`; the text then counts as not matching.
    """

    name = kind = "format"
    pattern: str = ""
    workers: int = positive(1)
    seconds: float = positive(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        with as_config_error(f"format.pattern is {self.pattern!r}, which is no regular expression", re.error):
            re.compile(self.pattern)
        path = f"{__package__}.extraction:matches"
        self._pool = WorkerPool(path, self.workers, seconds=self.seconds, memory_gib=0.25, name="the reward 'format'")

    async def score(self, completion: Completion) -> Reward:
        if not self.pattern:
            once = all(completion.text.count(tag) == 1 for tag in _TAGS)
            return RIGHT if once and _THOUGHT_AND_ANSWER.fullmatch(completion.text) else WRONG
        try:
            matched = await self._pool.acall({"pattern": self.pattern, "text": sendable(completion.text)})
        except WorkerTimeout:
            return Reward(0.0, False, f"format.pattern took more than {self.seconds:g} s")
        return RIGHT if matched else WRONG

    def close(self) -> None:
        self._pool.close()


@dataclasses.dataclass(frozen=True)
class Overlong(BuiltIn):
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), to be added to the reward of correctness. For a
    response of n tokens, with `most_tokens` as L_max and `interval` as L_cache: 0 up to L_max - L_cache, -1 beyond
    L_max, and (L_max - L_cache - n) / L_cache in between. The paper has 20,480 and 4,096; `most_tokens` should be
    `rollout.max_new_tokens`. A text without a count of tokens, such as a held-out answer, gets 0."""

    name = "overlong"
    most_tokens: int = bounded(0, lambda n: n > 0, "be positive: set it to rollout.max_new_tokens")
    interval: int = bounded(0, lambda n: n > 0, "be positive: reward falls from most_tokens - interval tokens on")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interval > self.most_tokens:
            raise ConfigError(
                f"overlong.interval is {self.interval}; it must be at most overlong.most_tokens, {self.most_tokens}"
            )

    async def score(self, completion: Completion) -> Reward:
        value = (self.most_tokens - self.interval - completion.num_tokens) / self.interval
        value = min(max(value, -1.0), 0.0)
        return Reward(value, value == 0.0)


@dataclasses.dataclass(frozen=True)
class EnvironmentReward(BuiltIn):
    """The sum of the rewards that the environment gave for the turns of an episode. A positive sum is correct."""

    name = "environment"

    async def score(self, completion: Completion) -> Reward:
        value = sum(completion.rewards)
        return Reward(value, value > 0)
