"""A process that calls a function for each argument that a run sends, within bounds of memory and time.

`WorkerPool` starts the process as `python -m fluxjax.base.worker_process DESCRIPTOR`. DESCRIPTOR is the number
of a socket that connects the process with the pool. The process ignores SIGINT and SIGTERM, and ends with the run. The
function's module may import JAX, but this file must not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import pkgutil
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import said
from .process_channel import Channel, WithArrays

GRACE = 10.0  # seconds beyond a job's time bound; then the system ends this process, unless the run has ended it
FIRST_VICTIM = "500"  # added to this process's score; Linux kills the process with the highest score if memory runs out


def main(descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor))
    # A terminal or Slurm sends these signals to every process of a job, but the run ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_run(descriptor)
    begin, _ = channel.receive()
    sys.path.extend(path for path in begin["path"] if path not in sys.path)
    try:
        function = pkgutil.resolve_name(begin["function"])
        if begin["made_with"] is not None:
            function = function(begin["made_with"])
    except Exception as error:  # the user's module may raise anything
        channel.send({"failed": f"{type(error).__name__}: {error}"})
        return
    bound_memory(begin["memory"])
    channel.send({"ready": os.getpid()})
    with contextlib.suppress(EOFError):
        while True:
            job, _ = channel.receive()
            _answer(channel, function, job)


def _answer(channel: Channel, function: Callable[[Any], Any], job: Mapping[str, Any]) -> None:
    number, process = job["number"], os.getpid()
    reply: dict[str, Any]
    arrays: Sequence[np.ndarray] = ()
    try:
        signal.setitimer(signal.ITIMER_REAL, job["seconds"] + GRACE)
        result = function(job["argument"])
        result, arrays = result if isinstance(result, WithArrays) else (result, ())
        reply = {"result": result, "arrays": len(arrays)}
    except BaseException as error:  # BaseException includes SystemExit, after which the process should go on
        reply = {"memory": True} if lacked_memory(error) else {"error": said(error)}
    finally:
        if os.getpid() != process:  # this is a child that the function forked, and only the parent answers
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        channel.send({"number": number, **reply})
    except (TypeError, ValueError, OverflowError) as error:
        channel.send({"number": number, "error": f"returned a value that can't be sent: {error}"})
        return
    for array in arrays:
        channel.send({}, array)


def end_with_run(descriptor: int) -> None:
    """Starts a thread that ends this process at once when the other end of the socket `descriptor` is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # only a closed connection wakes the poll

    def end_when_closed() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=end_when_closed, daemon=True, name="end-with-run").start()


def bound_memory(allowed: int) -> None:
    """Bounds the address space to its present size plus `allowed` bytes, where the system can, unless `allowed` is 0. A
    crash leaves no core file. If memory runs out, the system kills this process, not the run."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if allowed:
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + allowed
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)


def lacked_memory(error: BaseException | None) -> bool:
    """Says whether an error, or one of its causes, means a lack of memory. Libraries raise errors of many kinds."""
    while error is not None:
        # EAGAIN means that there is no memory for a thread's stack.
        refused = isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN)
        if refused or isinstance(error, MemoryError) or "out of memory" in said(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
