"""A sandbox of namespaces, which bubblewrap (https://github.com/containers/bubblewrap) makes for each job anew.

A job sees the interpreter and /usr, read-only, its files in /box, and a small /tmp. The host's network, processes,
users and other files are hidden. As root, bubblewrap needs no user namespace, and each running job has a user id of its
own. The processes of one job then do not count towards the limits of another job. Without root, bubblewrap makes a user
namespace. All capabilities are dropped, since a job of root could otherwise remount /usr and write to it. `seccomp.py`
refuses system calls that lead to new capabilities. (Without root, a job can harm the first process of its own sandbox.
That process has no more rights than the job.)
"""

import contextlib
import itertools
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

from ...base.errors import ConfigError
from . import seccomp
from .jobs import Command, Outcome, ProcessSandbox, SandboxError, SandboxJob, SandboxLimits, resource_limits

_BOX = "/box"
_SHARE_MEMORY = 1 << 20  # bytes of /dev/shm, for semaphores
_UIDS = 20_000, 58_000  # user ids that containers usually map
_BLOCK = 64  # a process whose id is larger by 1 starts this many user ids further
_taken = itertools.count()  # numbers of this process's sandboxes
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a response's reward must not change from run to run
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Bubblewrap(ProcessSandbox):
    """Runs jobs by bubblewrap. Raises `ConfigError` if bubblewrap is missing or cannot work here."""

    def __init__(self, python: str | None = None, slots: int = 8) -> None:
        super().__init__(python, slots)
        self._bwrap, self._root = self._means()
        first, last = _UIDS
        # Two ids a slot. Sandboxes of one process share no id; sandboxes of two processes on a host rarely share one.
        start = os.getpid() * _BLOCK + next(_taken) * 2 * slots
        self._uids = [first + (start + k) % (last - first) for k in range(2 * slots)]
        self._filter = seccomp.program()
        self._view = _view(pathlib.Path(self.python), self._root)
        self._check()

    def _means(self) -> tuple[list[str], bool]:
        """Returns bubblewrap's command, and whether this process is root. Raises `ConfigError` for missing commands."""
        for name in ("bwrap", "prlimit", "setpriv"):
            if shutil.which(name) is None:
                package = "bubblewrap" if name == "bwrap" else "util-linux"
                raise ConfigError(
                    f"sandbox is 'bubblewrap', but there is no command {name}: apt-get install {package} (or dnf). "
                    f"sandbox='subprocess' runs code without protection, for code that you trust"
                )
        return [str(shutil.which("bwrap"))], os.geteuid() == 0

    @contextlib.contextmanager
    def _prepared(self, job: SandboxJob, number: int) -> Iterator[Command]:
        """Prepares the command that runs a job, with its descriptors: the file for bubblewrap's report of the job's
        end, the filter of system calls, and the job's files."""
        with contextlib.ExitStack() as stack:
            descriptors = [stack.enter_context(_in_memory(content)) for content in (b"", self._filter)]
            options = ["--json-status-fd", str(descriptors[0]), "--seccomp", str(descriptors[1])]
            for name, content in job.files.items():
                descriptors.append(stack.enter_context(_in_memory(content)))
                options += ["--perms", "0444", "--file", str(descriptors[-1]), f"{_BOX}/{name}"]
            for folder, size in (("/tmp", job.limits.disk), ("/dev/shm", _SHARE_MEMORY)):
                options += ["--perms", "1777", "--size", str(size), "--tmpfs", folder]
            options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _BOX, "--"]
            become = _becoming(self._uids[number] if self._root else None, job.limits)
            words = (*self._bwrap, *self._view, *options, *become, *job.command)
            yield Command(words, job.limits, tuple(descriptors))

    def _checked(self, outcome: Outcome, command: Command) -> Outcome:
        """Raises `SandboxError` if bubblewrap reports no exit status: it ended before the job's command began."""
        if not outcome.reason and b'"exit-code"' not in os.pread(command.descriptors[0], 4096, 0):
            said = outcome.stderr.decode(errors="replace").strip()[:300]
            raise SandboxError(said or f"bubblewrap ended with status {outcome.exit}")
        return outcome

    def _check(self) -> None:
        """Runs the interpreter once. Raises `ConfigError`, with bubblewrap's message, if that fails."""
        with self._prepared(SandboxJob((self.python, "-I", "-c", "pass")), 0) as command:
            tried = subprocess.run(command.words, pass_fds=command.descriptors, capture_output=True, timeout=300)
        if tried.returncode:
            said = " ".join(tried.stderr.decode(errors="replace").split())[:300]
            raise ConfigError(
                f"sandbox is 'bubblewrap', which does not work here: {said or f'exit status {tried.returncode}'}. As "
                f"root it needs CAP_SYS_ADMIN; as another user, unprivileged user namespaces (sysctl "
                f"user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0) and an interpreter in a "
                f"folder that this user may read ({self.python})"
            )


def _view(python: pathlib.Path, root: bool) -> list[str]:
    """Returns the options for a job's namespaces, and for its read-only view of the host's programs and interpreter."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if root:  # to become another user; `setpriv` then drops these capabilities
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    else:
        options += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    options += ["--hostname", "sandbox", "--clearenv"]
    for name, value in _ENVIRONMENT.items():
        options += ["--setenv", name, value]
    options += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in map(pathlib.Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if folder.is_symlink():
            options += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            options += ["--ro-bind", str(folder), str(folder)]
    prefix = python.parent.parent
    if not prefix.is_relative_to("/usr"):
        for parent in reversed(prefix.parents[:-1]):  # bubblewrap would give these folders other modes
            options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--ro-bind", str(prefix), str(prefix)]
    return [*options, "--proc", "/proc", "--dev", "/dev", "--perms", "0755", "--dir", _BOX]


def _becoming(uid: int | None, limits: SandboxLimits) -> list[str]:
    """Returns the commands that set a job's user id (None: unchanged) and its limits."""
    limit = ["/usr/bin/prlimit", *resource_limits(limits), "--"]
    if uid is None:
        return limit
    become = f"/usr/bin/setpriv --reuid {uid} --regid {uid} --clear-groups --bounding-set -all --inh-caps -all"
    return [*become.split(), "--no-new-privs", *limit]


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("sandbox")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
