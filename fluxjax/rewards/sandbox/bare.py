"""Sandboxes whose jobs are processes of this host; and the barest, which is none, for code that is trusted."""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator

from ..calls import Slots
from .jobs import Command, Outcome, Process, SandboxJob, converse, resource_limits

log = logging.getLogger(__name__)


class ProcessSandbox(abc.ABC):
    """Runs at most `slots` jobs (or conversations) at a time; others wait for their turn.

    `python` is the interpreter that jobs find, by default the one that runs this, without its site packages where it is
    that of a virtual environment.
    """

    def __init__(self, python: str | None = None, slots: int = 8) -> None:
        self.python = os.path.realpath(python or sys._base_executable)  # type: ignore[attr-defined]
        self.slots = slots
        self._slots = Slots(slots)

    @abc.abstractmethod
    def _prepared(self, job: SandboxJob, number: int) -> contextlib.AbstractContextManager[Command]:
        """Prepares the command that runs a job. No two jobs of this sandbox have the same number, below 2 * `slots`, at
        a time."""

    def _checked(self, outcome: Outcome, command: Command) -> Outcome:
        """Returns the outcome of a job. Raises `SandboxError` where it is that of the sandbox itself."""
        return outcome

    async def run(self, job: SandboxJob) -> Outcome:
        async with self._slots.slot() as slot:
            with self._prepared(job, 2 * slot) as command:
                return self._checked(await (await Process.start(command)).outcome(job.stdin), command)

    async def converse(self, asking: SandboxJob, answering: SandboxJob) -> tuple[Outcome, Outcome]:
        async with self._slots.slot() as slot:
            with self._prepared(asking, 2 * slot) as command, self._prepared(answering, 2 * slot + 1) as its_command:
                outcome, its_outcome = await converse(command, its_command)
                return self._checked(outcome, command), self._checked(its_outcome, its_command)


class BareSubprocess(ProcessSandbox):
    """Runs jobs with the rights of this process: they read and write its files, use its network and may outlive it.

    Memory, CPU time, file size and output are bounded where there is a command prlimit; the number of processes is not.
    """

    def __init__(self, python: str | None = None, slots: int = 8) -> None:
        super().__init__(python, slots)
        log.warning(
            "sandbox='subprocess': the code of responses runs with the rights of this process, and can read and delete "
            "its files; sandbox='bubblewrap' protects them"
        )

    @contextlib.contextmanager
    def _prepared(self, job: SandboxJob, number: int) -> Iterator[Command]:
        with tempfile.TemporaryDirectory(prefix="fluxjax-job-", ignore_cleanup_errors=True) as folder:
            for name, content in job.files.items():
                path = pathlib.Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            # without the number of processes, which would be that of the whole user
            limits = [limit for limit in resource_limits(job.limits) if not limit.startswith("--nproc")]
            prefix = [] if (prlimit := shutil.which("prlimit")) is None else [prlimit, *limits, "--"]
            yield Command((*prefix, *job.command), job.limits, cwd=folder, path=os.environ.get("PATH", os.defpath))
