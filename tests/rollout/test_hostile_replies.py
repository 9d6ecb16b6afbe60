"""Servers and networks that fail in the middle: what reaches the run is exact, or the run ends and says why.

1. Whatever happens to streams and orders, each sample of each request ends once, with the ids, log-probs and versions
   that the engine in this process gives, as long as no request is lost too often.
2. A request that was lost `attempts` times fails with the server and what was wrong with its answer.
3. A server that does not take weights is brought to them later; one that says that it did, but did not, ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from faulty_proxy import EVENT_FAULTS, FOREIGN, ORDER_FAULTS, STREAM_FAULTS, Fault, Servers
from fleet_cases import asked, exact, fleet_of, publish, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_cases import model
from rollout_cases import collect, until

import models
from rollout.engine import EngineError, WeightsMismatch
from rollout.fleet import FleetEngine
from rollout.fleet_server import FleetOptions
from rollout.jax_engine import JaxEngine

pytestmark = pytest.mark.slow
OPTIONS = FleetOptions(patience=1.0, start_seconds=60.0, look_every=0.1, attempts=12, interval=2)


@contextlib.contextmanager
def fleet_over(servers: Servers, options: FleetOptions = OPTIONS, seats: int = 2) -> Iterator[list[FleetEngine]]:
    fleet = fleet_of(*servers.addresses, seats=seats, options=options)
    try:
        fleet.call(fleet.ready).result(60)  # else a fault may find a server that is only starting
        yield fleet.seats
    finally:
        servers.reset()
        fleet.close()


KINDS = [*EVENT_FAULTS, *STREAM_FAULTS]
ROUTES = ("/update_weights_from_disk", "/weights_checker", "/pause_generation", "/continue_generation", "/v1/loads")
IN_STREAMS = st.builds(Fault, st.sampled_from(KINDS), st.integers(0, 8))
IN_ORDERS = st.builds(Fault, st.sampled_from(ORDER_FAULTS), st.just(0), st.sampled_from(ROUTES))
FAULTS = st.builds(operator.add, st.lists(IN_STREAMS, max_size=3), st.lists(IN_ORDERS, max_size=1))  # two cost a delay
TEMPERATURES = st.sampled_from([0.0, 0.8, 2.0])
ASKED = st.builds(
    dict, n=st.integers(1, 3), seed=st.integers(0, 5), tokens=st.integers(1, 20), temperature=TEMPERATURES
)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # what servers and fleet do meanwhile
def test_what_happens_on_the_way_does_not_show(pair: Servers, here: JaxEngine) -> None:
    fired: set[str] = set()
    with fleet_over(pair) as engines:
        run(publish(engines, here, 0))
        current = [0]  # the seed of the weights, and how often they changed

        @settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
        @given(st.tuples(FAULTS, FAULTS), st.lists(ASKED, min_size=1, max_size=3), st.booleans())
        def check(faults: tuple[list[Fault], list[Fault]], wanted: list[dict[str, Any]], changes: bool) -> None:
            async def work() -> None:
                version = engines[0].stats().version
                if changes:
                    current[0] += 1
                    version = await publish(engines, here, current[0] % 2)
                await asyncio.gather(
                    *(exact(engines[i % 2], here, asked(**how), version) for i, how in enumerate(wanted))
                )

            for proxy, script in zip(pair.proxies, faults, strict=True):
                proxy.reset()
                proxy.script.extend(script)
            run(work())
            for proxy in pair.proxies:
                fired.update(proxy.fired)

        check()
    assert len(fired) > 5, sorted(fired)


def fault_of(kind: str) -> Fault:
    """A fault as early as it can happen."""
    return Fault(kind, at=1 if kind == "tokens that change" else 0)


# At the first tokens, between two events, at the last ones, and behind them.
SOME = ("status 503", "another id", "tokens that change", "cut", "closed", "early stop", "few versions", "twice")


@pytest.mark.slow
async def test_a_faulty_server_costs_nothing_but_time(pair: Servers, here: JaxEngine) -> None:
    """One of two servers never answers as it should: everything is right, from the other one."""
    with fleet_over(pair, dataclasses.replace(OPTIONS, patience=30.0)) as engines:
        version = await publish(engines, here, 0)
        for kind in SOME:
            pair.reset()
            # After the last trouble, both are asked again.
            await until(lambda: all(server.usable for server in engines[0].fleet.members))
            pair.proxies[0].forever = fault_of(kind)
            wanted = enumerate(engines)
            await asyncio.gather(*(exact(seat, here, asked(n=2, seed=seed), version) for seed, seat in wanted))
            assert kind in pair.proxies[0].fired, kind


@pytest.mark.long
async def test_a_request_that_is_lost_too_often_says_why(pair: Servers, here: JaxEngine) -> None:
    for attempts, kinds in ((1, KINDS), (3, ["cut"])):
        with fleet_over(pair, dataclasses.replace(OPTIONS, patience=30.0, attempts=attempts, interval=64)) as engines:
            await publish(engines, here, 0)
            for kind in kinds:
                if kind == "twice":
                    continue  # then it has ended
                pair.reset()
                said = STREAM_FAULTS.get(kind) or EVENT_FAULTS[kind][1]
                for proxy in pair.proxies:
                    proxy.forever = fault_of(kind)
                with pytest.raises(EngineError, match=f"lost {attempts} times?: .*http://127.0.0.1:[0-9]+.*({said})"):
                    await collect(engines[0].generate(asked(n=1, tokens=40, temperature=0.0)), 1)
                assert [fired for proxy in pair.proxies for fired in proxy.fired] == [kind] * attempts


async def test_a_stream_that_stalls_is_given_up(pair: Servers, here: JaxEngine) -> None:
    """The server answers, and has nothing to do any more: what it owes does not come."""
    with fleet_over(pair) as engines:
        version = await publish(engines, here, 0)
        await until(lambda: all(server.up for server in engines[0].fleet.servers()))  # else the other one is asked
        pair.proxies[0].script.extend([Fault("stall", at=2), Fault("stall", at=0)])
        await asyncio.gather(*(exact(engines[0], here, asked(seed=seed), version) for seed in range(2)))
        assert pair.proxies[0].fired == ["stall"] * 2


async def test_a_server_that_hangs_is_noticed(pair: Servers, here: JaxEngine) -> None:
    with fleet_over(pair) as engines:
        version = await publish(engines, here, 0)
        await until(lambda: all(server.up for server in engines[0].fleet.servers()))  # else the other one is asked
        for seat in engines:  # a server that compiles is silent for longer than a look takes
            await exact(seat, here, asked(), version)
        pair.proxies[0].reset()
        pair.proxies[0].script.extend([Fault("stall", at=1), Fault("stall", route="/v1/loads")])
        await exact(engines[0], here, asked(), version)
        assert pair.proxies[0].fired.count("stall") == 2
        pair.proxies[0].reset()
        await until(lambda: all(server.up for server in engines[0].fleet.servers()))
        await exact(engines[0], here, asked(), version)
        assert pair.proxies[0].calls["/generate"]


@pytest.mark.slow
async def test_weights_that_a_server_does_not_take_come_later(pair: Servers, here: JaxEngine) -> None:
    """Each order of an update reads its reply by itself; the other faults show whatever the order is."""
    update, check, pause = "/update_weights_from_disk", "/weights_checker", "/pause_generation"
    faults = [("status 500", update), ("cut", check), ("no JSON", pause)]
    faults += [("nonsense", update), ("nonsense", check), ("nonsense", pause)]
    with fleet_over(pair, seats=1) as engines:
        await publish(engines, here, 0)
        for number, (kind, route) in enumerate(faults, 1):
            await until(lambda: all(server.usable for server in engines[0].fleet.members))
            pair.reset()
            for proxy in pair.proxies:
                proxy.script.append(Fault(kind, route=route))
            version = await publish(engines, here, number % 2)
            await asyncio.gather(*(exact(engines[0], here, asked(seed=seed), version) for seed in range(4)))
            await until(lambda new=version: all(server.version == new for server in engines[0].fleet.servers()))
            assert [proxy.fired for proxy in pair.proxies] == [[kind]] * 2, (kind, route)


async def test_weights_that_did_not_arrive_end_the_run(pair: Servers, here: JaxEngine) -> None:
    with fleet_over(pair) as engines:
        await publish(engines, here, 0)
        pair.proxies[1].script.append(Fault("nothing done", route="/update_weights_from_disk"))
        with pytest.raises(
            WeightsMismatch, match=f"{pair.proxies[1].address}: after the update .* none of its tensors"
        ):
            await publish(engines, here, 1)
        with pytest.raises(WeightsMismatch):
            await collect(engines[0].generate(asked()), 2)


@pytest.mark.slow
async def test_an_older_version_is_served_again(pair: Servers, here: JaxEngine) -> None:
    """A run that goes back to an older checkpoint evaluates, and goes on, with its version."""
    with fleet_over(pair) as engines:
        older, newer = (models.split(model("text", seed))[1] for seed in (0, 1))
        for version, params in ((10_005, older), (10_010, newer), (10_005, older), (10_006, newer)):
            await asyncio.gather(*(seat.update_weights(version, params) for seat in engines))
            await here.update_weights(version, params)
            await asyncio.gather(*(exact(seat, here, asked(n=2), version) for seat in engines))


@pytest.mark.medium
@pytest.mark.parametrize("order", ["pause", "resume"])
async def test_a_server_that_does_not_take_an_order_takes_it_later(pair: Servers, here: JaxEngine, order: str) -> None:
    """Nothing is generated while paused, and everything behind it, by a server that answered an order with an error."""
    with fleet_over(pair, seats=1) as engines:
        seat = engines[0]
        version = await publish(engines, here, 0)
        route = {"pause": "/pause_generation", "resume": "/continue_generation"}[order]
        for proxy in pair.proxies:
            proxy.script.append(Fault("status 500", route=route))
        running = asyncio.create_task(exact(seat, here, asked(n=3, tokens=40), version))
        await seat.pause()
        waiting = asyncio.create_task(exact(seat, here, asked(), version))
        await until(lambda: order == "resume" or all(server.up for server in seat.fleet.servers()))
        counts = [each.stats().tokens_generated for each in pair.engines]
        await asyncio.sleep(0.3)
        assert [each.stats().tokens_generated for each in pair.engines] == counts
        assert not waiting.done()
        await seat.resume()
        await asyncio.gather(running, waiting)
        assert all(proxy.fired == ["status 500"] for proxy in pair.proxies)


async def test_a_server_that_others_gave_weights_is_given_ours_again(pair: Servers, here: JaxEngine) -> None:
    """As one that is not ours has, when it was started again between two looks."""
    with fleet_over(pair, seats=1) as engines:
        version = await publish(engines, here, 0)
        for each in pair.engines:
            pair.call(each.update_weights(FOREIGN, models.split(model("text", 7))[1]))
        await exact(engines[0], here, asked(tokens=30), version)
