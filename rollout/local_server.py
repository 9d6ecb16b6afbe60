"""Processes of this machine that a run starts, rollout servers above all: command, port, log, and end.

A process that outlives the run would keep its GPU. This file is therefore a program, too: on Linux, it binds its
process to the thread that started it, then becomes the command in its arguments.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

GRACE = 3.0  # seconds between SIGTERM and SIGKILL
PLUGIN = pathlib.Path(__file__).parent / "sglang_plugin"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class LocalProcess:
    """Starts commands, one after the other, and appends their output to `log`; see `bind`."""

    def __init__(self, log: pathlib.Path) -> None:
        self.log = log
        # The process; None before `begin` and after `kill`. Another thread may end the process meanwhile.
        self.running: subprocess.Popen[bytes] | None = None

    def begin(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """Runs a command in an environment. If there is no such program, the process ends, and `log` has the error."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self.running = subprocess.Popen(
                [sys.executable, __file__, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=variables,
                start_new_session=True,  # Ctrl-C reaches the run only; `_signal` reaches all processes of the command
            )

    def ended(self) -> int | None:
        """The exit status; None while the command runs, before `begin` and after `kill`."""
        return None if self.running is None else self.running.poll()

    def stop(self) -> None:
        """Ends the command and its processes by SIGTERM, after `GRACE` by SIGKILL. Blocks for a few seconds at most."""
        process = self.running  # another thread may kill it meanwhile
        if process is None:
            return
        _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def send(self, number: int) -> None:
        """Sends a signal to the command and all its processes."""
        if self.running is not None:
            _signal(self.running, number)

    def kill(self) -> None:
        process, self.running = self.running, None
        if process is not None:
            _signal(process, signal.SIGKILL)
            process.wait()

    def last_words(self, lines: int = 5) -> str:
        """The end of the log, for messages."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - 8192))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@dataclasses.dataclass(frozen=True)
class ServerCommand:
    """The way to start a server of `model`, a checkpoint folder; `flags` are passed on as they are."""

    engine: str  # serve | sglang
    model: str
    python: str = sys.executable  # Python of the environment that has SGLang
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def words(self, port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port)]
        if self.engine == "serve":
            return [self.python, "-m", "rollout.serve", "--model", self.model, *where, *self.flags]
        base = [self.python, "-m", "sglang.launch_server", "--model-path", self.model, *where]
        return [*base, "--skip-server-warmup", "--weight-version", "none", *self.flags]

    def variables(self) -> dict[str, str]:
        """The environment of the process. SGLang loads our extension, and its health checks generate nothing."""
        variables = {**os.environ, **self.environment}
        if self.engine == "sglang":
            paths = [str(PLUGIN), *filter(None, [self.environment.get("PYTHONPATH")])]
            variables |= {
                "PYTHONPATH": os.pathsep.join(paths),
                "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "fluxjax_media",
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
                "SGLANG_VLM_CACHE_SIZE_MB": "0",  # cached features of images would outlive their weights
                # Qwen3.5's states of convolutions are bfloat16 by default, also beside weights in float32.
                "SGLANG_MAMBA_CONV_DTYPE": dict(itertools.pairwise(self.flags)).get("--dtype", "bfloat16"),
            }
        return variables


class LocalServer(LocalProcess):
    """Starts the command, each time on a port that is free, and appends its output to `log`."""

    def __init__(self, command: ServerCommand, log: pathlib.Path) -> None:
        super().__init__(log)
        self._command = command
        self.address = ""

    def start(self) -> None:
        """Starts the server anew. Raises EngineError if no process can be started."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        words = self._command.words(port)
        try:
            self.begin(words, self._command.variables())
        except OSError as error:
            from .engine import EngineError  # late: this file is a program, too

            raise EngineError(f"can't start {words[0]}: {error}") from error


def bind() -> None:
    """On Linux, makes this process end when the thread that started it ends."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has ended meanwhile
            sys.exit(1)


if __name__ == "__main__":
    bind()
    os.execvp(sys.argv[1], sys.argv[1:])
