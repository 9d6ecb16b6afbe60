"""Prompts and their answers: the answers' lengths, whether they are right, the seconds of a sandbox.

The length of a response is lognormal; by default, half of the logarithm's variance is the prompt's, half the sample's.
Flexes reports median and spread (section 2.2): 75 % of the responses are below twice the median, the longest of a
step's 1,024 is 26 to 32 times the median. With these halves, the longest response of a short round is a ninth of the
longest response without tail batching (section 3: "up to 8.9 times"). A prompt's source and the length of its text
explain a part of the prompt's half, so that lengths can be predicted, but not well.

All values are functions of seed, draw, attempt and sample; the versions of the weights have no influence.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np

from ..base.types import Prompt, Response, Reward
from .continuous_batch import Segments
from .faults import generator
from .hardware import LONGEST_PROMPT, SANDBOX_LIMIT, TASKS
from .options import SimulationConfig

_SOURCE, _TEXT = 0.1, 0.35  # shares of the variance of a prompt's effect: from its source, from its text's length
_OFFSETS: dict[str, float] = dict(zip(TASKS, (0.0, 1.22, -1.22), strict=True))  # mean 0, variance 1
_CHARACTERS = 4  # characters of a token's text
_HANGS = 1.645  # 5 % of normal numbers are larger: sandboxes that hit the limit (Flexes, figure 7a)
_PROMPTS, _ORDER, _SAMPLES, _TURNS = range(4)


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples of one attempt at a prompt: their numbers of tokens, whether they are right, the seconds for which a
    sandbox would run (0 for tasks without a sandbox), and the number of tokens at the end of each turn. All but the
    first turn begin with an observation."""

    lengths: list[int]
    correct: list[bool]
    sandbox: list[float]
    turn_ends: list[tuple[int, ...]]

    def reward(self, sample: int, limit: float = SANDBOX_LIMIT) -> Reward:
        """Returns a sample's reward: 1 for a right sample, 0 for a wrong one or if its sandbox runs `limit` seconds."""
        if self.sandbox[sample] >= limit:
            return Reward(0.0, False, "timed out")
        return Reward(float(self.correct[sample]), self.correct[sample])


@functools.lru_cache(maxsize=4096, typed=True)
def _shared(value: float, count: int) -> tuple[Any, ...]:
    return (value,) * count


def _repeated(value: float, count: int) -> tuple[Any, ...]:
    return _shared(value, count) if count <= 2048 else (value,) * count


def longer(before: Response, version: int, tokens: int) -> Response:
    """Returns the response with more tokens of one version."""
    segments = (*((run, len(list(of))) for run, of in itertools.groupby(before.versions)), (version, tokens))
    return response(before.rid, before.draw, before.sample, segments, before.finish)


def response(rid: str, draw: int, sample: int, segments: Segments, finish: str = "stop") -> Response:
    """Returns a response with the versions of `segments`, each (version, tokens); ids and log-probs are 0."""
    if len(segments) == 1:
        versions = _repeated(*segments[0])
    else:
        versions = sum((_repeated(version, count) for version, count in segments), ())
    tokens = len(versions)
    return Response(rid, draw, sample, _repeated(0, tokens), _repeated(0.0, tokens), versions, finish)


class Workload:
    """A data set of `settings.prompts` prompts, in another order in each epoch, and their answers."""

    def __init__(self, seed: int, settings: SimulationConfig, max_new_tokens: int) -> None:
        tasks, size, spread, shared = settings.tasks, settings.prompts, settings.spread, settings.shared
        self.seed, self.size, self.max_new_tokens, self.tasks = seed, size, max_new_tokens, tasks
        self._turns, self._observation = settings.turns, settings.observation_tokens
        self._own = spread * math.sqrt(1 - shared)
        shares = np.full(len(tasks), 1 / len(tasks))
        random = generator(seed, _PROMPTS)
        source = random.choice(len(tasks), size, p=shares)
        text, hidden, difficulty = random.standard_normal((3, size))
        offsets = np.array([_OFFSETS[task] for task in tasks])
        offsets = math.sqrt(_SOURCE) * (offsets - shares @ offsets)
        unseen = 1 - shares @ offsets**2 - _TEXT  # so that a single task has the same spread as a mixture
        effect = offsets[source] + math.sqrt(_TEXT) * text + math.sqrt(unseen) * hidden
        self._source = source.tolist()
        self._tokens = np.clip(150 * np.exp(0.6 * text), 10, LONGEST_PROMPT).astype(int).tolist()
        self._log_length = (math.log(settings.median) + spread * math.sqrt(shared) * effect).tolist()
        # A response is right if a normal number is below its prompt's ease. Hard questions have long answers; many
        # prompts are always or never answered rightly, so groups without variance occur.
        self._ease = (0.4 - 0.6 * effect + 1.2 * difficulty).tolist()
        self._orders: dict[int, list[int]] = {}

    def index(self, draw: int) -> int:
        """Returns the index of a draw's prompt in the data set."""
        epoch, place = divmod(draw, self.size)
        if epoch not in self._orders:
            self._orders[epoch] = generator(self.seed, _ORDER, epoch).permutation(self.size).tolist()
        return self._orders[epoch][place]

    def prompt(self, draw: int) -> Prompt:
        """Returns the prompt of a draw; its source is its task. With several turns, it has an environment."""
        index, environment = self.index(draw), "simulated" if self._turns > 1 else ""
        task, tokens = self.tasks[self._source[index]], self._tokens[index]
        name, text, epoch = f"{task}-{index:06d}", _text(tokens * _CHARACTERS), draw // self.size
        return Prompt(name, task, text, "", draw=draw, epoch=epoch, tokens=tokens, environment=environment)

    def prompt_tokens(self, draw: int) -> int:
        return self._tokens[self.index(draw)]

    def samples(self, draw: int, attempt: int, count: int) -> Samples:
        """Returns the first `count` samples of an attempt, each independent of `count` and other attempts."""
        index = self.index(draw)
        length, right, hang, pace = generator(self.seed, _SAMPLES, draw, attempt).standard_normal((count, 4)).T
        lengths = np.exp(self._log_length[index] + self._own * length)
        correct = right < self._ease[index]
        sandbox = np.zeros(count)
        if self.tasks[self._source[index]] == "code":
            sandbox = np.where(hang > _HANGS, 2 * SANDBOX_LIMIT, np.minimum(np.exp(0.5 * pace), SANDBOX_LIMIT / 2))
            correct &= hang <= _HANGS
        capped = np.clip(lengths, 1, self.max_new_tokens).astype(int).tolist()
        turns = generator(self.seed, _TURNS, draw, attempt).integers(1, self._turns + 1, count).tolist()
        ends = [_turn_ends(total, turns, self._observation) for total, turns in zip(capped, turns, strict=True)]
        return Samples(capped, correct.tolist(), sandbox.tolist(), ends)


def _turn_ends(total: int, turns: int, observation: int) -> tuple[int, ...]:
    """Returns the number of tokens at the end of each of `turns` about equal turns, fewer if some would be empty."""
    turns = min(turns, (total + observation) // (observation + 1))
    said = total - (turns - 1) * observation
    return tuple(said * (turn + 1) // turns + turn * observation for turn in range(turns))


@functools.lru_cache(maxsize=4096)
def _text(characters: int) -> str:
    return "?" * characters
