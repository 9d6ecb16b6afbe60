"""The embedded engines of several processes, as process 0 has them: what they generate, and for whom."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fleet_cases import run
from protocol_cases import model, processor, prompts, sampling
from rollout_cases import collect, request, until

import models
from fluxjax.config import Config, ConfigError, Route
from fluxjax.runtime.fleet_pool import EngineServers, SharedPool
from models.shadow import Fetch
from rollout.engine import GenerateRequest
from rollout.jax_engine import JaxEngine

KIND, TOKEN = "vl", "secret"
pytestmark = pytest.mark.slow


def settings() -> Config:
    config = Config()
    config.model.compute_dtype = type(config.model.compute_dtype)("float32")
    config.rollout.slots, config.rollout.max_sequence_tokens = 5, 256
    return config


@contextlib.contextmanager
def pool_of(folder: pathlib.Path, fetches: Sequence[Fetch | None], **how: Any) -> Iterator[SharedPool]:
    """A fleet of the engines of several processes, one for each of `fetches`. Here, all of them run in this process."""
    with contextlib.ExitStack() as stack:
        parts = settings(), model(KIND), processor(KIND), len(fetches)
        whose: dict[str, Any] = {"host": "127.0.0.1", "token": TOKEN, "failed": pytest.fail}
        servers = [EngineServers(*parts, **whose, fetch=fetch) for fetch in fetches]
        for other in servers[1:]:
            stack.callback(other.close)
        addresses = [address for each in servers for address in each.addresses]
        assert len(addresses) == len(fetches)
        pool = SharedPool(settings(), model(KIND), servers[0], addresses, folder, TOKEN, **how)
        stack.callback(pool.close)
        pool.start(print)
        yield pool
    assert not [thread for thread in threading.enumerate() if thread.name == "engine-servers"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    with pool_of(tmp_path_factory.mktemp("servers"), [None, None]) as pool:
        yield pool


def asked() -> list[GenerateRequest]:
    how = sampling(KIND, max_new_tokens=9)
    found = list(prompts(KIND).values())
    return [request(f"q{k}", found[k % len(found)], n=2, seed=1000 - 7 * k, **how) for k in range(9)]


async def generated(pool: SharedPool, order: Sequence[int], version: int, delay: float = 0.0) -> dict[str, list]:
    """What both engines make of the same requests, half of them each, as the runtime asks: all of them while they
    stand still."""
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


@pytest.fixture(scope="module")
def first(pool: SharedPool) -> dict[str, list]:
    """The answers to all requests, asked for in their order."""
    return run(generated(pool, range(9), 1))


@pytest.mark.long
async def test_what_comes_in_any_order_is_computed_in_one(pool: SharedPool, first: dict[str, list]) -> None:
    """Bit for bit: a run that is started again must come to the same weights."""
    assert await generated(pool, [8, 2, 5, 0, 7, 1, 4, 6, 3], 2, delay=0.02) == first


@pytest.mark.long
async def test_they_draw_what_an_engine_of_this_process_draws(first: dict[str, list]) -> None:
    engine = JaxEngine(model(KIND), slots=12, max_sequence_tokens=256)
    answers = {one.rid: await collect(engine.generate(one), one.n) for one in asked()}
    await engine.close()
    here = {rid: [answer.ids for answer in both] for rid, both in answers.items()}
    assert {rid: [ids for ids, _ in both] for rid, both in first.items()} == here


def test_who_does_not_know_the_token_is_turned_away(pool: SharedPool) -> None:
    for status in pool.servers():
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{status.address}/server_info", timeout=10)


def test_a_way_of_weights_that_does_not_reach_another_host_is_refused(pool: SharedPool, tmp_path: pathlib.Path) -> None:
    config = settings()
    config.weights.route = Route.SHM
    with pytest.raises(ConfigError, match=r"weights\.route is shm"):
        SharedPool(config, model(KIND), pool._own, ["http://192.0.2.1:1"], tmp_path, TOKEN)


@pytest.mark.slow
@pytest.mark.usefixtures("first")
async def test_both_are_up_and_have_generated(pool: SharedPool) -> None:
    await until(lambda: all(status.up for status in pool.servers()))
    assert [status.tokens > 0 for status in pool.servers()] == [True, True]
