"""Decides the next actions of a run, as a pure state machine (`machine.py`). Each policy is a file in `policies/`."""

from .ledger import CoordinatorError as CoordinatorError
from .ledger import Ledger as Ledger
from .ledger import PromptStage as PromptStage
from .machine import Coordinator as Coordinator
from .machine import SchedulingPolicy as SchedulingPolicy
from .machine import Settings as Settings
from .policies.rounds import EngineLost as EngineLost
from .policies.rounds import Synchronous as Synchronous
