"""Jobs of sandboxes, their limits and their outcomes, and the protocol of a sandbox."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

MIB = 1 << 20


class SandboxError(RuntimeError):
    """The sandbox itself did not work, so that nothing is known about the code. The message says why, and the fix."""


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """The most that one job may use. A job that goes beyond is ended, and its outcome says so."""

    seconds: float = 10.0  # of wall time
    cpu: float = 10.0  # seconds of CPU time of each of its processes, rounded up
    memory: int = 512 * MIB  # bytes: address space of each process, resident memory of all of them together
    processes: int = 16  # threads count, too
    disk: int = 16 * MIB  # bytes in /tmp, and in /dev/shm
    files: int = 4096  # in /tmp
    open_files: int = 64  # of each process
    output: int = MIB  # bytes of standard output, and of standard error


def resource_limits(limits: SandboxLimits) -> list[str]:
    """Returns the options of prlimit(1) that hold each process within these limits."""
    cpu = math.ceil(limits.cpu)
    return [
        f"--as={limits.memory}",
        f"--cpu={cpu}:{cpu + 1}",  # a signal that can be ignored, then one that can't
        f"--nproc={limits.processes}",
        f"--fsize={limits.disk}",
        f"--nofile={limits.open_files}",
        "--core=0",
    ]


@dataclasses.dataclass(frozen=True)
class SandboxJob:
    """A command, the files that it finds in its working directory (read-only where the sandbox can), and its input."""

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
    `partner` where the job that it was talking to had ended."""

    exit: int  # exit status; 128 + the signal's number if one ended it, as shells say it
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    reason: str = ""

    @property
    def signal(self) -> int:
        """The number of the signal that ended the job; 0: none did. A job can pretend this by its exit status."""
        return max(self.exit - 128, 0) if self.exit <= 128 + 64 else 0


@runtime_checkable
class Sandbox(Protocol):
    """Runs jobs that nobody trusts. A service on other machines can stand here, too: all that crosses is data."""

    python: str  # the interpreter, as jobs name it

    async def run(self, job: SandboxJob) -> Outcome:
        """Runs a job. Nothing of it is left when this returns, or when it is cancelled. Raises `SandboxError`."""
        ...

    async def converse(self, asking: SandboxJob, answering: SandboxJob) -> tuple[Outcome, Outcome]:
        """Runs two jobs, neither of which can reach the other but by what it says: the standard output of each is the
        standard input of the other. Both are over when the asking one ends. Raises `SandboxError`."""
        ...
