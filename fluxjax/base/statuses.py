"""The states of a run's trainer processes, preprocessors and media, as process 0 sees them and as users see them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class HostStage:
    """The time in which a process did one stage: `plan`, `media`, `layout` or `train`. In the statuses of a `Gang`,
    `start` and `end` are seconds of the reading process's `time.perf_counter`. Processes send these times relative to
    the end of the step: clocks differ, and a step ends in all processes at once."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class HostStatus:
    """The state of a process after a step. `memory_bytes` are resident; `device_memory_bytes` is the peak in use of the
    fullest device, 0 if no device reports a peak. `step` counts training steps since the processes were
    started. `wait_seconds` are the seconds before and within the step in which the process waited for orders or for the
    other processes' agreement. `idle` are the seconds of `train` in which its devices waited for other devices; None
    without `odc`, which measures them."""

    process: int
    host: str
    devices: int
    memory_bytes: int
    device_memory_bytes: int
    step: int
    stages: tuple[HostStage, ...]
    wait_seconds: float
    idle: float | None = None

    @property
    def prepare_seconds(self) -> float:
        """Seconds of everything before the step's programs: planning, reading media, laying out."""
        return math.fsum(stage.end - stage.start for stage in self.stages if stage.name != "train")

    @property
    def train_seconds(self) -> float:
        """Seconds of the step's programs, including waits for other processes within them."""
        return math.fsum(stage.end - stage.start for stage in self.stages if stage.name == "train")

    @property
    def own_seconds(self) -> float:
        """Seconds of the process's own work, for which other processes may wait. Collectives end everywhere at once, so
        without `idle` only `prepare_seconds` distinguishes processes."""
        return self.prepare_seconds + (self.train_seconds - self.idle if self.idle is not None else 0.0)


def slowest(hosts: Sequence[HostStatus]) -> HostStatus:
    """Returns the process that the other processes wait for."""
    return max(hosts, key=lambda host: host.own_seconds)


@dataclasses.dataclass(frozen=True)
class PreprocessorStatus:
    """A preprocessor at one moment. The numbers that the preprocessor reports are some seconds old; totals
    continue when the preprocessor is started again. `memory_bytes` is 0 while the preprocessor is down."""

    name: str
    up: bool
    looks: int  # media that it measured on request
    bytes: int  # bytes of slices that it sent to process 0
    queued: int  # media in its queue for decoding
    lost: int  # times that the run lost it
    decoded: int = 0  # media that it decoded for all processes of the run
    memory_bytes: int = 0  # bytes of decoded media in memory
    hits: int = 0  # requested slices that it held
    misses: int = 0  # slices that had to be decoded again
    reason: str = ""  # why it is down


class MediumStage(enum.Enum):
    LOOKED_AT = "looked at"
    HELD = "held"
    UNUSABLE = "unusable"
    LOST = "lost"  # the stage of a preprocessor, not of a medium


class Transition(NamedTuple):
    key: Hashable  # a medium; empty in the transition of a preprocessor
    place: str  # the preprocessor's name
    stage: MediumStage
    time: float
