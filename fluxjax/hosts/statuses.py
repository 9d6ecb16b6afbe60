"""The status that a process sends process 0 after each step: measured here, and written as a small value."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator
from typing import Any

import jax

from ..base.host_status import HostStage, HostStatus
from ..base.process import activity, resident_bytes


class StepWatch:
    """Times the stages of this process's steps."""

    def __init__(self) -> None:
        self._stages: list[HostStage] = []
        self._agreed = 0.0  # when
        self.at = "its programs"  # what this process does: a stage, or, between stages, this
        self._waited = 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start, before, self.at = time.perf_counter(), self.at, name
        yield
        self.at = before
        self._stages.append(HostStage(name, start, time.perf_counter()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        with activity(lambda: "waiting for the other processes"):
            yield
        self._waited += time.perf_counter() - start

    def agreed(self) -> None:
        """Notes that all processes are about to run the step's programs."""
        self._agreed = time.perf_counter()

    def status(self, process: int, step: int, idle: float | None) -> HostStatus:
        """Returns the measurements of the step, which is done; the next step's begin."""
        now = time.perf_counter()
        waited, stages, self._waited, self._stages = self._waited, self._stages, 0.0, []
        devices = jax.local_devices()
        stats = [device.memory_stats() or {} for device in devices]
        return HostStatus(
            process=process,
            host=socket.gethostname(),
            devices=len(devices),
            memory=resident_bytes(),
            device_memory=max(stat.get("peak_bytes_in_use", 0) for stat in stats),
            step=step,
            stages=(*stages, HostStage("train", self._agreed, now)),
            waited=waited,
            idle=idle,
        )


def shifted(status: HostStatus, seconds: float) -> HostStatus:
    """Returns the status on a clock that is ahead by so many seconds."""
    stages = tuple(HostStage(stage.name, stage.start + seconds, stage.end + seconds) for stage in status.stages)
    return dataclasses.replace(status, stages=stages)


def step_line(status: HostStatus) -> str:
    """Returns the line that the log of the process has of a step."""
    stages = ", ".join(f"{stage.name} {stage.end - stage.start:.3f} s" for stage in status.stages)
    return f"step {status.step}: {stages}, waited {status.waited:.3f} s, {status.memory / 1e9:.2f} GB"


def told_status(status: HostStatus) -> dict[str, Any]:
    """Returns the status as it is sent, without the number of the process: the receiver knows who sends it."""
    fields = dataclasses.asdict(status)
    del fields["process"]
    return {"status": fields | {"stages": [dataclasses.astuple(stage) for stage in status.stages]}}


def heard_status(value: Any, process: int) -> HostStatus | None:
    """Returns the status that `told_status` made a value of; None where it is another value."""
    if not isinstance(value, dict) or value.keys() != {"status"}:
        return None
    stages = tuple(HostStage(*stage) for stage in value["status"].pop("stages"))
    return HostStatus(process=process, stages=stages, **value["status"])
