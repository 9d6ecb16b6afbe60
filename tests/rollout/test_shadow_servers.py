"""Servers that get tickets in the place of pixels, and those that get pixels of them: the same answers (24)."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import pytest
from fleet_cases import run
from protocol_cases import model, prompts, sampling
from rollout_cases import collect, request
from serve_cases import refused, same, serving
from shadow_cases import Elsewhere
from test_engine_servers import KIND, pool_of

import models
from fluxjax.runtime.fleet_pool import SharedPool
from models.inputs import ModelInput
from models.processing import MediaError
from models.shadow import Rows
from rollout.engine import EngineError
from rollout.jax_engine import JaxEngine

pytestmark = pytest.mark.slow
NAMES = ("images", "video", "mixed")


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
        await refused(served, served.body(shadow), "image_data: tickets .* made without `fetch`; send the pixels")
        assert (await served.get("/server_info"))["shadows"] is False


# --- fleets --------------------------------------------------------------------------------------


async def answers_of(pool: SharedPool, asked: dict[str, ModelInput]) -> dict[str, object]:
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
