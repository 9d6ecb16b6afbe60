"""Conversations of several turns on servers. The rules, each tested under its number:

29. A turn goes to the server that has its conversation, and computes what is new there.
30. If that server is lost, leaves or is full, another server computes the history, and no token changes.
31. `end_session` reaches the servers of the session, and frees what they keep.
32. Pixels go to a server once in a conversation, and again to one that has them no longer.
"""

import asyncio
import contextlib
from typing import Any

import aiohttp
import numpy as np
import pytest
import rollout_cases
from faulty_proxy import Fault, Servers
from fleet_cases import QUICK, fleet_of
from protocol_cases import LONGEST, SLOTS, model
from rollout_cases import full_logprobs, until
from session_cases import Episode, ask, text

import models
from models.inputs import text_input
from rollout import serve_requests, wire
from rollout.engine import GenerateRequest, SamplingParams
from rollout.fleet import Fleet
from rollout.fleet_requests import FleetJob
from rollout.fleet_server import Server
from rollout.requests import EngineLimits
from rollout.sglang import ServerClient
from rollout.weights.published import SharedFolders
from rollout.weights.routes import SharedMemory

MEDIA = [("image", (1, 4, 8), 1), ("video", (2, 4, 4), 2), ("image", (1, 4, 4), 3), ("image", (1, 8, 4), 4)]


@pytest.fixture(scope="module")
def servers():
    with Servers(2, "vl", slots=SLOTS, max_sequence_tokens=LONGEST).running() as running:
        yield running


@pytest.fixture
def fleet(servers, monkeypatch):
    monkeypatch.setattr(rollout_cases, "LONGEST", LONGEST)
    config = model("vl").config
    route = SharedMemory(SharedFolders(config, "float32"))
    made = Fleet(config, EngineLimits.of(config, SLOTS, LONGEST), route, QUICK)
    made.add_seats(servers.addresses)
    with contextlib.closing(made):
        yield made


def begin(session, group):
    parts = [text(20, 1), MEDIA[0], text(5, 2)]
    return [Episode(session, number, list(parts), 3, model("vl").config) for number in range(group)]


async def turn(seat, episodes, number):
    """A turn of each conversation, at once. The log-probs are those of the trainer."""
    if number == 0:
        requests = [episodes[0].request("first", len(episodes))]
    else:
        requests = [each.request(f"{number}.{each.number}") for each in episodes]
    answers = [answer for group in await asyncio.gather(*(ask(seat, each) for each in requests)) for answer in group]
    for episode, answer, request in zip(episodes, answers, requests * (len(answers) // len(requests)), strict=True):
        never = request.sampling.forbidden_ids
        expected = full_logprobs(model("vl"), request.prompt, answer.ids, never=never)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-4)
        episode.add(answer, text(3, number), MEDIA[(number + 1) % 4], text(6, 9 + number))


def homes(fleet, session):
    return {number: server.name for number, server in fleet.homes.get(session, {}).items()}


def prefilled(servers):
    return [engine.stats().tokens_prefilled for engine in servers.engines]


@pytest.mark.slow
async def test_29_to_31_a_conversation_stays_on_its_server_and_leaves_it_without_loss(servers, fleet):
    seat = fleet.seats[0]
    await asyncio.gather(*(each.update_weights(1, models.split(model("vl"))[1]) for each in fleet.seats))
    left, right = begin("left", 3), begin("right", 2)
    for number in range(3):
        before, tokens = prefilled(servers), 0
        await asyncio.gather(turn(fleet.seats[0], left, number), turn(fleet.seats[1], right, number))
        assert set(homes(fleet, "left").values()) == {"server 0"}
        assert set(homes(fleet, "right").values()) == {"server 1"}
        if number:
            computed = sum(prefilled(servers)) - sum(before)
            tokens = sum(len(each.request("").prompt) for each in (*left, *right))
            assert computed < 0.6 * tokens, "the history was computed again"
    # Its server breaks off all answers for a while: the conversation goes on elsewhere, and stays there.
    proxy = servers.proxies[0]
    proxy.forever = Fault("cut", at=1)
    await turn(seat, left, 3)
    assert proxy.fired and set(homes(fleet, "left").values()) == {"server 1"}
    proxy.reset()
    await until(lambda: all(server.usable for server in fleet.members))
    for each in left:  # the context is rewritten: the first medium of an observation is dropped
        del each.parts[5]
    await turn(seat, left, 4)
    assert set(homes(fleet, "left").values()) == {"server 1"}
    await seat.end_session("left")
    await fleet.seats[1].end_session("right")
    kept = servers.engines[1]._scheduler
    await until(lambda: kept.pool.free == kept.pool.total)
    assert not fleet.homes
    await turn(fleet.seats[1], begin("flushed", 1), 0)
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{servers.upstream[1]}/flush_cache") as reply:
            assert reply.status == 200 and kept.pool.free == kept.pool.total
        async with client.post(f"{servers.upstream[1]}/end_session", json={"session_id": ""}) as reply:
            assert reply.status == 400 and "session_id must be a string that is not empty" in await reply.text()


@pytest.mark.slow
async def test_32_pixels_travel_once(servers, fleet, monkeypatch):
    sent: list[int] = []

    def counted(field: str, media: wire.Json, kept: Any) -> Any:
        sent.append(media["patches"]["shape"][0])
        return wire.completed(field, media, kept)

    monkeypatch.setattr(serve_requests, "completed", counted)
    await asyncio.gather(*(each.update_weights(1, models.split(model("vl"))[1]) for each in fleet.seats))
    episodes, patches = begin("once", 2), []
    for number in range(5):
        server = fleet.homes["once"][0] if number else None
        if number == 3:  # the server has dropped all pixels, and so answers that it has not got them
            for running in servers.servers:
                running._kept.clear()
        sent.clear()
        await turn(fleet.seats[0], episodes, number)
        patches.append(sum(sent))
        assert fleet.homes["once"][0] is server or number in (0, 3)
    every = [sum(len(e.request("").prompt.vision.patches_PX) for e in episodes)]
    shapes = [int(np.prod(grid)) for _, grid, _ in MEDIA]
    assert patches[0] == shapes[0] and max(patches[1:3]) <= 2 * max(shapes), (patches, every)
    assert patches[3] > 2 * patches[2] and patches[4] <= 2 * max(shapes), (patches, every)


async def test_30_a_turn_leaves_a_server_that_is_full_or_can_not_be_used():
    """Full is a server whose slots are all taken while another has free ones."""
    held: Any = "weights"
    request = GenerateRequest("r", text_input([9]), SamplingParams(4), samples=(5,), session="s")
    with contextlib.closing(fleet_of(seats=1)) as fleet:
        first, second = (Server(fleet, name, fleet.seats[0], ServerClient(""), None) for name in ("first", "second"))
        for server in (first, second):
            server.up, server.holds = True, held
        fleet.members += [first, second]
        fleet.homes["s"] = {5: second, 4: first}
        job = FleetJob(fleet, fleet.seats[0], request, lambda chunk: None)
        second.open = 3
        assert await job._choose_server() is second
        second.open = SLOTS
        assert await job._choose_server() is first
        first.open = SLOTS
        assert await job._choose_server() is second, "all are full"
        second.up = False
        assert await job._choose_server() is first
        second.up = True
        fleet.members.remove(second)
        assert await job._choose_server() is first
        fleet.members.append(second)
        job.lost["second"] = 1
        assert await job._choose_server() is first
