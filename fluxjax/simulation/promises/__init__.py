"""What each policy promises, checked on the trace of a run: see `base.py`. Each policy has a file of its own."""

from __future__ import annotations

from ...config import Config, Policy
from ...coordinator.machine import Settings
from .adaptive_async_promises import AdaptiveAsyncPromises
from .april_promises import AprilPromises
from .base import Promises
from .rounds_promises import SynchronousPromises
from .tail_batching_promises import TailBatchingPromises

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
