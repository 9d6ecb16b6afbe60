"""What each policy promises, checked on the trace of a run: see `base.py`. Each policy has a file of its own."""

from __future__ import annotations

from ...config import Config
from ...coordinator.machine import Settings
from ...policy_config import Policy
from .adaptive_async import AdaptiveAsyncPromises
from .april import AprilPromises
from .base import Promises
from .rounds import SynchronousPromises
from .tail_batching import TailBatchingPromises

_PROMISES: dict[Policy, type[Promises]] = {
    Policy.SYNCHRONOUS: SynchronousPromises,
    Policy.TAIL_BATCHING: TailBatchingPromises,
    Policy.APRIL: AprilPromises,
    Policy.ADAPTIVE_ASYNC: AdaptiveAsyncPromises,
}


def make_promises(config: Config, settings: Settings) -> Promises:
    """Those of the policy of `config`; `settings` are the coordinator's."""
    return _PROMISES[config.policy.name](config, settings)


__all__ = ["Promises", "make_promises"]
