"""Joins the other processes of a run, which settings or environment variables of Open MPI or Slurm describe."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Mapping
from typing import TypeAlias

from sharding.links import LinkError, Links, initialize, leave

from ..base.errors import LOST
from ..batch.composer import Team
from ..config import ConfigError, DistributedConfig
from .gang import Gang

FIRST_PORT, PORTS = 61440, 4096  # the ports of JAX's own coordinator, above the ports that systems assign
START_SECONDS = 300.0  # seconds in which all processes must have connected
SILENCE = 15.0  # seconds of silence after which a process counts as lost
GRACE = 5.0  # seconds that a process takes to end itself after a failure; the supervisor waits twice as long


def join(settings: DistributedConfig) -> Team:
    """Returns a `Gang` with links to the other processes, or a `Team` if there are none. Must be called before JAX is
    used. Raises LinkError if the processes do not find each other. After five minutes, or after `progress_timeout`
    seconds if this is sooner, ends this process with `LOST`, because a wait within JAX can't be given up."""
    settings = found(settings, os.environ)
    if settings.processes == 1:
        return Team()
    here = f"distributed.coordinator is {settings.coordinator}: process {settings.process} of {settings.processes}"
    limit_seconds = min(START_SECONDS, settings.progress_timeout)
    late = LinkError(
        f"{here} has waited {limit_seconds:g} s for the other processes, and not all have come: see which process is "
        "not running, or has other settings in distributed"
    )
    limit = threading.Timer(limit_seconds, leave, (late, None, LOST))
    limit.daemon = True
    limit.start()
    try:
        # At its own time limit JAX would end the process with a stack trace.
        initialize(
            settings.coordinator, settings.processes, settings.process, initialization_timeout=int(limit_seconds) + 60
        )
        links = Links(timeout=SILENCE, grace=GRACE)
    except (LinkError, RuntimeError, OSError) as error:
        raise LinkError(f"{here} does not reach the other processes: {' '.join(str(error).split())[:300]}") from error
    finally:
        limit.cancel()
    return Gang(links, settings.progress_timeout)


def found(settings: DistributedConfig, environment: Mapping[str, str]) -> DistributedConfig:
    """Returns the settings, completed from the environment of Open MPI or Slurm. A rank of `mpirun`, or a task of
    `srun`, is a process of the run. Without Open MPI and Slurm, the run has one process. Raises ConfigError if Open MPI
    does not say where `mpirun` was started. On Kubernetes and SkyPilot, the command line has the settings (deploy/)."""
    if settings.processes:
        return settings
    for look in (_open_mpi, _slurm):  # Open MPI first, because its daemons are tasks in an allocation of Slurm
        if (place := look(environment)) is not None:
            coordinator, processes, process = place
            return dataclasses.replace(settings, coordinator=coordinator, processes=processes, process=process)
    return dataclasses.replace(settings, processes=1)


Place: TypeAlias = tuple[str, int, int]  # coordinator, processes, this process


def _slurm(environment: Mapping[str, str]) -> Place | None:
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks < 2 or "SLURM_PROCID" not in environment:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    step = int(environment["SLURM_JOB_ID"]) * 16 + int(environment.get("SLURM_STEP_ID", "0"))
    return f"{first_host(nodes)}:{_port(step)}", tasks, int(environment["SLURM_PROCID"])


def _open_mpi(environment: Mapping[str, str]) -> Place | None:
    """Returns the `Place` of this process under Open MPI. The coordinator is on the host where `mpirun` was started, so
    that rank 0 must run on this host (the default)."""
    ranks = int(environment.get("OMPI_COMM_WORLD_SIZE", "1"))
    if ranks < 2:
        return None
    uri, job = environment.get("OMPI_MCA_orte_hnp_uri", ""), environment.get("PMIX_NAMESPACE", "")
    if match := re.match(r"(\d+)\.\d+;tcp(?:://([^,:]+)|6://\[([^,\]]+))", uri):  # version 4 and older: job, addresses
        number, host = int(match[1]) >> 16, match[2] or f"[{match[3]}]"
    elif match := re.fullmatch(r"prterun-(.+)-(\d+)@\d+", job):  # from version 5 on: host, process id
        number, host = int(match[2]), match[1]
    else:
        raise ConfigError(
            f"Open MPI started {ranks} processes, but not by mpirun: set distributed.coordinator, .processes, .process"
        )
    return f"{host}:{_port(number)}", ranks, int(environment["OMPI_COMM_WORLD_RANK"])


def _port(number: int) -> int:
    return FIRST_PORT + number % PORTS


def first_host(nodes: str) -> str:
    """Returns the first host of a list as Slurm writes it: `a`, `a,b`, `node[001-004,007]`, `rack[2-3]node1`."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    assert match is not None  # every part of the pattern may be empty
    return "".join(part or "" for part in match.groups())
