"""The bounds within which a process works for a run: its memory, its signals, and a life no longer than the run's.

The process calls these functions itself, before its work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import resource
import select
import signal
import threading
from collections.abc import Iterator

GRACE = 10.0  # seconds after which the system ends a job that the run did not end, because the run has ended itself
FIRST_VICTIM = "500"  # of 1000: the system kills this process before the run when memory runs out


def leave_signals_to_the_run() -> None:
    """Ignores the signals that a terminal or Slurm sends to every process of a job: the run decides."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_with_run(descriptor: int) -> None:
    """Ends this process at once, in any state, when the other end of the socket `descriptor` is closed."""
    threading.Thread(target=_end_when_closed, args=(descriptor,), daemon=True, name="end-with-run").start()


def _end_when_closed(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # only the hang-up wakes the poll
    poll.poll()
    os._exit(1)


def bound_memory(allowed: int) -> None:
    """Bounds this process to its present memory plus `allowed` bytes, where the system can; a crash leaves no core
    file."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + allowed
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)


def lacked_memory(error: BaseException) -> bool:
    """Says whether an error is caused by a lack of memory, which libraries report in many ways."""
    return any(
        isinstance(cause, MemoryError)
        or (
            isinstance(cause, OSError) and cause.errno in (errno.ENOMEM, errno.EAGAIN)
        )  # the latter for a thread's stack
        or "out of memory" in str(cause).lower()
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
