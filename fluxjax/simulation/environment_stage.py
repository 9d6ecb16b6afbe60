"""The environments of a simulated cluster: each turn of a response is answered after some seconds, if at all."""

import dataclasses
from collections.abc import Callable
from functools import partial

from ..base.types import ENVIRONMENT, Response
from ..coordinator.messages import EnvironmentFailed, Event, TurnObserved
from .clock import Clock
from .faults import exponential, uniform
from .options import SimulationConfig
from .workload import Samples, longer

_SECONDS, _FAILS = range(100, 102)  # names of random numbers


@dataclasses.dataclass(eq=False)
class EnvironmentStage:
    """Answers turns and reports to `post`. All values are functions of seed, draw, attempt, sample and turn."""

    clock: Clock
    settings: SimulationConfig
    seed: int
    post: Callable[[Event], None]

    def act(self, response: Response, samples: Samples) -> None:
        """Answers the last turn of a response. The last turn of a sample ends the episode, without an observation."""
        rates, attempt = self.settings.faults, int(response.rid.partition("/")[0].partition(".")[2])
        names = self.seed, response.draw, attempt, response.sample, response.num_tokens
        done = response.num_tokens >= samples.lengths[response.sample]
        event: Event = TurnObserved(response, done)
        if uniform(_FAILS, *names) < rates.environment_fails:
            event = EnvironmentFailed(response.rid, "its environment does not answer")
        elif not done:
            event = TurnObserved(longer(response, ENVIRONMENT, self.settings.observation_tokens), done)
        self.clock.after(exponential(self.settings.environment_seconds, _SECONDS, *names), partial(self.post, event))
