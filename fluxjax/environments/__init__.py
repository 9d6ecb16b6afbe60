"""Environments that answer the turns of a model, and the pool of processes in which environments live.

Importing this package imports neither JAX nor the pool, because processes of environments need neither.
"""

from typing import TYPE_CHECKING

from sharding.door import door

from .observation import Environment, EnvironmentFailure, Fault, Observation

if TYPE_CHECKING:
    from .environment_pool import EnvironmentLimits, EnvironmentPool, LiveEpisode, Observed

__all__ = [
    "Environment",
    "EnvironmentFailure",
    "EnvironmentLimits",
    "EnvironmentPool",
    "Fault",
    "LiveEpisode",
    "Observation",
    "Observed",
]
__getattr__ = door(__name__, environment_pool=("EnvironmentLimits", "EnvironmentPool", "LiveEpisode", "Observed"))
