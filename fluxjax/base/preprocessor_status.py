"""The state of preprocessors and of their media, as process 0 sees it and as users see it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class PreprocessorStatus:
    """A preprocessor at one moment. The numbers that it reports itself are some seconds old; their totals continue when
    the preprocessor is started again. `memory_bytes` is 0 while it is down."""

    name: str
    up: bool
    looks: int  # media that it was asked to look at, and did
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
    LOST = "lost"  # a preprocessor; no medium


class Transition(NamedTuple):
    key: Hashable  # a medium; empty: the transition of a preprocessor
    place: str  # the preprocessor
    stage: MediumStage
    time: float
