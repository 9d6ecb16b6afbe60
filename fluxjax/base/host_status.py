"""The state of one trainer process, as it reports to process 0 and as users see it."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class HostStage:
    """The time in which a process did one thing: `plan`, `media`, `layout` or `train`. In the statuses of a `Gang`,
    `start` and `end` are seconds of the reading process's `time.perf_counter`. Between hosts they travel as seconds
    before the end of the step: clocks differ, and a step ends everywhere at once."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class HostStatus:
    """The state of a process after a step. `memory`: resident bytes; `device_memory`: the peak bytes in use of its
    fullest device, 0 where the device does not report them. `step` counts optimizer steps since the processes were
    started. `waited`: seconds in which the process stood still before and within the step, for orders or for the other
    processes to agree. `idle`: seconds of `train` in which its devices waited for other devices, or None (only `odc`
    measures them)."""

    process: int
    host: str
    devices: int
    memory: int
    device_memory: int
    step: int
    stages: tuple[HostStage, ...]
    waited: float
    idle: float | None = None

    @property
    def prepared(self) -> float:
        """Seconds of everything before the step's programs: planning, reading media, laying out."""
        return math.fsum(stage.end - stage.start for stage in self.stages if stage.name != "train")

    @property
    def trained(self) -> float:
        """Seconds of the step's programs, including waits for other processes within them."""
        return math.fsum(stage.end - stage.start for stage in self.stages if stage.name == "train")

    @property
    def own_seconds(self) -> float:
        """Seconds of the process's own work, for which other processes may wait. Collectives end everywhere at once, so
        without `idle` only `prepared` distinguishes processes."""
        return self.prepared + (self.trained - self.idle if self.idle is not None else 0.0)
