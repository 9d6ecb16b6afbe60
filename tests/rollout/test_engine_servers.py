"""The embedded engines of several processes, as process 0 has them: what they generate, and for whom."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

import pytest
from fleet_cases import run
from protocol_cases import model, processor, prompts, sampling
from rollout_cases import collect, request

import models
from fluxjax.config import Config, ConfigError, Route
from fluxjax.runtime.engine_servers import EngineServers, SharedPool
from rollout.engine import GenerateRequest
from rollout.jax_engine import JaxEngine

KIND, PROCESSES, TOKEN = "vl", 2, "secret"
pytestmark = pytest.mark.slow


def settings() -> Config:
    config = Config()
    config.model.compute_dtype = type(config.model.compute_dtype)("float32")
    config.rollout.slots, config.rollout.max_sequence_tokens = 5, 256
    return config


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """Two engines, as two processes have them; here, both are in this one."""
    with contextlib.ExitStack() as stack:
        both = [
            EngineServers(
                settings(), model(KIND), processor(KIND), PROCESSES, host="127.0.0.1", token=TOKEN, failed=pytest.fail
            )
            for _ in range(PROCESSES)
        ]
        stack.callback(both[1].close)
        addresses = [address for servers in both for address in servers.addresses]
        assert len(addresses) == PROCESSES
        folder: pathlib.Path = tmp_path_factory.mktemp("servers")
        pool = SharedPool(settings(), model(KIND), both[0], addresses, folder, TOKEN)
        stack.callback(pool.close)
        pool.start(print)
        yield pool
    assert not [thread for thread in threading.enumerate() if thread.name == "engine-servers"]


def asked() -> list[GenerateRequest]:
    how = sampling(KIND, max_new_tokens=9)
    found = list(prompts(KIND).values())
    return [request(f"q{k}", found[k % len(found)], n=2, seed=1000 - 7 * k, **how) for k in range(9)]


def generated(pool: SharedPool, order: Sequence[int], version: int, delay: float = 0.0) -> dict[str, list]:
    """What both engines make of the same requests, half of them each, as the runtime asks: all of them while they
    stand still."""

    async def ask() -> dict[str, list]:
        seats, wanted = pool.engines, asked()
        await asyncio.gather(*(seat.update_weights(version, models.split(model(KIND))[1]) for seat in seats))
        await asyncio.gather(*(seat.pause() for seat in seats))
        tasks = {}
        for k in order:
            tasks[k] = asyncio.ensure_future(collect(seats[k % 2].generate(wanted[k]), wanted[k].n))
            await asyncio.sleep(delay)
        await asyncio.sleep(0)
        await asyncio.gather(*(seat.resume() for seat in seats))
        return {wanted[k].rid: [(a.ids, a.logprobs) for a in await tasks[k]] for k in sorted(tasks)}

    return run(ask())


@pytest.fixture(scope="module")
def first(pool: SharedPool) -> dict[str, list]:
    """The answers to all requests, asked for in their order."""
    return generated(pool, range(9), 1)


@pytest.mark.long
def test_what_comes_in_any_order_is_computed_in_one(pool: SharedPool, first: dict[str, list]) -> None:
    """Bit for bit: a run that is started again must come to the same weights."""
    assert generated(pool, [8, 2, 5, 0, 7, 1, 4, 6, 3], 2, delay=0.02) == first


@pytest.mark.long
def test_they_draw_what_an_engine_of_this_process_draws(first: dict[str, list]) -> None:
    async def here() -> dict[str, list]:
        engine = JaxEngine(model(KIND), slots=12, max_sequence_tokens=256)
        answers = {one.rid: await collect(engine.generate(one), one.n) for one in asked()}
        await engine.close()
        return {rid: [answer.ids for answer in both] for rid, both in answers.items()}

    assert {rid: [ids for ids, _ in both] for rid, both in first.items()} == run(here())


def test_who_does_not_know_the_token_is_turned_away(pool: SharedPool) -> None:
    for status in pool.servers():
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{status.address}/server_info", timeout=10)


def test_a_way_of_weights_that_does_not_reach_another_host_is_refused(pool: SharedPool, tmp_path: pathlib.Path) -> None:
    config = settings()
    config.weights.route = Route.SHM
    with pytest.raises(ConfigError, match=r"weights\.route is shm"):
        SharedPool(config, model(KIND), pool._own, ["http://192.0.2.1:1"], tmp_path, TOKEN)


@pytest.mark.usefixtures("first")
def test_both_are_up_and_have_generated(pool: SharedPool) -> None:
    end = time.monotonic() + 10
    while not all(status.up for status in pool.servers()):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert [status.tokens > 0 for status in pool.servers()] == [True, True]
