"""A process with PyTorch that sends weights for a trainer that has none (`torch_helper` is what runs there)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from models.hf import SINGLE

from ..engine import EngineError

START, ORDER = 120.0, 600.0  # seconds: to import PyTorch, for an order
HELPER = pathlib.Path(__file__).with_name("torch_helper.py")
BOUND = pathlib.Path(__file__).parents[1] / "bound.py"


class SenderError(EngineError):
    """The process is gone, or says that it could not. The message has its words."""


class TorchSender:
    """Starts the process; `kill` ends it. One order at a time. Raises SenderError where there is no such program."""

    def __init__(self, python: str) -> None:
        if shutil.which(python) is None:
            raise SenderError(f"can't start {python}: there is no such program")
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (`kill` closes it)
        command = [sys.executable, str(BOUND), python, str(HELPER)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._words}
        self._process = subprocess.Popen(command, **pipes)
        self.group = f"fluxjax-{self._process.pid}-{id(self)}"  # a name that no other has

    async def ready(self) -> None:
        """Waits for the process. Raises SenderError where the interpreter has no PyTorch."""
        await self._order({}, START)

    async def listen(self, address: str) -> int:
        """Opens a store through which a group of processes is joined; returns its port."""
        return int((await self._order({"do": "listen", "address": address}))["port"])

    async def join(self, group: str, backend: str, size: int) -> None:
        """Joins a group as rank 0; returns when all of its processes have joined."""
        await self._order({"do": "join", "name": group, "backend": backend, "size": size})

    async def broadcast(self, folder: pathlib.Path, names: Sequence[str]) -> None:
        """Sends these tensors of a checkpoint folder, as one bucket, to all of the group."""
        await self._order({"do": "broadcast", "file": str(folder / SINGLE), "names": names})

    def kill(self) -> None:
        """Ends the process. It may be called again."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._words):
            assert pipe is not None
            with contextlib.suppress(OSError):  # an order that it did not read any more
                pipe.close()

    async def _order(self, order: dict[str, Any], seconds: float = ORDER) -> Any:
        what = order.get("do", "start")
        try:
            line = await asyncio.wait_for(asyncio.to_thread(self._exchange, order), seconds)
        except TimeoutError:
            self._process.kill()  # the thread reads its end
            raise SenderError(f"the process that sends weights: {what}: no answer for {seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise SenderError(f"the process that sends weights: {what}: {error}") from error
        if not line:
            raise SenderError(f"the process that sends weights ended ({what}): {self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise SenderError(f"the process that sends weights: {what}: answers {line[:100]!r}") from error
        if "error" in answer:
            raise SenderError(f"the process that sends weights: {what}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        if self._words.closed:
            return "it was told to"
        self._words.seek(0)
        return self._words.read()[-500:].decode(errors="replace").strip()

    def _exchange(self, order: dict[str, Any]) -> bytes:
        """Sends an order and reads the answer, a line each; the first answer comes without an order."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if order:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()
