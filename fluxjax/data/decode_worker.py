"""`python -m fluxjax.data.decode_worker DESCRIPTOR`: a process that decodes media for the run that started it.

The run tells the process over a socket what to decode, one file at a time, and the process ends with the run. JAX is
not imported here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from models.processing import MediaError
from models.processing.media import MediaSettings

from ..base.process_channel import Channel
from ..base.worker_bounds import GRACE, bound_memory, end_with_run, lacked_memory, leave_signals_to_the_run
from .decoders import DecodeJob, as_values, decoded


def main(descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor))
    leave_signals_to_the_run()
    end_with_run(descriptor)
    begin, _ = channel.receive()
    settings, seconds = MediaSettings.from_json(begin["settings"]), begin["seconds"]
    bound_memory(begin["memory"])
    channel.send({"ready": os.getpid()})
    with contextlib.suppress(EOFError):
        while True:
            _answer(channel, settings, DecodeJob.of_message(channel.receive()[0]), seconds)


def _answer(channel: Channel, settings: MediaSettings, job: DecodeJob, seconds: float) -> None:
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
        medium, patches = decoded(settings, job)
    except MemoryError:
        channel.send({"memory": True})
        return
    except MediaError as error:
        channel.send({"memory": True} if lacked_memory(error) else {"reason": error.reason})
        return
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    channel.send({"medium": as_values(medium)})
    for part in job.slices(medium, settings).cut(patches):
        channel.send({}, part)


if __name__ == "__main__":
    main(int(sys.argv[1]))
