"""Adaptive time-outs of test cases (Flexes, section 4.3, "Code Sandbox Execution")."""

import dataclasses
from typing import Any

from ..base.errors import ConfigError


@dataclasses.dataclass
class TimeLimits:
    """Gives a test case `min(max(minimum, factor * anchor), maximum)` seconds; all of them where it has no anchor yet.

    The anchor of a case is the longest time that a correct response has taken for it in this run. With `adaptive` off
    every case has the maximum. Anchors are a part of a run's state: a resumed run gives the same time as before.
    """

    minimum: float = 2.0  # seconds
    factor: float = 2.0  # for cores that are busy with other things
    maximum: float = 30.0  # seconds
    adaptive: bool = True
    anchors: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.maximum < float("inf"):
            raise ConfigError(f"time limits: 0 < minimum <= maximum is needed, got {self.minimum} and {self.maximum}")
        if not 1 <= self.factor < float("inf"):
            raise ConfigError(f"time limits: factor is {self.factor}; below 1 right answers would be cut off")

    def seconds(self, case: str) -> float:
        if not self.adaptive or case not in self.anchors:
            return self.maximum
        return min(max(self.minimum, self.factor * self.anchors[case]), self.maximum)

    def learn(self, case: str, seconds: float) -> None:
        """Notes what a case took in a response that is correct as a whole."""
        self.anchors[case] = max(self.anchors.get(case, 0.0), seconds)

    def state_dict(self) -> dict[str, Any]:
        return {"anchors": dict(self.anchors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.anchors = {str(case): float(seconds) for case, seconds in state["anchors"].items()}
