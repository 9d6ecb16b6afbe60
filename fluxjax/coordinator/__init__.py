"""Decides what happens when, as a pure state machine: see `machine.py`; a policy is a file of its own."""

from .ledger import CoordinatorError, Ledger, Skipped, Stage
from .machine import Coordinator, Policy, Settings
from .synchronous import EngineLost, Synchronous

__all__ = [
    "Coordinator",
    "CoordinatorError",
    "EngineLost",
    "Ledger",
    "Policy",
    "Settings",
    "Skipped",
    "Stage",
    "Synchronous",
]
