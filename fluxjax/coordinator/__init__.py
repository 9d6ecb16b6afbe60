"""Decides what happens when, as a pure state machine: see `machine.py`; a policy is a file of its own."""

from .adaptive_async import AdaptiveAsync
from .april import April
from .ledger import CoordinatorError, Ledger, Skipped, Stage
from .machine import Coordinator, Policy, Settings
from .rounds import EngineLost
from .speculative_sync import SpeculativeSync
from .stream_trainer import StreamTrainer
from .synchronous import Synchronous
from .tail_batching import TailBatching

__all__ = [
    "AdaptiveAsync",
    "April",
    "Coordinator",
    "CoordinatorError",
    "EngineLost",
    "Ledger",
    "Policy",
    "Settings",
    "Skipped",
    "SpeculativeSync",
    "Stage",
    "StreamTrainer",
    "Synchronous",
    "TailBatching",
]
