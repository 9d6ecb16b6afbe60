"""Decides the next actions of a run, as a pure state machine: see `machine.py`. Each policy is a file in
`policies/`."""

from typing import TYPE_CHECKING

from sharding.door import door

from .ledger import CoordinatorError, Ledger, PromptStage
from .machine import Coordinator, SchedulingPolicy, Settings

if TYPE_CHECKING:
    from .policies.adaptive_async import AdaptiveAsync
    from .policies.april import April
    from .policies.rounds import EngineLost
    from .policies.speculative_sync import SpeculativeSync
    from .policies.stream_trainer import StreamTrainer
    from .policies.synchronous import Synchronous
    from .policies.tail_batching import TailBatching

__all__ = [
    "AdaptiveAsync",
    "April",
    "Coordinator",
    "CoordinatorError",
    "EngineLost",
    "Ledger",
    "PromptStage",
    "SchedulingPolicy",
    "Settings",
    "SpeculativeSync",
    "StreamTrainer",
    "Synchronous",
    "TailBatching",
]
__getattr__ = door(
    f"{__name__}.policies",
    adaptive_async=("AdaptiveAsync",),
    april=("April",),
    rounds=("EngineLost",),
    speculative_sync=("SpeculativeSync",),
    stream_trainer=("StreamTrainer",),
    synchronous=("Synchronous",),
    tail_batching=("TailBatching",),
)
