"""The promises of each policy, checked on the trace of a run: `base.Promises` says how."""

from fluxjax.config import Config, Policy
from fluxjax.coordinator.machine import Settings

from .adaptive_async_promises import AdaptiveAsyncPromises
from .base import Promises
from .rounds_promises import AprilPromises, SynchronousPromises, TailBatchingPromises

_PROMISES: dict[Policy, type[Promises]] = {
    Policy.SYNCHRONOUS: SynchronousPromises,
    Policy.TAIL_BATCHING: TailBatchingPromises,
    Policy.APRIL: AprilPromises,
    Policy.ADAPTIVE_ASYNC: AdaptiveAsyncPromises,
}


def make_promises(config: Config, settings: Settings) -> Promises:
    """Returns the promises of the policy of `config`; `settings` are the coordinator's."""
    return _PROMISES[config.policy.name](config, settings)


__all__ = ["Promises", "make_promises"]
