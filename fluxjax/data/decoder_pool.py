"""Processes that decode media: one that takes too long, or too much memory, is killed, and costs that one file."""

from __future__ import annotations

import contextlib
import logging
import time

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.processing.media_file import MediaUnavailable
from models.processing.outline import Medium

from ..base.errors import DataError
from ..base.process_pool import PoolLoad, ProcessEnded, ProcessPool, WorkerProcess
from .decoders import DecodeJob, Keep, medium_of

log = logging.getLogger("fluxjax.data")
CLOSED = "the store of media is closed"


class DecoderPool:
    """Up to `count` processes that decode; see `Decoders`."""

    def __init__(self, settings: MediaSettings, count: int, *, seconds: float, memory_gib: float) -> None:
        """`seconds` and `memory_gib` bound each file."""
        self.settings = settings
        self.seconds = seconds
        self.memory_gib = memory_gib
        self._pool = ProcessPool(self._start, count, CLOSED)

    def decode(self, job: DecodeJob, keep: Keep, *, urgent: bool = False) -> Medium:
        """Decodes a job in one of the processes, see `Decoders`. Raises DataError where no process can be started."""
        with self._pool.turn(urgent):
            try:
                return self._attempt(job, keep)
            except ProcessEnded as error:  # perhaps by what has nothing to do with the file
                log.warning("%s: decoding it ended the process (%s); it is tried once more", job.name, error)
            try:
                return self._attempt(job, keep)
            except ProcessEnded as error:
                raise MediaUnavailable(job.name, f"decoding it ended the process ({error})") from None

    def load(self) -> PoolLoad:
        return self._pool.load()

    def close(self) -> None:
        """Ends the processes. Threads that wait for a process get a RuntimeError."""
        self._pool.close()

    def _attempt(self, job: DecodeJob, keep: Keep) -> Medium:
        """Decodes the job in a process. Raises ProcessEnded where the process ends meanwhile."""
        process, answered = self._pool.take(), False
        begin = time.monotonic()
        try:
            process.channel.send(job.to_message(), seconds=self.seconds)
            reply, _ = process.channel.receive(self.seconds)
            if "memory" in reply:
                reason = f"decoding needs more than {self.memory_gib:g} GiB of memory"
                raise MediaUnavailable(job.name, reason)
            if "reason" in reply:
                answered = True
                raise MediaError(job.name, reply["reason"])
            medium = medium_of(reply["medium"])
            last = job.last or len(job.slices(medium, self.settings))
            for number in range(job.first, last):
                _, patches = process.channel.receive(self.seconds)
                assert patches is not None
                keep(medium, number, patches)
            answered = True
            return medium
        except TimeoutError:
            process.kill()
            raise MediaUnavailable(job.name, f"decoding took more than {self.seconds:g} s") from None
        except EOFError:
            raise ProcessEnded(process.end()) from None
        finally:
            self._pool.give_back(process, answered, time.monotonic() - begin)

    def _start(self) -> WorkerProcess:
        memory = int(self.memory_gib * (1 << 30))
        begin = {"settings": self.settings.to_json(), "seconds": self.seconds, "memory": memory}
        with contextlib.suppress(ProcessEnded):  # memory was short for a moment, perhaps
            return WorkerProcess("fluxjax.data.decode_worker", begin)
        try:
            return WorkerProcess("fluxjax.data.decode_worker", begin)
        except (ProcessEnded, OSError) as error:
            reason = f"a process that decodes can't be started: {error}; what it said stands above"
            raise DataError(f"data.workers: {reason}") from error
