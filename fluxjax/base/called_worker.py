"""`python -m fluxjax.base.called_worker DESCRIPTOR`: a process that calls one function for the run that started it.

The run sends the process over a socket the name of the function to call, then one argument at a time; see
`worker_pool.py`. Only the function's module may import JAX, not this file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .errors import said
from .process_channel import Channel
from .worker_bounds import GRACE, bound_memory, end_with_run, lacked_memory, leave_signals_to_the_run


def main(descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor))
    leave_signals_to_the_run()
    end_with_run(descriptor)
    begin, _ = channel.receive()
    sys.path.extend(path for path in begin["path"] if path not in sys.path)
    try:
        function = found(begin["function"])
        if begin["made_with"] is not None:
            function = function(begin["made_with"])
    except Exception as error:  # whatever the module raises as it is imported
        channel.send({"failed": f"{type(error).__name__}: {error}"})
        return
    bound_memory(begin["memory"])
    channel.send({"ready": os.getpid()})
    with contextlib.suppress(EOFError):
        while True:
            job, _ = channel.receive()
            _answer(channel, function, job)


def found(path: str) -> Callable[[Any], Any]:
    """Returns the function at `module:function`. Raises the errors of importing it."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _answer(channel: Channel, function: Callable[[Any], Any], job: Mapping[str, Any]) -> None:
    number, process = job["number"], os.getpid()
    reply: dict[str, Any]
    try:
        signal.setitimer(signal.ITIMER_REAL, job["seconds"] + GRACE)
        reply = {"result": function(job["argument"])}
    except BaseException as error:  # includes SystemExit: the run gets an error, not the end of the process
        reply = {"memory": True} if lacked_memory(error) else {"error": said(error)}
    finally:
        if os.getpid() != process:  # a child that the function forked: only its parent answers
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        channel.send({"number": number, **reply})
    except (TypeError, ValueError, OverflowError) as error:
        channel.send({"number": number, "error": f"returned what can't be sent: {error}"})


if __name__ == "__main__":
    main(int(sys.argv[1]))
