"""What a cluster tells its processes about each other, in their environment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..config import DistributedConfig

FIRST_PORT, PORTS = 61440, 4096  # where JAX's own coordinator would be: above those that systems give away


def found(settings: DistributedConfig, environment: Mapping[str, str]) -> DistributedConfig:
    """The settings, with what they leave open as Slurm says it: a task of `srun` is a process. Of one process where
    nobody says anything.

    Kubernetes substitutes what it knows in a command line (deploy/), so that nothing has to be found there."""
    if settings.processes:
        return settings
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks < 2 or "SLURM_PROCID" not in environment:
        return DistributedConfig(processes=1, timeout=settings.timeout)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    step = int(environment["SLURM_JOB_ID"]) * 16 + int(environment.get("SLURM_STEP_ID", "0"))
    return DistributedConfig(
        coordinator=f"{first_host(nodes)}:{FIRST_PORT + step % PORTS}",
        processes=tasks,
        process=int(environment["SLURM_PROCID"]),
        timeout=settings.timeout,
    )


def first_host(nodes: str) -> str:
    """The first of a list of hosts as Slurm writes it: `a`, `a,b`, `node[001-004,007]`, `rack[2-3]node1`."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    assert match is not None  # all of it may be empty
    return "".join(part or "" for part in match.groups())
