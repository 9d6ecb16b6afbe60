"""The reward stage of a simulated cluster: rules, sandboxes and judges, each a queue in front of some workers.

`SimulationConfig.rewards` sets when scoring begins and how long it may take: verl's way, Flexes' asynchronous rewards,
or Flexes' reward scheduler (section 4.3). With the scheduler:

- A sandbox is stopped after min(max(2 s, 1.5 times the anchor), 30 s). A prompt's anchor is the longest sandbox run of
  its correct responses so far. A prompt without a correct response has the largest anchor of all prompts.
- Each GPU of the cluster has a judge. The cost of sharing is left out: in the paper, neither engine nor judge fills a
  GPU. Streaming the judge's layers from host memory costs little.
"""

import dataclasses
import heapq
from collections.abc import Callable
from functools import partial

from ..base.timeline import Span, Timeline
from ..base.types import Response, Reward
from ..coordinator.messages import Event, Request, RewardReady
from .clock import Clock
from .faults import FaultPlan
from .hardware import SANDBOX_LIMIT
from .options import Rewards, SimulationConfig
from .workload import Samples

LEAST, RELAXED = 2.0, 1.5  # the least time limit of a sandbox, in seconds; the factor on the anchor


class Servers:
    """A queue in front of `count` servers, which take jobs in the order of submission."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count

    def submit(self, now: float, seconds: float) -> float:
        """Submits a job of `seconds` at `now`, and returns the time of its end; `now` must not decrease."""
        end = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, end)
        return end


@dataclasses.dataclass(eq=False)
class Scoring:
    """Scores responses and reports their rewards to `post`."""

    clock: Clock
    settings: SimulationConfig
    faults: FaultPlan
    post: Callable[[Event], None]
    timeline: Timeline

    def __post_init__(self) -> None:
        settings, self.hardware = self.settings, self.settings.hardware()
        self.scheduled = settings.rewards is Rewards.SCHEDULED
        judges = settings.gpus if self.scheduled else settings.judges
        workers = {"math": settings.rules, "code": settings.sandboxes, "judge": judges}
        self._servers = {task: Servers(count) for task, count in workers.items()}
        self._anchors: dict[str, float] = {}  # by id of the prompt: seconds
        self._anchor = 0.0  # the largest anchor; 0: no code was correct yet
        self._held: list[Callable[[], None]] = []
        self.timed_out = 0

    def score(self, request: Request, response: Response, samples: Samples, tokens: int, step: int) -> None:
        """Scores a response: now or, if rewards are synchronous, after the rollout. `tokens` includes the prompt."""
        if self.settings.rewards is Rewards.SYNCHRONOUS:
            self._held.append(partial(self._score, request, response, samples, tokens, step))
        else:
            self._score(request, response, samples, tokens, step)

    def rollout_over(self) -> None:
        """Begins the scoring that waited for the end of generation."""
        held, self._held = self._held, []
        for job in held:
            job()

    def _score(self, request: Request, response: Response, samples: Samples, tokens: int, step: int) -> None:
        now, prompt, sample = self.clock.now, request.prompt, response.sample
        limit, sandbox = self._limit(prompt.id), samples.sandbox[sample]
        reward = samples.reward(sample, limit)
        seconds = self.hardware.reward_seconds(prompt.source, tokens, min(sandbox, limit))
        if self.faults.reward_hangs(prompt.draw, request.attempt, sample) or seconds > self.settings.reward_limit:
            seconds, reward = self.settings.reward_limit, Reward(0.0, False, "timed out")
        end = self._servers[prompt.source].submit(now, seconds)

        def scored() -> None:
            self.timeline.add(Span("reward", "reward", now, end, step))
            self.timed_out += reward.reason == "timed out"
            if reward.correct and sandbox:
                self._anchors[prompt.id] = max(sandbox, self._anchors.get(prompt.id, 0.0))
                self._anchor = max(sandbox, self._anchor)
            self.post(RewardReady(response.rid, reward))

        self.clock.at(end, scored)

    def _limit(self, prompt: str) -> float:
        if not self.scheduled or not self._anchor:
            return SANDBOX_LIMIT
        return min(max(LEAST, RELAXED * self._anchors.get(prompt, self._anchor)), SANDBOX_LIMIT)
