"""Questions that nobody should ask a preprocessor over Arrow Flight: settings, media and ranges that are none.

Each is answered by what it asks for or by an error of a kind that is the client's fault, within seconds; afterwards,
good questions have the same answers as before.
"""

import dataclasses
import json
import os
import pathlib
import random
from typing import Any

import numpy as np
from flight_cases import SETTINGS, pictures
from junk import spoiled, spoiled_bytes
from pyarrow import ArrowException, flight

from fluxjax.config.data import DataConfig
from fluxjax.data.flight_client import FlightPlace
from fluxjax.data.flight_server import FlightServer
from fluxjax.data.flight_wire import PROTOCOL
from fluxjax.data.local_store import LocalStore
from fluxjax.data.locations import stamp_of
from fluxjax.data.tickets import MediaRef, Ticket
from fuzz.draws import each_of
from models.shadow import Rows

DRAWS = 100
SECONDS = 20.0  # of one question
LOOK_EVERY = 100  # draws
PLAIN = json.loads(json.dumps(SETTINGS.to_json()))


def run(count: int, seed: int) -> list[str]:
    return each_of(_Fuzzer, count, seed)


class _Fuzzer:
    def __init__(self, folder: pathlib.Path) -> None:
        self._server = FlightServer(
            lambda settings: LocalStore(settings, DataConfig(cache_gib=0.01), workers=0), "127.0.0.1", 0
        )
        self._client = flight.FlightClient(f"grpc://{self._server.address}")
        self._place = FlightPlace(self._server.address, SETTINGS)
        self._refs = pictures(folder, 3)
        self._place.greet(SECONDS)
        self._tickets = self._looked()
        self._patches = self._fetched()
        os.mkfifo(folder / "pipe")
        (folder / "text.png").write_text("no picture")
        (folder / "cut.png").write_bytes(pathlib.Path(self._refs[0].path).read_bytes()[:200])
        odd = (folder, folder / "pipe", folder / "text.png", folder / "cut.png", pathlib.Path("/dev/zero"),
               pathlib.Path("/proc/self/environ"))  # fmt: skip
        self._odd = [MediaRef(kind, str(path), stamp_of(str(path))) for path in odd for kind in ("image", "video")]
        self._draws = 0

    def _looked(self) -> list[Ticket]:
        return [self._place.look(ref, SECONDS) for ref in self._refs]

    def _fetched(self) -> list[np.ndarray]:
        return self._place.fetch([Rows(str(ticket), 0, ticket.num_patches) for ticket in self._tickets], SECONDS)

    def close(self) -> None:
        self._place.close()
        self._client.close()
        self._server.close()

    def draw(self, draw: random.Random) -> None:
        try:
            draw.choice((self._settings, self._look, self._look, self._range, self._range, self._action))(draw)
        except flight.FlightServerError as error:
            words = str(error)
            assert not words.startswith("failed:"), words
        except ArrowException as error:
            assert "must be less than or equal" in str(error), f"{type(error).__name__}: {error}"
        self._draws += 1
        if self._draws % LOOK_EVERY == 0 or self._draws < 5:
            assert self._looked() == self._tickets
            for now, before in zip(self._fetched(), self._patches, strict=True):
                np.testing.assert_array_equal(now, before)

    def _ask(self, action: str, content: Any, draw: random.Random) -> None:
        words = json.dumps(content).encode()
        words = spoiled_bytes(words, draw) if draw.random() < 0.2 else words
        for answer in self._client.do_action(flight.Action(action, words), flight.FlightCallOptions(timeout=SECONDS)):
            assert isinstance(json.loads(bytes(answer.body)), dict)

    def _settings(self, draw: random.Random) -> None:
        question = {"protocol": PROTOCOL, "settings": PLAIN}
        self._ask("settings", spoiled(question, draw, 2), draw)

    def _look(self, draw: random.Random) -> None:
        question = {"settings": PLAIN, "ref": dataclasses.astuple(draw.choice(self._refs + self._odd))}
        self._ask("look", spoiled(question, draw, 2) if draw.random() < 0.7 else question, draw)

    def _action(self, draw: random.Random) -> None:
        self._ask(draw.choice(("stats", "health", "nothing", "x" * 5000)), spoiled({"a": [1]}, draw), draw)

    def _range(self, draw: random.Random) -> None:
        ticket = draw.choice(self._tickets)
        if draw.random() < 0.3:
            ticket = dataclasses.replace(ticket, ref=draw.choice(self._odd))
        fields = json.loads(str(ticket))
        word = json.dumps(spoiled(fields, draw, 2) if draw.random() < 0.5 else fields)
        ranges: Any = [[word, 0, draw.choice((1, 2, ticket.num_patches, 2**15))]] * draw.randint(1, 2)
        question = {"settings": PLAIN, "ranges": ranges}
        words = json.dumps(spoiled(question, draw, 1) if draw.random() < 0.5 else question).encode()
        words = spoiled_bytes(words, draw) if draw.random() < 0.2 else words
        self._client.do_get(flight.Ticket(words), flight.FlightCallOptions(timeout=SECONDS)).read_all()
