"""The parallelism planner chooses the number of devices of an engine, again for each step (Flexes, section 4.2).

An engine whose cache is full takes pages from running responses and computes them again later: a preemption. More
devices in an engine leave more room beside the weights, but mean fewer engines and more communication. So a sudden rise
of preemptions doubles the degree, and several steps without preemptions halve it.
"""

from ..config import ParallelismConfig
from ..config.scheduling import MAX_DEGREE
from .saved import SavedState, State


class ParallelismPlanner:
    """`degree` is the number of devices that an engine should have now: a power of two within `[least, most]`.

    `devices` is the number of devices of all engines together, 0 if unknown; `start` is the degree at the start, 0 for
    the degree of the settings.
    """

    max_degree = MAX_DEGREE  # devices of a host, within which an engine stays
    rise = 1.05  # the degree doubles if preemptions exceed this many times those of the step before
    calm = 4  # the degree halves after this many steps without preemptions

    def __init__(self, settings: ParallelismConfig, devices: int = 0, start: int = 0) -> None:
        self.most = 1 << (min(self.max_degree, devices or self.max_degree).bit_length() - 1)
        self.least = min(settings.min_degree, self.most)
        self.degree = self._within(start or settings.degree)
        self._before: int | None = None  # preemptions of the last step
        self._calm = 0  # steps without preemptions, since the last step with some or the last change

    def next(self, preemptions: int) -> int:
        """Returns the degree for the next step, after a step with `preemptions` preemptions in all engines together.

        More than `rise` times the preemptions of the step before double the degree (after a step without any, one is
        enough). The first step only sets the measure. `calm` steps without preemptions halve the degree.
        """
        if preemptions < 0:
            raise ValueError(f"a step can't have {preemptions} preemptions")
        before, self._before = self._before, preemptions
        self._calm = 0 if preemptions else self._calm + 1
        wanted = self.degree
        if before is not None and preemptions > self.rise * before:
            wanted *= 2
        elif self._calm >= self.calm:
            wanted //= 2
            self._calm = 0
        self.degree = self._within(wanted)
        return self.degree

    def _within(self, degree: int) -> int:
        return max(min(degree, self.most), self.least)

    def state_dict(self) -> State:
        return {"degree": self.degree, "before": self._before, "calm": self._calm}

    def load_state_dict(self, state: SavedState) -> None:
        """Restores the degree, within what the devices of this run allow."""
        self.degree = self._within(state["degree"])
        self._before, self._calm = state["before"], state["calm"]
