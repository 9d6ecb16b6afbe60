"""The log of one process of several, in the folder of their run."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import socket
from collections.abc import Iterator

from ..hosts.gang import Gang

log = logging.getLogger(__name__)
FOLDER = "processes"


@contextlib.contextmanager
def process_log(run_dir: pathlib.Path, gang: Gang) -> Iterator[None]:
    """Writes what this process logs to `run_dir/processes/process-N.log`, appended to what the file holds: its own
    notes, warnings of libraries, a line a step, and the error that ends the body of the `with`. The terminal gets the
    warnings as before. Does nothing where the process is alone. Raises OSError if the file cannot be written."""
    if gang.alone:
        yield
        return
    (run_dir / FOLDER).mkdir(exist_ok=True)
    handler = logging.FileHandler(run_dir / FOLDER / f"process-{gang.process}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    notes = logging.getLogger(__name__.partition(".")[0])
    root = logging.getLogger()
    terminal = root.handlers or [logging.lastResort or logging.StreamHandler()]  # lastResort: while there is no other
    levels = {logger_or_handler: logger_or_handler.level for logger_or_handler in [notes, *terminal]}
    for terminal_handler in terminal:
        terminal_handler.setLevel(max(terminal_handler.level, logging.WARNING))
    notes.setLevel(logging.INFO)
    before, root.handlers = root.handlers, [*terminal, handler]
    try:
        log.info("process %d of %d, %s, pid %d", gang.process, gang.processes, socket.gethostname(), os.getpid())
        yield
        log.info("the run is over")
    except BaseException as error:
        log.info("ended by %s: %s", type(error).__name__, error)  # whoever catches it tells the terminal
        raise
    finally:
        root.handlers = before
        for logger_or_handler, level in levels.items():
            logger_or_handler.setLevel(level)
        handler.close()
