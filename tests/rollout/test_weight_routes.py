"""The routes of new weights as a fleet uses them: buckets and agents of hosts; and broken ones."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_cases import ROOT, client_at, model
from serve_cases import Served, checksums, help_of, on_disk, refused_flags, serving

import models
from fluxjax.config import Config, ConfigError, Route
from fluxjax.config.servers import WeightsConfig
from fluxjax.runtime.fleet_pool import _route
from models.hf import StoredTensor
from rollout.engine import EngineError
from rollout.engine_weights import portions
from rollout.sglang import Refused, ServerClient
from rollout.weights import published as published_module
from rollout.weights.agent import main
from rollout.weights.published import Published, SharedFolders
from rollout.weights.routes import Buckets, CudaIpc, OrbaxFolders, SharedMemory, SyncRoute
from rollout.weights.version_folders import VersionFolders

TOKEN = "secret"


@pytest.fixture
def memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, pathlib.Path]
) -> SharedFolders:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(published_module, "SHARED_MEMORY", tmp_path / "memory")
    return SharedFolders(models.load(checkpoints["text"]).config, "float32")


def step(params: dict) -> dict:
    return jax.tree.map(lambda weight: weight.at[..., 0].add(1), params)


def reached(served: Served, token: str = ""):
    return client_at(str(served.client._base_url), token)


async def brought(route: SyncRoute, client: ServerClient, published: Published) -> None:
    await route.deliver(client, published, lambda: client.pause("retract"))
    published.checksums.check(await client.checksums(), client.address)
    assert await client.weight_version() == str(published.version)


async def never() -> None:
    raise AssertionError("a server is paused for weights that are not there")


@pytest.mark.parametrize("chosen", Route)
def test_every_route_of_the_settings_has_a_class(
    chosen: Route, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member without one is refused by name. `auto` is such a member: settings choose another one for it."""
    classes = {Route.SHM: SharedMemory, Route.IPC: CudaIpc, Route.BUCKET: Buckets, Route.ORBAX: OrbaxFolders}
    monkeypatch.setattr(WeightsConfig, "chosen", lambda weights, servers: chosen)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # no route opens PyTorch yet
    config = Config(weights=WeightsConfig(folder=str(tmp_path / "shared")))
    if chosen not in classes:
        with pytest.raises(ConfigError, match=f"weights.route is {chosen.value}"):
            _route(config, model("text").config, {}, "")
    else:
        with contextlib.closing(_route(config, model("text").config, {}, "")) as route:
            assert type(route) is classes[chosen]


# --- buckets --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_buckets_have_all_in_order_and_are_as_full_as_they_may(sizes: list[int], room: int) -> None:
    tensors = [StoredTensor(str(number), (size,), np.dtype(np.float32)) for number, size in enumerate(sizes)]
    parts = list(portions(tensors, lambda tensor: tensor.nbytes, room))
    assert [tensor for part in parts for tensor in part] == tensors
    filled = [sum(tensor.nbytes for tensor in part) for part in parts]
    assert all(part for part in parts) or not tensors
    assert all(size <= room or len(part) == 1 for size, part in zip(filled, parts, strict=True))
    for size, following in zip(filled, parts[1:], strict=False):
        assert size + following[0].nbytes > room


@pytest.mark.slow
async def test_buckets_bring_a_version_also_after_one_that_broke_off(
    checkpoints: dict[str, pathlib.Path], memory: SharedFolders
) -> None:
    params = models.split(models.load(checkpoints["text"]))[1]
    route = Buckets(memory, 2000, pickled=False)

    class Breaks(Buckets):
        def _packer(self, *arguments):
            pack, left = super()._packer(*arguments), [2]

            def pack_two(part):
                left[0] -= 1
                if left[0] < 0:
                    raise EngineError("broke off")
                return pack(part)

            return pack_two

    async with serving(checkpoints["text"]) as served, reached(served) as client:
        first, second = memory.write(1, params), memory.write(2, step(params))
        await brought(route, client, first)
        with pytest.raises(EngineError, match="broke off"):
            await Breaks(memory, 2000, pickled=False).deliver(client, second, lambda: client.pause("retract"))
        assert await client.weight_version() == "1" and await checksums(served) == on_disk(first.folder)
        await brought(route, client, second)


# --- agents ---------------------------------------------------------------------------------------


def test_the_agents_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUXJAX_TOKEN", raising=False)
    shown = help_of("rollout.weights.agent")
    for word in ("/pull_weights", "--host", "--port", "--token", "FLUXJAX_TOKEN", "listening on http://", "SIGTERM"):
        assert word in shown
    for flags, complaint in [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 can be reached from other machines"),
        (("--port", "70000"), "--port"),
        (("--host", "192.0.2.1", "--token", "t"), "--host 192.0.2.1 --port 0"),
        (("--model", "x"), "--model"),
    ]:
        refused_flags(main, flags, complaint, capsys)


@dataclasses.dataclass
class Agent:
    process: subprocess.Popen[str]
    address: str

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def agent(tmp_path: pathlib.Path) -> Iterator[Agent]:
    command = [sys.executable, "-m", "rollout.weights.agent", "--host", "127.0.0.1", "--port", "0"]
    with (
        (tmp_path / "agent.log").open("w") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"FLUXJAX_TOKEN": TOKEN}
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            assert line[:2] == ["listening", "on"], (tmp_path / "agent.log").read_text()
            yield Agent(process, line[2])
        finally:
            process.kill()


@pytest.mark.slow
async def test_an_agent_pulls_for_the_servers_of_its_host(
    checkpoints: dict[str, pathlib.Path], memory: SharedFolders, agent: Agent, tmp_path: pathlib.Path
) -> None:
    """Whole, then a delta; a wrong token and a version that is gone are said; what was pulled goes with the agent."""
    params, local = models.split(models.load(checkpoints["text"]))[1], tmp_path / "local"
    folders = VersionFolders(tmp_path / "shared")
    async with serving(checkpoints["text"], token=TOKEN) as served, reached(served, TOKEN) as client:
        route = OrbaxFolders(memory, folders, local, {client.address: agent.address}, token=TOKEN, here=False)
        for version in (1, 2, 5):
            params = step(params)
            published = route.publish(version, params)
            await brought(route, client, published)
            route.keep([published])
            assert await checksums(served) == on_disk(published.folder)
        assert {"weight_v000002", "weight_v000005"} <= {there.name for there in local.glob("*/*")}
        with await asyncio.to_thread(urllib.request.urlopen, agent.address + "/health", timeout=30) as reply:
            assert reply.status == 200, "it needs no token"
        before = await checksums(served)
        wrong = OrbaxFolders(memory, folders, local, {client.address: agent.address}, token="wrong", here=False)
        with pytest.raises(Refused, match=r"status 401.*FLUXJAX_TOKEN"):
            await wrong.deliver(client, published, never)
        with pytest.raises(Refused, match="weight_v000009: no such version"):
            await route.deliver(client, dataclasses.replace(published, version=9), never)
        assert await checksums(served) == before
        await asyncio.to_thread(agent.end)
        route.close()
    assert agent.process.returncode == 0
    assert not local.exists() or not list(local.iterdir())
    assert not list((tmp_path / "shared").iterdir())
    assert (tmp_path / "agent.log").read_text() == ""


@pytest.mark.medium
async def test_a_trainer_pulls_for_servers_of_its_own_host(
    checkpoints: dict[str, pathlib.Path], memory: SharedFolders, tmp_path: pathlib.Path
) -> None:
    params, local = step(models.split(models.load(checkpoints["text"]))[1]), tmp_path / "local"
    folders = VersionFolders(tmp_path / "shared")
    async with serving(checkpoints["text"]) as served, reached(served) as client:
        route = OrbaxFolders(memory, folders, local, {}, here=True)
        published = route.publish(1, params)
        await brought(route, client, published)
        with pytest.raises(EngineError, match="weight_v000009: no such version"):
            await route.deliver(client, dataclasses.replace(published, version=9), never)
        route.close()
    assert not list(local.iterdir()) and not list((tmp_path / "shared").iterdir())
