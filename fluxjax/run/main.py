"""Runs `python -m fluxjax.train` after its command line is read."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping

from rollout.engine import EngineError, WeightsMismatch
from sharding.links import LinkError, Links, leave
from sharding.odc import OdcError

from ..base.errors import LOST, USER, DataError
from ..base.event_loop import hear_signals, take_signals
from ..base.process import use_compile_cache
from ..batch.composer import Team
from ..config import Config, ConfigError, DistributedConfig
from ..coordinator import CoordinatorError
from ..hosts.orders import OrderError
from ..report.metrics import process_log
from .callbacks import SettledHeap
from .checkpoint import ResumeError
from .trainer import FluxTrainer

# Errors that a user can mend. Any other error is a defect and keeps its traceback.
USER_ERRORS = (
    ConfigError,
    DataError,
    ResumeError,
    CoordinatorError,
    EngineError,
    OdcError,
    OSError,
    WeightsMismatch,
    LinkError,
    OrderError,
)

# Variables in which Open MPI and Slurm give the number of processes (`hosts.start`).
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def joined(settings: DistributedConfig, environment: Mapping[str, str]) -> Team:
    """Returns the team of all processes that settings or environment name. Raises the errors of `hosts.start.join`."""
    if settings.processes == 1 or not (settings.processes or any(environment.get(n, "1") != "1" for n in _COUNTS)):
        return Team()
    from ..hosts.start import join

    return join(settings)


def main(config: Config) -> int:
    """Trains, and returns the exit status. The status is 0 if the run is complete or was stopped on request, and `USER`
    for an error that the user can mend. If one of several processes fails, all processes end; `LOST` means that another
    process failed. A second Ctrl-C or SIGTERM, or a first before the trainer exists, ends all processes at once with
    status 128 + the signal's number."""
    use_compile_cache()
    links: Links | None = None

    def end_at_once(number: int) -> None:
        os.write(1, b"\x1b[?25h\n" * os.isatty(1))  # shows the cursor, which the display hides
        leave(LinkError(f"stopped at once by {signal.Signals(number).name}."), links, 128 + number)

    stops: list = []
    hear_signals(stops, end_at_once)
    try:
        gang = joined(config.distributed, os.environ)
        links = gang.links
        take_signals()
        if gang.process:
            stops.append(lambda: None)  # clusters also signal process 0; when it ends, this process ends
            from .follower import follow

            follow(gang, config.algorithm.name)
        else:
            with FluxTrainer(config, gang=gang) as trainer, process_log(trainer.run_dir, 0, gang.processes):
                stops.append(trainer.stop)
                trainer.fit(callbacks=[SettledHeap()])
    except USER_ERRORS as error:
        if links is not None:
            leave(error, links, LOST if isinstance(links.explain(error), LinkError | OdcError) else USER)
        print(f"error: {error}", file=sys.stderr)
        return LOST if isinstance(error, LinkError) else USER
    except BaseException as error:  # also for SystemExit, or the other processes would wait for ever
        if links is None:
            raise
        traceback.print_exc()
        leave(error, links)
    if links is not None:
        gang.close()
        links.barrier("end")
        links.close()
    return 0
