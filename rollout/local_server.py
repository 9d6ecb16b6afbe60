"""A rollout server as a process of this machine: its command, its port."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
import sys
from collections.abc import Mapping

from .engine import EngineError
from .local_process import LocalProcess

PLUGIN = pathlib.Path(__file__).parent / "sglang_plugin"


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


class LocalServer(LocalProcess):
    """Starts the command, again and again if need be, each time on another port and with its output behind `log`."""

    def __init__(self, command: ServerCommand, log: pathlib.Path) -> None:
        super().__init__(log)
        self._command = command
        self.address = ""

    def start(self) -> None:
        """Starts the server anew. Raises EngineError where there is no such program."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        words = self._command.words(port)
        try:
            self.begin(words, self._command.variables())
        except OSError as error:
            raise EngineError(f"can't start {words[0]}: {error}") from error
