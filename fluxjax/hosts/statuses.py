"""The status that a process sends process 0 after each step: measured here, written as small, versioned msgpack."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator

import jax
import msgpack

from ..base.host_status import HostStage, HostStatus
from ..base.process import resident_bytes
from ..base.under_way import activity
from .orders import PROTOCOL, OrderError

_MARK = b"status:"  # what else comes from a process is a fingerprint, which has no colon


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


def encode_status(status: HostStatus) -> bytes:
    """Returns the status as bytes, without the number of the process: the receiver knows who sends it."""
    fields = dataclasses.asdict(status)
    del fields["process"]
    fields["stages"] = [dataclasses.astuple(stage) for stage in status.stages]
    return _MARK + bytes(msgpack.Packer().pack({"protocol": PROTOCOL, **fields}))


def is_status(data: bytes) -> bool:
    return data.startswith(_MARK)


def decode_status(data: bytes, process: int) -> HostStatus:
    """Returns the status in these bytes. Raises OrderError for bytes that `encode_status` did not make, or that another
    version of this program made."""
    try:
        fields = msgpack.unpackb(data.removeprefix(_MARK))
        protocol = fields.pop("protocol")
        if protocol != PROTOCOL:
            raise OrderError(f"process {process} speaks version {protocol} of the orders, this one {PROTOCOL}")
        stages = tuple(HostStage(str(name), float(start), float(end)) for name, start, end in fields.pop("stages"))
        return HostStatus(process=process, stages=stages, **fields)
    except OrderError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.exceptions.UnpackException) as error:
        raise OrderError(f"process {process} sent {len(data)} bytes that are no status: {error}") from error
