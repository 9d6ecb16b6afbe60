"""Environments that answer the turns of a model, in processes. Importing this package does not import JAX."""

from typing import TYPE_CHECKING

from sharding.door import door

from ..config.data import EnvironmentLimits
from .observation import Environment, EnvironmentFailure, Fault, Observation

if TYPE_CHECKING:
    from .environment_pool import EnvironmentPool, LiveEpisode, Observed

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
__getattr__ = door(__name__, environment_pool=("EnvironmentPool", "LiveEpisode", "Observed"))
