"""Decides the next actions of a run, as a pure state machine: see `machine.py`. Each policy is a file in
`policies/`."""

from .ledger import CoordinatorError, Ledger, PromptStage
from .machine import Coordinator, SchedulingPolicy, Settings
from .policies.rounds import EngineLost, Synchronous

__all__ = [
    "Coordinator",
    "CoordinatorError",
    "EngineLost",
    "Ledger",
    "PromptStage",
    "SchedulingPolicy",
    "Settings",
    "Synchronous",
]
