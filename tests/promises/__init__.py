"""The promises of each policy, checked on the trace of a run: `base.Promises` says how."""

from fluxjax.config import Config
from fluxjax.coordinator.machine import Settings

from .adaptive_async_promises import AdaptiveAsyncPromises
from .base import Promises, misplaced
from .rounds_promises import AprilPromises, SynchronousPromises, TailBatchingPromises

_PROMISES: dict[str, type[Promises]] = {
    "synchronous": SynchronousPromises,
    "tail_batching": TailBatchingPromises,
    "april": AprilPromises,
    "adaptive_async": AdaptiveAsyncPromises,
}


def make_promises(config: Config, settings: Settings) -> Promises:
    """Returns the promises of the policy of `config`; `settings` are the coordinator's."""
    return _PROMISES[config.policy.name](config, settings)


__all__ = ["Promises", "make_promises", "misplaced"]
