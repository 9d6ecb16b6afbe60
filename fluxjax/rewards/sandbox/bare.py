"""A subprocess with limits: no sandbox, for code that is trusted."""

import contextlib
import logging
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator

from .job_slots import JobSlots
from .jobs import Outcome, SandboxJob, resource_limits
from .supervised import Command, Process, converse

log = logging.getLogger(__name__)


class BareSubprocess:
    """Runs jobs with the rights of this process: they read and write its files, use its network and may outlive it.

    Memory, CPU time, file size and output are bounded where there is a command prlimit; the number of processes is not.
    """

    def __init__(self, python: str | None = None, slots: int = 8) -> None:
        self.python = os.path.realpath(python or sys._base_executable)  # type: ignore[attr-defined]
        self.slots = slots
        self._slots = JobSlots(slots)
        log.warning(
            "sandbox='subprocess': the code of responses runs with the rights of this process, and can read and delete "
            "its files; sandbox='bubblewrap' protects them"
        )

    async def run(self, job: SandboxJob) -> Outcome:
        async with self._slots.slot():
            with _prepared(job) as command:
                return await (await Process.start(command)).outcome(job.stdin)

    async def converse(self, asking: SandboxJob, answering: SandboxJob) -> tuple[Outcome, Outcome]:
        async with self._slots.slot():
            with _prepared(asking) as command, _prepared(answering) as its_command:
                return await converse(command, its_command)


@contextlib.contextmanager
def _prepared(job: SandboxJob) -> Iterator[Command]:
    with tempfile.TemporaryDirectory(prefix="fluxjax-job-", ignore_cleanup_errors=True) as folder:
        for name, content in job.files.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        limits = [
            limit for limit in resource_limits(job.limits) if not limit.startswith("--nproc")
        ]  # of the whole user
        prefix = [] if (prlimit := shutil.which("prlimit")) is None else [prlimit, *limits, "--"]
        yield Command((*prefix, *job.command), job.limits, cwd=folder, path=os.environ.get("PATH", os.defpath))
