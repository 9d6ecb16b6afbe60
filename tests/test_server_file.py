"""Servers that join and leave a run through the file in its folder."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import models
from fluxjax.base.errors import ConfigError
from fluxjax.config import RolloutEngine, cli
from fluxjax.report.metrics import read
from fluxjax.run.trainer import FluxTrainer
from fluxjax.runtime.server_file import HEADER, ServerFile
from rollout.engine import EngineError
from rollout.fleet import Fleet
from rollout.fleet_job import ServerStatus
from rollout.local_server import LocalServer, ServerCommand

A, B, C = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"


class Members(Fleet):
    """Of a fleet, what the file deals with."""

    def __init__(self, *addresses: str) -> None:  # nothing of a fleet is started
        self.there = list(addresses)

    def servers(self) -> list[ServerStatus]:
        return [ServerStatus(f"server of {a}", a, 0, True, 0, 0, 0, 0.0, 0, 0, "") for a in self.there]

    def join(self, member: LocalServer | str) -> str:
        if member == C:
            raise EngineError("the fleet is closed")
        self.there.append(str(member))
        return f"server of {member}"

    def leave(self, name: str) -> None:
        self.there.remove(name.removeprefix("server of "))


def far(address: str) -> None:
    if "10.0.0" in address:
        raise ConfigError(f"{address} is on another host")


def opened(tmp_path: pathlib.Path, agents: dict[str, str]) -> tuple[ServerFile, Members]:
    fleet = Members(*agents)
    file = ServerFile(tmp_path / "servers" / "addresses", fleet, agents, far)
    file.write()
    return file, fleet


def change(file: ServerFile, text: str) -> list[str]:
    file.file.write_text(text)
    assert file.look() == []  # it may not be whole yet
    complaints = file.look()
    assert file.look() == []  # once
    return complaints


def test_servers_come_and_go_with_their_lines(tmp_path: pathlib.Path) -> None:
    agents = {A: ""}
    file, fleet = opened(tmp_path, agents)
    assert file.file.read_text() == f"{HEADER}{A}\n" and file.look() == []
    assert change(file, f"{HEADER}{A}\n{B}/ http://127.0.0.1:9  # and its agent") == []
    assert fleet.there == [A, B] and agents == {A: "", B: "http://127.0.0.1:9"}
    assert change(file, f"{B}\n") == []
    assert fleet.there == [B] and agents == {B: ""}
    assert change(file, "# nobody\n") == []
    assert fleet.there == [] and agents == {}
    file.file.unlink()
    assert file.look() == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("127.0.0.1:2", "line 1 has '127.0.0.1:2'; an address is like http://"),
        ("http://[", "line 1 has 'http://['"),
        (f"{B} agent", "line 1 has 'agent'"),
        (f"{B} {A} {C}", f"line 1 has '{C}' behind a server and its agent"),
        ("http://10.0.0.1:1", "is on another host"),
    ],
)
def test_a_line_that_can_not_be_read_is_told_and_nobody_leaves(
    tmp_path: pathlib.Path, line: str, expected: str
) -> None:
    file, fleet = opened(tmp_path, {A: ""})
    (complaint,) = change(file, f"{line}\n{B}\n")
    assert expected in complaint and "nobody leaves" in complaint
    assert fleet.there == [A, B]
    assert change(file, f"{B}\n") == [] and fleet.there == [B]


def test_what_the_fleet_refuses_is_told(tmp_path: pathlib.Path) -> None:
    file, fleet = opened(tmp_path, {A: ""})
    assert ["can't join: the fleet is closed" in line for line in change(file, f"{A}\n{C}\n")] == [True]
    fleet.there.clear()  # it left by other ways
    assert ["can't leave" in line for line in change(file, f"{B}\n")] == [True, True]


@contextlib.contextmanager
def two_servers(longest: int, folder: pathlib.Path) -> Iterator[list[str]]:
    config = cli.load(["--config=configs/text.py:debug", f"--config.run_dir={folder / 'saved'}"])
    with FluxTrainer(config) as trainer:
        models.save(trainer.model, folder / "model")
        trainer.processor.save(folder / "model")
    sizes = ("--slots", "64", "--max-sequence-tokens", str(longest), "--dtype", "float32")
    command = ServerCommand("serve", str(folder / "model"), sys.executable, sizes)
    with contextlib.ExitStack() as stack:
        servers = [LocalServer(command, folder / f"{name}.log") for name in "ab"]
        for server in servers:
            server.start()
            stack.callback(server.stop)
        yield [server.address for server in servers]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_goes_on_with_a_server_that_joined_when_the_first_has_left(tmp_path: pathlib.Path) -> None:
    config = cli.load(["--config=configs/text.py:debug", f"--config.run_dir={tmp_path / 'run'}"])
    config.steps = 12
    config.rollout.engine = RolloutEngine.SERVE
    file, metrics = tmp_path / "run" / "servers" / "addresses", tmp_path / "run" / "metrics.jsonl"

    def steps() -> list[Any]:
        return [record for record in read(metrics) if record["phase"] == "rl"] if metrics.exists() else []

    def operator(first: str, second: str) -> None:
        while not steps():
            time.sleep(0.05)
        file.write_text(f"{first}\n{second}\n")
        while steps()[-1]["servers/up"] < 2:
            time.sleep(0.05)
        file.write_text(f"{second}\n")

    with two_servers(config.rollout.max_sequence_tokens, tmp_path) as addresses:
        config.servers.addresses = (addresses[0],)
        thread = threading.Thread(target=operator, args=addresses, daemon=True)
        thread.start()
        with FluxTrainer(config) as trainer:
            result = trainer.fit()
            assert [status.address for status in trainer.pool.servers()] == [addresses[1]]
        thread.join()
    assert result.summary.complete and result.summary.steps == 12
    up = [record["servers/up"] for record in steps()]
    assert up[0] == 1.0 and 2.0 in up and up[-1] == 1.0
    assert 0 < result.summary.logprob_gap_max < 1e-4
