"""A rollout server as a process of this machine: its command, its log, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from .engine import EngineError

PLUGIN = pathlib.Path(__file__).parent / "sglang_plugin"
GRACE = 3.0  # seconds between SIGTERM and SIGKILL


@dataclasses.dataclass(frozen=True)
class ServerCommand:
    """The way to start a server of `model`, a checkpoint folder; `flags` are passed on as they are."""

    engine: str  # serve | sglang
    model: str
    python: str = sys.executable  # of the environment that has SGLang
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def words(self, port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port)]
        if self.engine == "serve":
            return [self.python, "-m", "rollout.serve", "--model", self.model, *where, *self.flags]
        base = [self.python, "-m", "sglang.launch_server", "--model-path", self.model, *where]
        return [*base, "--skip-server-warmup", "--weight-version", "none", *self.flags]

    def variables(self) -> dict[str, str]:
        """The environment of the process: SGLang finds our extension, and looks at its health without generating."""
        variables = {**os.environ, **self.environment}
        if self.engine == "sglang":
            paths = [str(PLUGIN), *filter(None, [self.environment.get("PYTHONPATH")])]
            variables |= {
                "PYTHONPATH": os.pathsep.join(paths),
                "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "fluxjax_media",
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
                "SGLANG_VLM_CACHE_SIZE_MB": "0",  # features of images would outlive the weights that they are of
            }
        return variables


class LocalServer:
    """Starts the command, again and again if need be, each time on another port and with its output behind `log`."""

    def __init__(self, command: ServerCommand, log: pathlib.Path) -> None:
        self._command, self.log = command, log
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self) -> None:
        """Raises EngineError where there is no such program."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, str(pathlib.Path(__file__).with_name("bound.py")), *self._command.words(port)]
        with self.log.open("ab") as out:
            try:
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=self._command.variables(),
                    start_new_session=True,  # Ctrl-C is for the run; and a group, so that all of its processes end
                )
            except OSError as error:
                raise EngineError(f"can't start {words[0]}: {error}") from error

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ended(self) -> int | None:
        """The exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Ends it and all of its processes: politely, then not. Blocks for a few seconds at most."""
        process = self._process  # another thread may kill it meanwhile
        if process is None:
            return
        _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _signal(process, signal.SIGKILL)
            process.wait()

    def last_words(self, lines: int = 5) -> str:
        """The end of its log, for messages."""
        return "\n".join(_tail(self.log, lines))


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(file: pathlib.Path, lines: int) -> Sequence[str]:
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - 8192))
            return log.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
