"""The states of a run's trainer processes, preprocessors and media, as process 0 knows and shows them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class HostStage:
    """The time of one stage in a process: `plan`, `media`, `layout` or `train`. `start` and `end` are seconds of the
    `time.perf_counter` of the process that reads the statuses. Because clocks differ, processes send these times
    relative to the end of the step, which is at the same time in all processes."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class HostStatus:
    """The state of a process after a step. `memory_bytes` is the resident memory. `device_memory_bytes` is the peak of
    the fullest device, 0 if no device reports a peak. `step` counts training steps since the start of the processes.
    `wait_seconds` are those, before and within the step, of waits for orders or for the other processes' agreement.
    `idle` are the seconds of `train` in which the process's devices waited for other devices, or None without `odc`."""

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
        """The seconds before the step's programs, for planning, reading media and laying out."""
        return math.fsum(stage.end - stage.start for stage in self.stages if stage.name != "train")

    @property
    def train_seconds(self) -> float:
        """The seconds of the step's programs, including waits for other processes."""
        return math.fsum(stage.end - stage.start for stage in self.stages if stage.name == "train")

    @property
    def own_seconds(self) -> float:
        """The seconds of the process's own work, for which other processes may wait. Without `idle`, only
        `prepare_seconds` distinguishes processes, because collectives end in all processes at once."""
        return self.prepare_seconds + (self.train_seconds - self.idle if self.idle is not None else 0.0)


def slowest(hosts: Sequence[HostStatus]) -> HostStatus:
    """Returns the process that the other processes wait for."""
    return max(hosts, key=lambda host: host.own_seconds)


@dataclasses.dataclass(frozen=True)
class PreprocessorStatus:
    """The state of a preprocessor. The numbers that the preprocessor reports are some seconds old. Totals continue when
    the preprocessor is started again. `memory_bytes` is 0 while the preprocessor is down."""

    name: str
    up: bool
    looks: int  # media that the preprocessor measured on request
    bytes: int  # bytes of slices that the preprocessor sent to process 0
    queued: int  # media that wait to be decoded
    lost: int  # times that the run lost the preprocessor
    decoded: int = 0  # media that the preprocessor decoded for all processes of the run
    memory_bytes: int = 0  # bytes of decoded media in memory
    hits: int = 0  # requested slices that were in memory
    misses: int = 0  # slices that had to be decoded again
    reason: str = ""  # why the preprocessor is down


class MediumStage(enum.Enum):
    LOOKED_AT = "looked at"
    HELD = "held"
    UNUSABLE = "unusable"
    LOST = "lost"  # the stage of a preprocessor, not of a medium


class Transition(NamedTuple):
    key: Hashable  # a medium; empty for a preprocessor
    place: str  # the preprocessor's name
    stage: MediumStage
    time: float
