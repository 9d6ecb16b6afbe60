"""Decodes media, in the calling thread or in a pool of processes.

JAX is not imported here.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.processing.media_file import MediaUnavailable, Medium, Source

from ..base.errors import DataError
from ..base.process_channel import WithArrays
from ..base.worker_pool import PoolLoad, WorkerAbsent, WorkerEnded, WorkerError, WorkerMemory, WorkerPool, WorkerTimeout
from ..base.worker_process import lacked_memory
from .media_cache import SLICE_BYTES, Slices

log = logging.getLogger("fluxjax.data")
# Takes the medium, a slice's number, and the slice's patches `[P, 3, n]` (uint8). An error that a `Keep` raises ends
# the job.
Keep: TypeAlias = Callable[[Medium, int, np.ndarray], None]


@dataclasses.dataclass(frozen=True)
class DecodeJob:
    """A medium to decode, completely if `medium` is None, else only the slices `first` to `last - 1`."""

    name: str  # the medium's name in messages
    kind: str  # "image" or "video"
    source: Source
    medium: Medium | None = None
    first: int = 0
    last: int = 0
    slice_bytes: int = SLICE_BYTES

    def slices(self, medium: Medium, settings: MediaSettings) -> Slices:
        return Slices.of(medium, settings.patch_bytes, self.slice_bytes)

    def to_message(self) -> dict[str, Any]:
        """Returns the job as types of msgpack."""
        return {**vars(self), "medium": self.medium and dataclasses.astuple(self.medium)}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> DecodeJob:
        return cls(**{**message, "medium": message["medium"] and _medium_of(message["medium"])})


def _medium_of(values: Sequence[Any]) -> Medium:
    """Returns the medium from the values of `dataclasses.astuple`. Msgpack has turned tuples into lists."""
    kind, grid, seconds, seekable, times = values
    return Medium(kind, tuple(grid), seconds, seekable, tuple(times))


def decoded(settings: MediaSettings, job: DecodeJob) -> tuple[Medium, np.ndarray]:
    """Decodes a job in this thread. Returns the medium, and the patches `[P, 3, n]` (uint8) that the job asks for.
    Raises MediaError for any fault of the file, and MemoryError."""
    try:
        if job.medium is None:
            return settings.load(job.kind, job.source)
        span = job.slices(job.medium, settings).span(job.first, job.last)
        return job.medium, settings.load_pairs(job.source, job.medium, *span)
    except MediaError as error:
        raise type(error)(job.name, error.reason) from error
    except MemoryError:
        raise
    except Exception as error:  # an unexpected error about one file must not end the run
        raise MediaUnavailable(job.name, f"failed with {type(error).__name__}: {error}") from error


class ThreadDecoders:
    """Decodes in the calling thread. A decoding cannot be killed."""

    def __init__(self, settings: MediaSettings) -> None:
        self.settings = settings

    def decode(self, job: DecodeJob, keep: Keep, *, urgent: bool = False) -> Medium:
        """Decodes a job and returns its medium. Raises MediaError, MemoryError, and the errors of `keep`."""
        medium, patches = decoded(self.settings, job)
        for number, part in enumerate(job.slices(medium, self.settings).cut(patches), job.first):
            keep(medium, number, part)
        return medium

    def load(self) -> PoolLoad:
        return PoolLoad()

    def close(self) -> None: ...


class DecoderPool:
    """Decodes in up to `count` processes. A process that exceeds the bounds of time or memory is killed, and its job
    raises MediaError. Has the methods of `ThreadDecoders`."""

    def __init__(self, settings: MediaSettings, count: int, *, seconds: float, memory_gib: float) -> None:
        """`seconds` and `memory_gib` bound the decoding of each file."""
        path, name, made_with = f"{__name__}:decoding_function", "the store of media", settings.to_json()
        self._workers = WorkerPool(
            path, count, name=name, made_with=made_with, patient=False, seconds=seconds, memory_gib=memory_gib
        )
        self.load, self.close = self._workers.load, self._workers.close

    def decode(self, job: DecodeJob, keep: Keep, *, urgent: bool = False) -> Medium:
        """Decodes a job in a process, urgent ones first. Raises MediaError, DataError, and what `keep` raises."""
        try:
            return self._attempt(job, keep, urgent)
        except WorkerEnded as error:  # the file may not be the cause
            log.warning("%s: decoding it ended the process (%s); it is tried once more", job.name, error.how)
        try:
            return self._attempt(job, keep, urgent)
        except WorkerEnded as error:
            raise MediaUnavailable(job.name, f"decoding it ended the process ({error.how})") from None

    def _attempt(self, job: DecodeJob, keep: Keep, urgent: bool) -> Medium:
        def received(values: Sequence[Any], number: int, patches: np.ndarray) -> None:
            keep(_medium_of(values), job.first + number, patches)

        call = functools.partial(self._workers.call, job.to_message(), urgent=urgent, received=received)
        try:
            try:
                reply = call()
            except WorkerAbsent:  # perhaps memory was short for a moment
                reply = call()
        except WorkerAbsent as error:
            reason = f"a process that decodes can't be started: {error.why}; the output of the process is above"
            raise DataError(f"data.workers: {reason}") from error
        except WorkerTimeout:
            reason = f"decoding took more than {self._workers.seconds:g} s"
            raise MediaUnavailable(job.name, reason) from None
        except WorkerMemory as error:
            raise MediaUnavailable(job.name, f"decoding {error.reason}") from None
        except WorkerError as error:
            raise MediaUnavailable(job.name, f"failed with {error}") from None
        if "reason" in reply:
            raise MediaError(job.name, reply["reason"])
        return _medium_of(reply)


def decoding_function(settings_fields: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Returns the function that decodes jobs in a process: into a medium and its slices, or the reason why it can't."""
    settings = MediaSettings.from_json(dict(settings_fields))

    def decoding(message: Mapping[str, Any]) -> Any:
        job = DecodeJob.of_message(message)
        try:
            medium, patches = decoded(settings, job)
        except MediaError as error:
            if lacked_memory(error):
                raise
            return {"reason": error.reason}
        return WithArrays(dataclasses.astuple(medium), list(job.slices(medium, settings).cut(patches)))

    return decoding
