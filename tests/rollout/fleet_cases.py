"""Fleets for tests, requests to them, what their answers must be, and scripts that stand in for servers."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import subprocess
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
from protocol_cases import SLOTS, model, prompts, sampling
from rollout_cases import HANG, collect, request

import models
from rollout.engine import GenerateRequest
from rollout.fleet import Fleet, FleetEngine
from rollout.fleet_server import FleetOptions
from rollout.jax_engine import JaxEngine
from rollout.local_server import LocalServer, ServerCommand
from rollout.requests import EngineLimits
from rollout.weights.published import SharedFolders
from rollout.weights.routes import SharedMemory

Result = TypeVar("Result")
versions = itertools.count(1)
ids = itertools.count()
QUICK = FleetOptions(patience=5.0, start_seconds=300.0, look_every=0.1, interval=2)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, HANG))


def asked(n: int = 1, seed: int = 0, tokens: int = 12, **how: Any) -> GenerateRequest:
    given = sampling("text", max_new_tokens=tokens, **how)
    return request(f"r{next(ids)}", prompts("text")["text"], n=n, seed=seed, **given)


async def publish(seats: list[FleetEngine], here: JaxEngine, seed: int = 0) -> int:
    version, params = next(versions), models.split(model("text", seed))[1]
    await asyncio.gather(*(seat.update_weights(version, params) for seat in seats))
    await here.update_weights(version, params)
    return version


async def exact(seat: FleetEngine, here: JaxEngine, wanted: GenerateRequest, version: int) -> None:
    answers = await collect(seat.generate(wanted), wanted.n)
    expected = await collect(here.generate(wanted), wanted.n)
    for answer, right in zip(answers, expected, strict=True):
        assert (answer.ids, answer.finish) == (right.ids, right.finish)
        assert set(answer.versions) == {version}
        np.testing.assert_allclose(answer.logprobs, right.logprobs, rtol=0, atol=1e-5)


def fleet_of(*members: LocalServer | str, seats: int = 0, options: FleetOptions = QUICK, longest: int = 64) -> Fleet:
    config = model("text").config
    route = SharedMemory(SharedFolders(config, "float32"))
    fleet = Fleet(config, EngineLimits.of(config, SLOTS, longest), route, options)
    fleet.add_seats(members, seats)
    return fleet


class Script(ServerCommand):
    """A shell script that stands in for a server; it never answers."""

    def words(self, port: int) -> list[str]:
        return ["/bin/sh", "-c", self.model]


def sleeper(folder: pathlib.Path, *lines: str) -> LocalServer:
    return LocalServer(
        Script("serve", "\n".join(lines or ("sleep 1000 & echo ready; sleep 1000",))), folder / "server.log"
    )


def group_exists(pid: int) -> bool:
    """Whether a process group has processes that still run; what nobody waits for is dead, too."""
    found = subprocess.run(["ps", "-o", "stat=", "-g", str(pid)], capture_output=True, text=True).stdout.split()
    return any(not state.startswith("Z") for state in found)
