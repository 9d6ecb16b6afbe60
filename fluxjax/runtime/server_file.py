"""Lets servers join and leave a running job, by a file in the run's folder that names them, one a line."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, MutableMapping

from rollout.engine import EngineError
from rollout.fleet import Fleet

from ..base.errors import ConfigError
from ..config.servers import check_address

HEADER = """\
# Rollout servers that others started, a line each: its address, and for weights.route=orbax that of its host's agent,
# if it has one. While the run goes on, servers join with their lines, and leave with them. Those that the run started
# itself are not listed.
"""


class ServerFile:
    """Writes the servers of `agents` (with the addresses of their agents, or nothing) to `file`, and has others join
    and leave as it changes. `agents` is kept up to date. `reachable` raises ConfigError for an address that weights
    can't reach."""

    def __init__(
        self,
        file: pathlib.Path,
        fleet: Fleet,
        agents: MutableMapping[str, str],
        reachable: Callable[[str], None],
    ) -> None:
        self.file, self._fleet, self._agents, self._reachable = file, fleet, agents, reachable
        self._done = HEADER + "".join(f"{' '.join(filter(None, pair))}\n" for pair in agents.items())
        self._seen = self._done

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self._done)

    def look(self) -> list[str]:
        """Does what the file says, once two looks saw the same. Returns a line for what can't be done. A file
        that is gone changes nothing, and nobody leaves while there is a line that can't be read."""
        try:
            text = self.file.read_text()
        except (OSError, UnicodeDecodeError):
            return []
        settled, self._seen = text == self._seen, text
        if not settled or text == self._done:
            return []
        self._done = text
        wanted, complaints = self._read(text)
        names = {server.address: server.name for server in self._fleet.servers()}
        for address in () if complaints else self._agents.keys() - wanted.keys():
            del self._agents[address]
            try:
                self._fleet.leave(names[address])
            except (EngineError, KeyError) as error:
                complaints.append(f"{self.file}: {address} can't leave: {error}")
        for address, agent in wanted.items():
            joins = address not in self._agents
            self._agents[address] = agent
            if joins:
                try:
                    self._fleet.join(address)
                except EngineError as error:
                    complaints.append(f"{self.file}: {address} can't join: {error}")
        return complaints

    def _read(self, text: str) -> tuple[Mapping[str, str], list[str]]:
        """Returns the address of each server's agent, by server, and a complaint for each line that can't be read."""
        wanted: dict[str, str] = {}
        complaints: list[str] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                for word in words[:2]:
                    check_address(word, f"{self.file}, line {number}")
                if len(words) > 2:
                    raise ConfigError(f"{self.file}, line {number} has {words[2]!r} behind a server and its agent")
                self._reachable(words[0])
            except ConfigError as error:
                complaints.append(f"{error}; nobody leaves until it is mended")
                continue
            wanted[words[0].rstrip("/")] = words[1] if len(words) == 2 else ""
        return wanted, complaints
