"""Releases of SGLang that compute a model wrongly are refused, with the reason."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator

import numpy as np
import pytest
from aiohttp import web
from fleet_cases import asked, fleet_of
from protocol_cases import client_at, model
from rollout_cases import collect

import models
from rollout import sglang
from rollout.engine import EngineError
from rollout.fleet_server import FleetOptions
from rollout.local_server import LocalServer, ServerCommand
from rollout.sglang import FIRST_RELEASES, UnfitRelease
from rollout.wire import SERVE_VERSION

FIRST = (0, 5, 20)


@contextlib.asynccontextmanager
async def stating(version: object) -> AsyncIterator[str]:
    """A server that states a version, is idle, and takes no other order; its address."""

    async def server_info(request: web.Request) -> web.Response:
        return web.json_response({"version": version})

    async def loads(request: web.Request) -> web.Response:
        return web.json_response({"loads": [{}]})

    app = web.Application()
    app.router.add_get("/server_info", server_info)
    app.router.add_get("/v1/loads", loads)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


class Started(LocalServer):
    """A server as the run starts it, that is up already."""

    def __init__(self, address: str, log: pathlib.Path) -> None:
        super().__init__(ServerCommand("sglang", "no model"), log)
        self._up = address

    def start(self) -> None:
        self.address = self._up


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
async def test_a_release_is_compared_by_its_numbers(model_type: str) -> None:
    rng = np.random.default_rng()
    near = [(0, rng.integers(4, 7), rng.integers(18, 23)) for _ in range(12)]
    drawn = [tuple(rng.integers(0, 30, rng.integers(1, 5))) for _ in range(6)]
    for release in [(0, 5, 20), (0, 5, 19), (0, 5, 9), (0, 5), (1,), *near, *drawn]:
        version = ".".join(map(str, release)) + rng.choice(["", "rc1", ".post2", ".dev3+gabc"])
        async with stating(version) as address, client_at(address) as client:
            await client.check_release("qwen3_vl")
            if release >= FIRST:
                await client.check_release(model_type)
                continue
            with pytest.raises(UnfitRelease, match="height and width rows") as refused:
                await client.check_release(model_type)
            assert str(refused.value).startswith(f"{address}/server_info: the version is {version}; ")
            assert str(refused.value).endswith("start SGLang 0.5.20 or later")


@pytest.mark.parametrize("version", [None, "", "main", ["0.5.23"], {}])
async def test_a_server_that_states_no_release_is_refused(version: object) -> None:
    async with stating(version) as address, client_at(address) as client:
        await client.check_release("qwen2_5_vl")
        with pytest.raises(UnfitRelease, match=r"start SGLang 0\.5\.20 or later"):
            await client.check_release("qwen3_5")


async def test_our_own_server_computes_all_models() -> None:
    async with stating(SERVE_VERSION) as address, client_at(address) as client:
        for model_type in FIRST_RELEASES:
            await client.check_release(model_type)


@pytest.mark.medium
@pytest.mark.parametrize("starts", [True, False], ids=["of the run", "of others"])
async def test_a_fleet_says_why(starts: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that the run starts ends it at once, since it would start the same release again. Another's may be
    replaced, until `start_seconds`."""
    monkeypatch.setitem(sglang.FIRST_RELEASES, "qwen2", (FIRST, "forgets a bias"))
    options = FleetOptions(start_seconds=600.0 if starts else 1.0, look_every=0.1)
    async with stating("0.5.19") as address:
        member = Started(address, tmp_path / "log") if starts else address
        with contextlib.closing(fleet_of(member, options=options)) as fleet:
            seat = fleet.seats[0]
            with pytest.raises(EngineError, match=r"0\.5\.19; SGLang before 0\.5\.20 forgets a bias"):
                await seat.update_weights(1, models.split(model("text"))[1])
                await collect(seat.generate(asked()), 1)
