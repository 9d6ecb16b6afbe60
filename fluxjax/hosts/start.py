"""Joins the other processes of a run."""

from __future__ import annotations

import os
import threading

from sharding.links import LinkError, Links, initialize, leave

from ..base.errors import LOST
from ..config import DistributedConfig
from .cluster import found
from .gang import Gang

START_SECONDS = 300.0  # all processes must have connected by then
SILENCE = 15.0  # seconds after which a process of which nothing is heard is taken for lost
GRACE = 5.0  # seconds in which a process ends itself when another has failed; the supervisor waits for twice as long


def join(settings: DistributedConfig) -> tuple[Gang, Links | None]:
    """Returns the gang of this process, and its links to the others; a gang of one process, without links, where
    neither the settings nor the cluster name others. Must be called before JAX is used.

    Raises LinkError if the processes do not find each other: one may have died. Ends this process with `LOST` if they
    have not after five minutes, or `progress_timeout` seconds if these are fewer: a wait within JAX can't be given up.
    """
    settings = found(settings, os.environ)
    if settings.processes == 1:
        return Gang(), None
    here = f"distributed.coordinator is {settings.coordinator}: process {settings.process} of {settings.processes}"
    limit_seconds = min(START_SECONDS, settings.progress_timeout)
    late = LinkError(
        f"{here} has waited {limit_seconds:g} s for the others, and not all have "
        "come: see which of them is not running, or says something else"
    )
    limit = threading.Timer(limit_seconds, leave, (late, None, LOST))
    limit.daemon = True
    limit.start()
    try:
        # JAX ends the process with a stack trace when its own time is over.
        initialize(
            settings.coordinator,
            settings.processes,
            settings.process,
            initialization_timeout=int(limit_seconds) + 60,
        )
        links = Links(timeout=SILENCE, grace=GRACE)
    except (LinkError, RuntimeError, OSError) as error:
        raise LinkError(f"{here} does not reach the others: {' '.join(str(error).split())[:300]}") from error
    finally:
        limit.cancel()
    return Gang(links, settings.progress_timeout), links
