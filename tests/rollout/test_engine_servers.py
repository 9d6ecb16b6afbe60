"""The embedded engines of several processes, as process 0 has them: what they generate, and for whom.

In the end: servers that get tickets in the place of pixels, and those that get pixels of them: the same answers (24).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
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
from serve_cases import refused, same, serving
from shadow_cases import Elsewhere

import models
from fluxjax.config import Config, ConfigError, Route
from fluxjax.runtime.fleet_pool import EngineServers, FleetPool, for_all_engines
from models.inputs import ModelInput
from models.processing import MediaError
from models.shadow import Fetch, Rows
from rollout.engine import EngineError, GenerateRequest
from rollout.jax_engine import JaxEngine

KIND, TOKEN = "vl", "secret"
NAMES = ("images", "video", "mixed")
pytestmark = pytest.mark.slow


def settings() -> Config:
    config = Config()
    config.model.compute_dtype = type(config.model.compute_dtype)("float32")
    config.rollout.slots, config.rollout.max_sequence_tokens = 5, 256
    return config


@contextlib.contextmanager
def pool_of(folder: pathlib.Path, fetches: Sequence[Fetch | None], **how: Any) -> Iterator[FleetPool]:
    """A fleet of the engines of several processes, one for each of `fetches`. Here, all of them run in this process."""
    before = threading.enumerate()
    with contextlib.ExitStack() as stack:
        parts = settings(), model(KIND), processor(KIND), len(fetches)
        whose: dict[str, Any] = {"host": "127.0.0.1", "token": TOKEN, "failed": pytest.fail}
        servers = [EngineServers(*parts, **whose, fetch=fetch) for fetch in fetches]
        for other in servers[1:]:
            stack.callback(other.close)
        addresses = [address for each in servers for address in each.addresses]
        assert len(addresses) == len(fetches)
        config = for_all_engines(settings(), addresses)
        pool = FleetPool(config, model(KIND), folder, folder, TOKEN, local_servers=servers[0], **how)
        stack.callback(pool.close)
        pool.start(print)
        yield pool
    assert not [new for new in set(threading.enumerate()) - set(before) if new.name == "engine-servers"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetPool]:
    with pool_of(tmp_path_factory.mktemp("servers"), [None, None]) as pool:
        yield pool


def asked() -> list[GenerateRequest]:
    how = sampling(KIND, max_new_tokens=9)
    found = list(prompts(KIND).values())
    return [request(f"q{k}", found[k % len(found)], n=2, seed=1000 - 7 * k, **how) for k in range(9)]


async def generated(pool: FleetPool, order: Sequence[int], version: int, delay: float = 0.0) -> dict[str, list]:
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
def first(pool: FleetPool) -> dict[str, list]:
    """The answers to all requests, asked for in their order."""
    return run(generated(pool, range(9), 1))


@pytest.mark.long
async def test_what_comes_in_any_order_is_computed_in_one(pool: FleetPool, first: dict[str, list]) -> None:
    """Bit for bit: a run that is started again must come to the same weights."""
    assert await generated(pool, [8, 2, 5, 0, 7, 1, 4, 6, 3], 2, delay=0.02) == first


@pytest.mark.long
async def test_they_draw_what_an_engine_of_this_process_draws(first: dict[str, list]) -> None:
    engine = JaxEngine(model(KIND), slots=12, max_sequence_tokens=256)
    answers = {one.rid: await collect(engine.generate(one), one.n) for one in asked()}
    await engine.close()
    here = {rid: [answer.ids for answer in both] for rid, both in answers.items()}
    assert {rid: [ids for ids, _ in both] for rid, both in first.items()} == here


def test_who_does_not_know_the_token_is_turned_away(pool: FleetPool) -> None:
    for status in pool.servers():
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{status.address}/server_info", timeout=10)


def test_a_way_of_weights_that_does_not_reach_another_host_is_refused() -> None:
    config = settings()
    config.weights.route = Route.SHM
    with pytest.raises(ConfigError, match=r"weights\.route is shm"):
        for_all_engines(config, ["http://192.0.2.1:1"])


@pytest.mark.slow
@pytest.mark.usefixtures("first")
async def test_both_are_up_and_have_generated(pool: FleetPool) -> None:
    await until(lambda: all(status.up for status in pool.servers()))
    assert [status.tokens > 0 for status in pool.servers()] == [True, True]


# --- tickets --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_server_with_a_fetch_takes_tickets(checkpoints: dict[str, pathlib.Path]) -> None:
    """A batch has them once."""
    there = Elsewhere()
    async with serving(checkpoints["vl"], functools.partial(JaxEngine, fetch=there.fetch)) as served:
        whole = served.request("mixed", n=3, seed=4)
        answers = await served.in_process(whole)
        shadow = dataclasses.replace(whole, prompt=there.shadow(whole.prompt, "m", parts=2))
        body = served.body(shadow, stream=False)
        for _ in range(2):
            replies = await served.ok("/generate", body)
            for reply, answer in zip(replies, answers, strict=True):
                same(reply, answer)
        replies = await served.ok("/generate", served.body(whole, stream=False))  # and pixels as ever
        same(replies[1], answers[1])
        assert (await served.get("/server_info"))["shadows"] is True
    assert sorted(set(there.tickets)) == ["m.0", "m.1"]


async def test_a_server_without_a_fetch_refuses_tickets(checkpoints: dict[str, pathlib.Path]) -> None:
    there = Elsewhere()
    async with serving(checkpoints["vl"]) as served:
        shadow = dataclasses.replace(served.request("image"), prompt=there.shadow(served.prompt("image"), "m"))
        await refused(served, served.body(shadow), "patches_PX is a shadow tensor .*made without `fetch`")
        assert (await served.get("/server_info"))["shadows"] is False


async def answers_of(pool: FleetPool, asked: dict[str, ModelInput]) -> dict[str, object]:
    await asyncio.gather(*(seat.update_weights(1, models.split(model(KIND))[1]) for seat in pool.engines))
    how = sampling(KIND, max_new_tokens=6)
    found: dict[str, object] = {}
    for name, prompt in asked.items():  # one by one: each is computed alone
        try:
            stream = pool.engines[0].generate(request(name, prompt, n=2, seed=5, **how))
            found[name] = [(answer.ids, answer.logprobs) for answer in await collect(stream, 2)]
        except EngineError as error:
            found[name] = error
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    with pool_of(tmp_path_factory.mktemp("pixels"), [None]) as pool:
        return run(answers_of(pool, {name: prompts(KIND)[name] for name in NAMES}))


@pytest.mark.long
@pytest.mark.parametrize("shadows", [True, False], ids=["tickets", "pixels"])
async def test_a_fleet_sends_tickets_or_what_they_stand_for(
    tmp_path: pathlib.Path, expected: dict[str, object], shadows: bool
) -> None:
    """Bit for bit. Servers that get pixels never see a ticket."""
    here, there = Elsewhere(), Elsewhere()
    asked = {name: here.shadow(prompts(KIND)[name], name, parts=3) for name in NAMES}
    there._patches = here._patches
    fetches = [there.fetch if shadows else None]
    with pool_of(tmp_path, fetches, fetch=here.fetch, shadows=shadows) as pool:
        assert await answers_of(pool, asked) == expected
    used, unused = (there, here) if shadows else (here, there)
    assert len(used.calls) == len(NAMES) and not unused.calls


@pytest.mark.slow
async def test_what_one_server_can_not_fetch_another_may(tmp_path: pathlib.Path, expected: dict[str, object]) -> None:
    broken, good = Elsewhere(_refuse), Elsewhere()
    asked = {name: good.shadow(prompts(KIND)[name], name) for name in NAMES}
    with pool_of(tmp_path, [broken.fetch, good.fetch], shadows=True) as pool:
        assert await answers_of(pool, asked) == expected
    assert broken.calls, "it was tried there first"


@pytest.mark.slow
async def test_what_nobody_can_fetch_is_lost_by_name(tmp_path: pathlib.Path, expected: dict[str, object]) -> None:
    def some(rows: Sequence[Rows]) -> None:
        if "video" in rows[0].ticket:
            _refuse(rows)

    for shadows in (True, False):
        there = Elsewhere(some)
        asked = {name: there.shadow(prompts(KIND)[name], name) for name in NAMES}
        with pool_of(tmp_path, [there.fetch if shadows else None], fetch=there.fetch, shadows=shadows) as pool:
            found = await answers_of(pool, asked)
        error = found.pop("video")
        assert isinstance(error, EngineError) and "film.mp4: has changed" in str(error) and "'video'" in str(error)
        assert found == {name: answers for name, answers in expected.items() if name != "video"}


@pytest.mark.medium
async def test_a_fleet_without_a_fetch_refuses(tmp_path: pathlib.Path) -> None:
    there = Elsewhere()
    with pool_of(tmp_path, [None]) as pool:
        found = await answers_of(pool, {"images": there.shadow(prompts(KIND)["images"], "m")})
    assert "made without `fetch`" in str(found["images"])


def _refuse(rows: Sequence[Rows]) -> None:
    raise MediaError("film.mp4", "has changed")
