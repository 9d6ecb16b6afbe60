"""Joining the other processes of a run."""

from __future__ import annotations

import os

from sharding.links import LinkError, Links, initialize

from ..config import DistributedConfig
from .cluster import found
from .gang import Gang


def join(settings: DistributedConfig) -> tuple[Gang, Links | None]:
    """The gang of this process, and its links to the others; of one process where neither the settings nor the cluster
    name others. Before JAX is used. Raises LinkError where they do not find each other: one may have died."""
    settings = found(settings, os.environ)
    if settings.processes == 1:
        return Gang(), None
    try:
        initialize(settings.coordinator, settings.processes, settings.process)
        links = Links(timeout=settings.timeout)
    except (LinkError, RuntimeError, OSError) as error:
        raise LinkError(
            f"distributed.coordinator is {settings.coordinator}: process {settings.process} of {settings.processes} "
            f"does not reach the others: {' '.join(str(error).split())[:300]}"
        ) from error
    return Gang(links, settings.progress_timeout), links
