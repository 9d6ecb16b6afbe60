"""The state of one preprocessor, as process 0 knows it and as users see it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PreprocessorStatus:
    """A preprocessor as it is at a moment. What it says itself is some seconds old, and goes on where it was when the
    preprocessor is started again; `memory_bytes` and `spilled_bytes` are 0 while it is not there."""

    name: str
    up: bool
    looks: int  # media that it was asked to look at, and did
    bytes: int  # of slices that came from it to process 0
    queued: int  # media that wait to be decoded by it
    lost: int  # times
    decoded: int = 0  # media, for all processes of the run
    memory_bytes: int = 0  # of decoded media, in memory
    spilled_bytes: int = 0  # and on disk
    hits: int = 0  # slices that were asked for, and there
    misses: int = 0  # slices that had to be decoded again
    reason: str = ""  # why it is not there
