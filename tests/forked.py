"""Starts Python processes whose imports are done: forks of a server that has imported what a run needs, JAX included.

A run of a tiny model imports for a third of its processor time. `forked(command, ...)` is
`subprocess.Popen(command, ...)`, and the process is a child of this one as it would be otherwise: its status, its
signals and its processor time are read in the same way. The server forks before JAX has looked for devices, so that
flags of XLA, devices and folders of programs are those of the new process.

Only `python -m MODULE` and `python FILE.py` of this interpreter are forked, on Linux; everything else is started as
ever, and so is all where `FLUXJAX_TESTS_FORK=0`. What `fluxjax.launch` starts is forked, too, by a server of its own,
which is called `SERVER` among its children. What is to end with its parent (`rollout/local_server.py`) does so as a
fork, too; with the fixture `forked_servers`, that is every rollout server.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
BOUND = ROOT / "rollout" / "local_server.py"
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # <linux/prctl.h>
SERVER = "fork-server"  # as /proc/PID/comm has it
# The variables that JAX reads while it is imported, and what a fork tells it instead.
JAX_VARIABLES: dict[str, Callable[[str], object]] = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": float,
    "JAX_COMPILATION_CACHE_DIR": str,
    "JAX_DISABLE_MOST_OPTIMIZATIONS": lambda text: text in ("1", "true", "True"),
}
# The first letters of variables that are read before a fork could change them.
FIXED = ("PYTHON", "OPENBLAS", "OMP_", "MALLOC_", "LD_", "JAX_", "ARROW_")


def collect_rarely() -> None:
    """Tracing makes many objects that live: a tenth of the processor time of tests went into looking through them."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


class ForkServer:
    """A process that forks on request. It ends when the process that uses it does."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._environment = dict(os.environ)
        self._lock = threading.Lock()

    @classmethod
    def new(cls) -> ForkServer:
        """Starts a process that imports what a run needs."""
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, __file__, str(there.fileno())]
            process = subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        server = cls(here)
        atexit.register(server.end, process)
        return server

    def end(self, process: subprocess.Popen) -> None:
        self._connection.close()
        process.wait()

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Says whether a fork with this environment is like a process that began with it."""
        fixed = {name for name in self._environment.keys() | environment.keys() if name.startswith(FIXED)}
        free = {*JAX_VARIABLES, "PYTHONPATH"}
        return all(self._environment.get(name) == environment.get(name) for name in fixed - free)

    def start(self, request: Mapping[str, object], files: Sequence[int]) -> int:
        """Returns the number of a new process, a child of this one, with these files as its standard ones."""
        words = json.dumps(request).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        with self._lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                self._connection.sendmsg([len(words).to_bytes(4, "big")], rights)
                self._connection.sendall(words)
                return int.from_bytes(_received(self._connection, 4), "big")
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)


class Forked(subprocess.Popen):
    """A process that is forked where `Popen` would begin a new one."""

    server: ForkServer | None = None

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):  # as of 3.11 to 3.13
        pipes, new_session = rest[3:9], rest[14]
        environment = dict(os.environ if env is None else env)
        Forked.server = server = Forked.server or ForkServer.new()
        if preexec_fn or pass_fds or not _is_python(args) or not server.can_start(environment):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore
            return
        request = {
            "words": [os.fspath(word) for word in args[1:]],
            "environment": environment,
            "folder": os.fspath(cwd or os.getcwd()),
            "new_session": bool(new_session),
        }
        given = pipes[0], pipes[3], pipes[5]  # its ends of standard input, output and errors; -1: those of this process
        self.pid = server.start(request, [number if file == -1 else file for number, file in enumerate(given)])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore


def _is_python(command: object) -> bool:
    """Says whether a command is one that can be forked: a module or a file of this interpreter."""
    words = [os.fspath(word) for word in command] if isinstance(command, Sequence) else []
    words = words[2:] if words[1:2] == [str(BOUND)] else words
    return len(words) > 1 and words[0] == sys.executable and (words[1] == "-m" or words[1].endswith(".py"))


def forked(command: Sequence[str | os.PathLike[str]], **how: Any) -> subprocess.Popen:
    if sys.platform != "linux" or os.environ.get("FLUXJAX_TESTS_FORK") == "0":
        return subprocess.Popen(command, **how)
    return Forked(command, **how)


# --- in the server ------------------------------------------------------------------------------


def _received(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("the fork server, or the process that uses it, has ended")
        parts += part
    return parts


def serve(connection: socket.socket) -> dict[str, Any]:
    """Forks for each request, and returns it in the new process. The server itself never returns."""
    _prctl(PR_SET_NAME, SERVER.encode())
    while True:
        size, rights, *_ = connection.recvmsg(4, socket.CMSG_SPACE(3 * 4))
        if not size:
            os._exit(0)  # the process that uses this server has ended
        files = array.array("i", rights[0][2])
        request = json.loads(_received(connection, int.from_bytes(size, "big")))
        # A child whose parent ends becomes a child of its nearest ancestor that adopts: the process that asked for it.
        number, adopted = os.pipe(), os.pipe()
        parent = os.fork()
        if parent == 0:
            if os.fork():
                os._exit(0)
            if request["new_session"]:  # before anybody knows its number, and may signal its group
                os.setsid()
            os.write(number[1], os.getpid().to_bytes(4, "big"))
            os.close(adopted[1])
            os.read(adopted[0], 1)  # returns when the parent has ended
            for target, file in enumerate(files):
                os.dup2(file, target)
        else:
            os.waitpid(parent, 0)
            connection.sendall(os.read(number[0], 4))
            os.close(adopted[1])
        for file in {*files, *number, adopted[0]}:
            if file > 2:
                os.close(file)
        if parent == 0:
            connection.close()
            _prctl(PR_SET_NAME, b"python")
            return request


def with_own_server(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lets this process start others by forks of a child of its own; returns what this process, or a fork, is to do."""
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        return serve(there)
    there.close()
    Forked.server = ForkServer(here)
    subprocess.Popen = Forked
    return request


def become(request: Mapping[str, Any]) -> None:
    """Runs in this process what `python WORDS` with the request's environment would."""
    import jax

    from rollout import local_server

    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, value in JAX_VARIABLES.items():
        if os.environ.get(name) != before.get(name):
            jax.config.update(name.lower(), value(os.environ[name]))
    os.chdir(request["folder"])
    words = list(request["words"])
    if words[0] == str(BOUND):
        local_server.bind()
        words[:2] = []  # and the interpreter
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], [request["folder"], *paths]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = words, [str(pathlib.Path(words[0]).resolve().parent), *paths]
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    # Python 3.12 and later warn of threads: those of OpenBLAS and of Arrow's allocator, which know how to be forked.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    import fluxjax.run.main  # noqa: F401
    import rollout.serve_app  # noqa: F401

    collect_rarely()
    try:
        work = serve(socket.socket(fileno=int(sys.argv[1])))
        if work["words"][:2] == ["-m", "fluxjax.launch"]:
            work = with_own_server(work)
    except KeyboardInterrupt:  # of the whole group of processes
        os._exit(130)
    become(work)
