"""Decodes media: what there is to decode, and who does, the thread that asks or a process of a pool.

A process of the pool (`python -m fluxjax.data.decoders DESCRIPTOR`) is told over a socket what to decode, one file at a
time, and ends with the run that has started it. JAX is not imported here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.processing.media_file import MediaUnavailable, Medium, Source

from ..base.errors import DataError
from ..base.process_channel import Channel
from ..base.process_pool import PoolLoad, ProcessEnded, ProcessPool, WorkerProcess
from ..base.worker_bounds import GRACE, bound_memory, end_with_run, lacked_memory, leave_signals_to_the_run
from .media_cache import SLICE_BYTES, Slices

log = logging.getLogger("fluxjax.data")
CLOSED = "the store of media is closed"
# Is given the medium and each of its slices: its number, and its patches `[P, 3, n]` (uint8). What it raises ends the
# decoding.
Keep: TypeAlias = Callable[[Medium, int, np.ndarray], None]


@dataclasses.dataclass(frozen=True)
class DecodeJob:
    """A medium to decode: all of it, or of a known `medium` the slices `first .. last - 1`."""

    name: str  # in messages
    kind: str  # "image" or "video"
    source: Source
    medium: Medium | None = None
    first: int = 0
    last: int = 0
    slice_bytes: int = SLICE_BYTES

    def slices(self, medium: Medium, settings: MediaSettings) -> Slices:
        return Slices.of(medium, settings.patch_bytes, self.slice_bytes)

    def to_message(self) -> dict[str, Any]:
        """The job as values that msgpack knows."""
        return {**vars(self), "medium": self.medium and dataclasses.astuple(self.medium)}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> DecodeJob:
        return cls(**{**message, "medium": message["medium"] and _medium_of(message["medium"])})


def _medium_of(values: Sequence[Any]) -> Medium:
    """The medium that `dataclasses.astuple` and msgpack made values of."""
    kind, grid, *rest = values
    return Medium(kind, tuple(grid), *rest)


def decoded(settings: MediaSettings, job: DecodeJob) -> tuple[Medium, np.ndarray]:
    """Decodes a job in this thread: returns the medium, and the patches `[P, 3, n]` (uint8) that the job asks for.
    Raises MediaError, whatever is wrong with the file, and MemoryError."""
    try:
        if job.medium is None:
            return settings.load(job.kind, job.source)
        span = job.slices(job.medium, settings).span(job.first, job.last)
        return job.medium, settings.load_pairs(job.source, job.medium, *span)
    except MediaError as error:
        raise type(error)(job.name, error.reason) from error
    except MemoryError:
        raise
    except Exception as error:  # a decoder's surprise about one file must not end the run
        raise MediaUnavailable(job.name, f"failed with {type(error).__name__}: {error}") from error


class ThreadDecoders:
    """Each thread that asks decodes itself: nothing is started, and nothing can be killed."""

    def __init__(self, settings: MediaSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._load = PoolLoad(waiting=0, busy=0, killed=0, seconds=0.0)

    def decode(self, job: DecodeJob, keep: Keep, *, urgent: bool = False) -> Medium:
        """Decodes a job in blocking. Raises MediaError, and whatever `keep` raises."""
        self._count(busy=1)
        begin = time.monotonic()
        try:
            medium, patches = decoded(self.settings, job)
        finally:
            self._count(busy=-1, seconds=time.monotonic() - begin)
        for number, part in enumerate(job.slices(medium, self.settings).cut(patches), job.first):
            keep(medium, number, part)
        return medium

    def _count(self, busy: int, seconds: float = 0.0) -> None:
        with self._lock:
            now = self._load
            self._load = now._replace(busy=now.busy + busy, seconds=now.seconds + seconds)

    def load(self) -> PoolLoad:
        return self._load

    def close(self) -> None: ...


class DecoderPool:
    """Up to `count` processes that decode: one that takes too long, or too much memory, is killed, and costs that one
    file. Has the methods of `ThreadDecoders`."""

    def __init__(self, settings: MediaSettings, count: int, *, seconds: float, memory_gib: float) -> None:
        """`seconds` and `memory_gib` bound each file."""
        self.settings = settings
        self.seconds = seconds
        self.memory_gib = memory_gib
        self._pool = ProcessPool(self._start, count, CLOSED)

    def decode(self, job: DecodeJob, keep: Keep, *, urgent: bool = False) -> Medium:
        """Decodes a job in one of the processes, urgent jobs before others. Raises DataError where no process can be
        started."""
        with self._pool.turn(urgent):
            try:
                return self._attempt(job, keep)
            except ProcessEnded as error:  # perhaps by what has nothing to do with the file
                log.warning("%s: decoding it ended the process (%s); it is tried once more", job.name, error)
            try:
                return self._attempt(job, keep)
            except ProcessEnded as error:
                raise MediaUnavailable(job.name, f"decoding it ended the process ({error})") from None

    def load(self) -> PoolLoad:
        return self._pool.load()

    def close(self) -> None:
        """Ends the processes. Threads that wait for a process get a RuntimeError."""
        self._pool.close()

    def _attempt(self, job: DecodeJob, keep: Keep) -> Medium:
        """Decodes the job in a process. Raises ProcessEnded where the process ends meanwhile."""
        process, answered = self._pool.take(), False
        begin = time.monotonic()
        try:
            process.channel.send(job.to_message(), seconds=self.seconds)
            reply, _ = process.channel.receive(self.seconds)
            if "memory" in reply:
                reason = f"decoding needs more than {self.memory_gib:g} GiB of memory"
                raise MediaUnavailable(job.name, reason)
            if "reason" in reply:
                answered = True
                raise MediaError(job.name, reply["reason"])
            medium = _medium_of(reply["medium"])
            last = job.last or len(job.slices(medium, self.settings))
            for number in range(job.first, last):
                _, patches = process.channel.receive(self.seconds)
                assert patches is not None
                keep(medium, number, patches)
            answered = True
            return medium
        except TimeoutError:
            process.kill()
            raise MediaUnavailable(job.name, f"decoding took more than {self.seconds:g} s") from None
        except EOFError:
            raise ProcessEnded(process.end()) from None
        finally:
            self._pool.give_back(process, answered, time.monotonic() - begin)

    def _start(self) -> WorkerProcess:
        memory = int(self.memory_gib * (1 << 30))
        begin = {"settings": self.settings.to_json(), "seconds": self.seconds, "memory": memory}
        with contextlib.suppress(ProcessEnded):  # memory was short for a moment, perhaps
            return WorkerProcess("fluxjax.data.decoders", begin)
        try:
            return WorkerProcess("fluxjax.data.decoders", begin)
        except (ProcessEnded, OSError) as error:
            reason = f"a process that decodes can't be started: {error}; what it said stands above"
            raise DataError(f"data.workers: {reason}") from error


def main(descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor))
    leave_signals_to_the_run()
    end_with_run(descriptor)
    begin, _ = channel.receive()
    settings, seconds = MediaSettings.from_json(begin["settings"]), begin["seconds"]
    bound_memory(begin["memory"])
    channel.send({"ready": os.getpid()})
    with contextlib.suppress(EOFError):
        while True:
            _answer(channel, settings, DecodeJob.of_message(channel.receive()[0]), seconds)


def _answer(channel: Channel, settings: MediaSettings, job: DecodeJob, seconds: float) -> None:
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
        medium, patches = decoded(settings, job)
    except MemoryError:
        channel.send({"memory": True})
        return
    except MediaError as error:
        channel.send({"memory": True} if lacked_memory(error) else {"reason": error.reason})
        return
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    channel.send({"medium": dataclasses.astuple(medium)})
    for part in job.slices(medium, settings).cut(patches):
        channel.send({}, part)


if __name__ == "__main__":
    main(int(sys.argv[1]))
