"""Decodes media: what there is to decode, and who does, here the thread that asks; `decoder_pool.py` has processes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.processing.media_file import MediaUnavailable, Source
from models.processing.outline import Medium

from ..base.process_pool import PoolLoad
from .media_cache import SLICE_BYTES, Slices


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
        return {**vars(self), "medium": self.medium and as_values(self.medium)}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> DecodeJob:
        values = message["medium"]
        return cls(**{**message, "medium": values and medium_of(values)})


def as_values(medium: Medium) -> list[Any]:
    return [medium.kind, list(medium.grid), medium.seconds_per_grid, medium.seekable]


def medium_of(values: Sequence[Any]) -> Medium:
    """The medium that became `as_values`."""
    kind, (pairs, rows, columns), seconds, seekable = values
    return Medium(kind, (pairs, rows, columns), seconds, seekable)


# Is given the medium and each of its slices: its number, and its patches `[P, 3, n]` (uint8). What it raises ends the
# decoding.
Keep: TypeAlias = Callable[[Medium, int, np.ndarray], None]


class Decoders(Protocol):
    """Decode one file each at a time. Thread-safe."""

    def decode(self, job: DecodeJob, keep: Keep, *, urgent: bool = False) -> Medium:
        """Decodes in blocking, urgent jobs before others. Raises MediaError, and whatever `keep` raises."""
        ...

    def load(self) -> PoolLoad: ...

    def close(self) -> None: ...


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
