"""Jobs, their limits and outcomes, and the protocol of a sandbox; sandboxes whose jobs are processes of this host.

`Process` feeds a job its input, bounds its output and ends it in time. `BareSubprocess` protects nothing: use it for
trusted code only.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ...base.call_slots import Slots
from ...base.process_tree import descendants, resident

log = logging.getLogger(__name__)

MIB = 1 << 20
_LOOK = 0.1  # seconds between two looks at a job's memory
_LINGER = 5.0  # seconds for pipes to close once the processes that held them are killed
_PARTNER = 0.5  # seconds in which the answering process may end by itself once the asking process has ended
_CHUNK = 1 << 16


class SandboxError(RuntimeError):
    """The sandbox itself did not work, so that the code was not tested. The message names the cause and a remedy."""


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """The bounds of one job. A job that exceeds a bound is ended, or its system call fails."""

    seconds: float = 10.0  # seconds of wall time
    cpu: float = 10.0  # seconds of CPU time of each process, rounded up
    memory: int = 512 * MIB  # bytes: address space of each process, resident memory of all processes together
    processes: int = 16  # processes and threads together
    disk: int = 16 * MIB  # bytes in /tmp, and the most bytes of a file
    files: int = 4096  # files in /tmp
    open_files: int = 64  # open files of each process
    output: int = MIB  # bytes of standard output, and of standard error


def resource_limits(limits: SandboxLimits) -> list[str]:
    """Returns the options of prlimit(1) that hold each process within these limits."""
    cpu = math.ceil(limits.cpu)
    return [
        f"--as={limits.memory}",
        f"--cpu={cpu}:{cpu + 1}",  # SIGXCPU, which can be ignored, then SIGKILL
        f"--nproc={limits.processes}",
        f"--fsize={limits.disk}",
        f"--nofile={limits.open_files}",
        "--core=0",
    ]


@dataclasses.dataclass(frozen=True)
class SandboxJob:
    """A command, the files in its working directory (read-only if the sandbox can), and its input."""

    command: tuple[str, ...]
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # names may have folders
    stdin: bytes = b""
    limits: SandboxLimits = dataclasses.field(default_factory=SandboxLimits)

    def __post_init__(self) -> None:
        for name in self.files:
            if name != os.path.normpath(name) or name.startswith(("/", "..")):
                raise ValueError(f"a job's file is named {name!r}; a path within its folder is needed, such as a/b.py")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a job. `reason` is empty unless the sandbox ended the job: `time`, `output`, `memory`, `files`, or
    `partner` if the other job of a conversation had ended."""

    exit: int  # exit status; 128 + the number of the signal that ended the job, as in shells
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    reason: str = ""

    @property
    def signal(self) -> int:
        """The number of the signal that ended the job, or 0. A job can imitate a signal by its exit status."""
        return max(self.exit - 128, 0) if self.exit <= 128 + 64 else 0


@runtime_checkable
class Sandbox(Protocol):
    """Runs untrusted jobs. A service on other machines can implement it, too: its methods take and return only data."""

    python: str  # the interpreter, as jobs name it

    async def run(self, job: SandboxJob) -> Outcome:
        """Runs a job. No process or file of the job remains, even after a cancellation. Raises `SandboxError`."""
        ...

    async def converse(self, asking: SandboxJob, answering: SandboxJob) -> tuple[Outcome, Outcome]:
        """Runs two jobs that reach each other only by text: the standard output of each is the standard input of the
        other. Both jobs are ended when the asking job ends. Raises `SandboxError`."""
        ...


@dataclasses.dataclass(frozen=True)
class Command:
    """A process to be started: its command, the file descriptors that it inherits, the folder in which it starts."""

    words: Sequence[str]
    limits: SandboxLimits
    descriptors: tuple[int, ...] = ()
    cwd: str | None = None
    path: str = os.defpath  # PATH, the only environment variable of the process


class Process:
    """A process and its descendants. `outcome` waits for the process; `end` kills the process and all descendants."""

    def __init__(self, process: asyncio.subprocess.Process, limits: SandboxLimits, began: float) -> None:
        self._process, self._limits, self._began = process, limits, began
        self._reason = ""

    @classmethod
    async def start(
        cls, command: Command, stdin: int = asyncio.subprocess.PIPE, stdout: int = asyncio.subprocess.PIPE
    ) -> Process:
        began = time.perf_counter()
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *command.words,
                stdin=stdin,
                stdout=stdout,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=command.descriptors,
                cwd=command.cwd,
                env={"PATH": command.path},
                start_new_session=True,
            )
        )
        try:
            return cls(await asyncio.shield(starting), command.limits, began)
        except asyncio.CancelledError:  # asyncio would kill only this process, not its children
            begun = cls(await starting, command.limits, began)
            begun.end("cancelled")
            await begun.outcome()
            raise

    def end(self, reason: str) -> None:
        """Kills the process and its descendants; the first reason counts. Does nothing once the process has ended."""
        if self._process.returncode is None:
            self._reason = self._reason or reason
            _signal(os.killpg, self._process.pid, signal.SIGSTOP)  # no new processes while they are counted
            # For a moment bubblewrap's child is in another process group, but not yet bound to die with its parent.
            for member in reversed(descendants(self._process.pid)[1:]):
                _signal(os.kill, member, signal.SIGKILL)
            _signal(os.killpg, self._process.pid, signal.SIGKILL)

    async def outcome(self, stdin: bytes = b"") -> Outcome:
        """Waits for the process, and kills it at its limits, or if this call is cancelled."""
        output = bytearray(), bytearray()
        streams = self._process.stdout, self._process.stderr
        reading = [
            asyncio.ensure_future(self._read(stream, kept))
            for stream, kept in zip(streams, output, strict=True)
            if stream is not None
        ]
        attending = [asyncio.ensure_future(self._feed(stdin)), asyncio.ensure_future(self._look_after())]
        waiting = asyncio.ensure_future(self._process.wait())
        try:
            left = self._limits.seconds - (time.perf_counter() - self._began)
            done, _ = await asyncio.wait({waiting}, timeout=max(left, 0))
            if not done:
                self.end("time")
        finally:
            self.end("cancelled")
            await asyncio.wait({waiting, *reading}, timeout=_LINGER)
            seconds = time.perf_counter() - self._began
            await _cancelled(*reading, *attending, waiting)
            self._process._transport.close()  # type: ignore[attr-defined]  # closes pipes that another process still holds
        code = self._process.returncode
        status = 128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code
        return Outcome(status, bytes(output[0]), bytes(output[1]), seconds, self._reason)

    async def _feed(self, data: bytes) -> None:
        if (pipe := self._process.stdin) is None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            pipe.write(data)
            await pipe.drain()
        pipe.close()

    async def _read(self, stream: asyncio.StreamReader, kept: bytearray) -> None:
        while chunk := await stream.read(_CHUNK):
            kept += chunk[: self._limits.output - len(kept)]
            if len(kept) == self._limits.output:
                self.end("output")  # further output is dropped

    async def _look_after(self) -> None:
        while self._process.returncode is None:
            await asyncio.sleep(_LOOK)
            members = descendants(self._process.pid)
            if resident(members) > self._limits.memory:
                self.end("memory")
            elif members and _files(members[-1]) > self._limits.files:
                self.end("files")


async def _converse(asking: Command, answering: Command) -> tuple[Outcome, Outcome]:
    """Runs two processes, each with the other's output as its input. Both are ended when the asking process ends."""
    (hear, answer), (listen, ask) = os.pipe(), os.pipe()
    async with contextlib.AsyncExitStack() as stack:
        with contextlib.ExitStack() as ends:  # closes this process's copies: else no job would see an end of file
            for end in (hear, answer, listen, ask):
                ends.callback(os.close, end)
            partner = await Process.start(answering, listen, answer)
            stack.callback(partner.end, "cancelled")
            process = await Process.start(asking, hear, ask)
        its_outcome = asyncio.ensure_future(partner.outcome())
        stack.push_async_callback(_cancelled, its_outcome)
        outcome = await process.outcome()
        await asyncio.wait({its_outcome}, timeout=_PARTNER)
        partner.end("partner")
        return outcome, await its_outcome


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)


def _files(pid: int) -> int:
    """Returns the number of files in a process's /tmp; 0 if it is the /tmp of this process."""
    try:
        there = os.statvfs(f"/proc/{pid}/root/tmp")
        return 0 if there.f_fsid == os.statvfs("/tmp").f_fsid else there.f_files - there.f_ffree
    except OSError:
        return 0


# --- sandboxes of processes -------------------------------------------------------------------------


class ProcessSandbox(abc.ABC):
    """Runs at most `slots` jobs (or conversations) at a time; further jobs wait. `python` is the interpreter of jobs,
    by default this process's. A virtual environment's jobs get the base interpreter, without its packages."""

    def __init__(self, python: str | None = None, slots: int = 8) -> None:
        self.python = os.path.realpath(python or sys._base_executable)  # type: ignore[attr-defined]
        self.slots = slots
        self._slots = Slots(slots)

    @abc.abstractmethod
    def _prepared(self, job: SandboxJob, number: int) -> contextlib.AbstractContextManager[Command]:
        """Prepares the command that runs a job. Jobs that run at once have different numbers, below 2 * `slots`."""

    def _checked(self, outcome: Outcome, command: Command) -> Outcome:
        """Returns the outcome of a job. Raises `SandboxError` if the sandbox itself failed."""
        return outcome

    async def run(self, job: SandboxJob) -> Outcome:
        async with self._slots.slot() as slot:
            with self._prepared(job, 2 * slot) as command:
                return self._checked(await (await Process.start(command)).outcome(job.stdin), command)

    async def converse(self, asking: SandboxJob, answering: SandboxJob) -> tuple[Outcome, Outcome]:
        async with self._slots.slot() as slot:
            with self._prepared(asking, 2 * slot) as command, self._prepared(answering, 2 * slot + 1) as its_command:
                outcome, its_outcome = await _converse(command, its_command)
                return self._checked(outcome, command), self._checked(its_outcome, its_command)


class BareSubprocess(ProcessSandbox):
    """Runs jobs with the rights of this process: jobs can read and write its files, use its network and outlive it.
    Time, output and resident memory are bounded; with prlimit also address space, CPU time, file size and open files.
    The number of processes is not bounded."""

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
            # --nproc is left out: it would bound all processes of this user.
            limits = [limit for limit in resource_limits(job.limits) if not limit.startswith("--nproc")]
            prefix = [] if (prlimit := shutil.which("prlimit")) is None else [prlimit, *limits, "--"]
            yield Command((*prefix, *job.command), job.limits, cwd=folder, path=os.environ.get("PATH", os.defpath))
