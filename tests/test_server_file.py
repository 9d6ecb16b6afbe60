"""Servers that join and leave a run through the file in its folder."""

from __future__ import annotations

import pathlib

import pytest

from fluxjax.base.errors import ConfigError
from fluxjax.runtime.server_watch import HEADER, ServerFile
from rollout.engine import EngineError
from rollout.fleet import Fleet
from rollout.fleet_server import ServerStatus
from rollout.local_server import LocalServer

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
        (f"{B} {A} {C}", f"line 1 has '{C}' after the addresses of a server and its agent"),
        ("http://10.0.0.1:1", "is on another host"),
    ],
)
def test_a_line_that_can_not_be_read_is_told_and_nobody_leaves(
    tmp_path: pathlib.Path, line: str, expected: str
) -> None:
    file, fleet = opened(tmp_path, {A: ""})
    (complaint,) = change(file, f"{line}\n{B}\n")
    assert expected in complaint and "no server leaves the run" in complaint
    assert fleet.there == [A, B]
    assert change(file, f"{B}\n") == [] and fleet.there == [B]


def test_what_the_fleet_refuses_is_told(tmp_path: pathlib.Path) -> None:
    file, fleet = opened(tmp_path, {A: ""})
    assert ["can't join: the fleet is closed" in line for line in change(file, f"{A}\n{C}\n")] == [True]
    fleet.there.clear()  # it left by other ways
    assert ["can't leave" in line for line in change(file, f"{B}\n")] == [True, True]
