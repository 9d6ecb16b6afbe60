"""The fleet: where requests go, what becomes of servers, and the weights that they are proven to have.

1. Requests go to the least loaded server of their seat, the samples of one together.
2. Servers may be killed, hang, never start, join and leave: samples go on elsewhere, exactly where they were.
3. Weights arrive bit for bit, also at a server that was down meanwhile; where they do not, the run ends.
4. What a fleet started ends with it, whatever it is doing, and with its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from faulty_proxy import Fault, Servers
from fleet_cases import QUICK, asked, exact, fleet_of, group_exists, publish, sleeper
from protocol_cases import LONGEST, SLOTS, checkpoint, command, model
from rollout_cases import collect, until
from safetensors.numpy import load_file

import models
from rollout.engine import EngineError, FinishReason, WeightsMismatch
from rollout.fleet import Fleet, FleetEngine
from rollout.fleet_requests import FleetJob
from rollout.fleet_server import FleetOptions, Server
from rollout.jax_engine import JaxEngine
from rollout.local_server import LocalServer, ServerCommand
from rollout.sglang import ServerClient
from rollout.weights.published import SHARED_MEMORY, SharedFolders, sha256

# --- without processes ----------------------------------------------------------------------------


def weights_folders() -> set[pathlib.Path]:
    return set(SHARED_MEMORY.glob(f"fluxjax-weights-{os.getpid()}-*"))  # of this process


@pytest.mark.medium
@pytest.mark.parametrize("lines", [("echo no memory; exit 3",), ("echo no memory; sleep 1000",)], ids=["ends", "hangs"])
async def test_a_server_that_never_starts_fails_its_requests(tmp_path: pathlib.Path, lines: tuple[str, ...]) -> None:
    options = FleetOptions(start_seconds=1.0, look_every=0.1)
    with contextlib.closing(fleet_of(sleeper(tmp_path, *lines), options=options)) as fleet:
        seat = fleet.seats[0]
        await seat.update_weights(1, models.split(model("text"))[1])
        with pytest.raises(EngineError, match=r"(?s)no server for 1 s.*no memory"):
            await collect(seat.generate(asked()), 1)


async def test_an_abort_ends_what_waits_for_a_server(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(fleet_of(sleeper(tmp_path))) as fleet:
        seat = fleet.seats[0]
        first = asyncio.create_task(collect(seat.generate(wanted := asked(n=2)), 2))
        await until(lambda: seat.stats().running == 2)
        await seat.abort(f"{wanted.rid}/1")
        await until(lambda: seat.stats().running == 1)
        await seat.abort(wanted.rid)
        assert [(answer.ids, answer.finish) for answer in await first] == [((), FinishReason.ABORT)] * 2
        with pytest.raises(EngineError, match="no server 9 in the fleet; there are server 0"):
            fleet.leave("server 9")


async def test_a_pause_does_not_count_as_a_lack_of_servers(tmp_path: pathlib.Path) -> None:
    options = FleetOptions(start_seconds=0.5, look_every=0.1)
    with contextlib.closing(fleet_of(sleeper(tmp_path), options=options)) as fleet:
        seat = fleet.seats[0]
        await seat.pause()
        answers = asyncio.create_task(collect(seat.generate(asked()), 1))
        await asyncio.sleep(3.0)
        assert not answers.done()
        await seat.resume()
        with pytest.raises(EngineError, match=r"no server for 0[.]5 s"):
            await answers


async def test_a_closed_fleet_leaves_nothing_and_takes_nothing(tmp_path: pathlib.Path) -> None:
    """Not even the requests that are under way, which fail, and a server that left a moment ago."""
    before = weights_folders()
    servers = [sleeper(tmp_path / str(number)) for number in range(2)]
    fleet = fleet_of(*servers)
    seat = fleet.seats[0]
    await seat.update_weights(1, models.split(model("text"))[1])
    answers = asyncio.create_task(collect(seat.generate(asked()), 1))
    await until(lambda: seat.stats().running and all(server.running for server in servers))
    pids = [server.running.pid for server in servers]
    assert weights_folders() - before
    fleet.leave("server 1")
    await asyncio.to_thread(fleet.close)
    await until(lambda: not any(map(group_exists, pids)))
    with pytest.raises(EngineError, match="closed"):
        await answers
    with pytest.raises(EngineError, match="closed"):
        seat.generate(asked())
    with pytest.raises(EngineError, match="closed"):
        await seat.pause()
    fleet.close()
    assert weights_folders() <= before


def test_a_fleet_that_never_started_closes() -> None:
    before = weights_folders()
    fleet = fleet_of("http://127.0.0.1:1")
    fleet.close()
    fleet.close()
    assert weights_folders() <= before
    with contextlib.closing(fleet_of(seats=1)) as fleet, pytest.raises(EngineError, match="at least one server"):
        fleet.add_seats([])


async def test_a_request_prefers_servers_that_it_was_not_lost_on() -> None:
    """Then those of its seat, then the least loaded: one that fails at once is always that."""
    places: Any = {"lost here": 0, "elsewhere": 1, "busy": 0, "best": 0}
    with contextlib.closing(fleet_of(seats=2)) as fleet:
        for name, seat in places.items():
            server = Server(fleet, name, fleet.seats[seat], ServerClient(""), None)
            server.up, server.holds = True, places
            fleet.members.append(server)
        job = FleetJob(fleet, fleet.seats[0], asked(), lambda chunk: None)
        job.lost["lost here"] = 1
        fleet.members[2].open = 3
        for expected in ("best", "busy", "elsewhere", "lost here"):
            chosen = await job._choose_server()
            assert chosen is not None and chosen.name == expected
            chosen.suspect()


class SlowOrders(ServerClient):
    """The client of no server: its orders take a moment, and it answers what a start and a sleep ask."""

    def __init__(self, running: int = 0) -> None:
        super().__init__("http://127.0.0.1:1")
        self.paused: bool | None = None
        self.running = running

    async def load(self, seconds: float | None = None) -> dict[str, int]:
        return {"running": self.running, "waiting": 0}

    async def asleep(self) -> bool:
        return False

    async def pause(self, mode: str) -> None:
        await asyncio.sleep(0.05)
        self.paused = True

    async def resume(self) -> None:
        await asyncio.sleep(0.05)
        self.paused = False


async def test_a_server_that_comes_up_between_pause_and_resume_goes_on() -> None:
    with contextlib.closing(fleet_of(seats=1)) as fleet:
        client, (seat,) = SlowOrders(), fleet.seats
        server = Server(fleet, "server", seat, client, None)
        fleet.start()  # without the server, which the test raises up itself
        fleet.members.append(server)
        await seat.pause()
        coming = asyncio.wrap_future(fleet.call(server._raise_up))
        await asyncio.sleep(0.02)  # the order to pause is on its way
        await seat.resume()
        await coming
        assert server.up and client.paused is False


async def test_a_pause_leaves_a_seat_that_is_to_sleep_alone() -> None:
    """Samples of another seat end on its server; the server is not lost for that."""
    with contextlib.closing(fleet_of(seats=2, options=dataclasses.replace(QUICK, patience=0.05))) as fleet:
        client, (seat, _) = SlowOrders(running=1), fleet.seats
        server = Server(fleet, "server", seat, client, None)
        server.up, server.open = True, 1
        fleet.start()
        fleet.members.append(server)
        sleeping = asyncio.create_task(seat.sleep())
        await asyncio.sleep(0.01)
        await seat.pause()
        assert server.up and not server.trouble
        sleeping.cancel()


def test_checksums_find_one_bit_and_tensors_too_few_or_too_many() -> None:
    config, (_, params) = model("text").config, models.split(model("text"))
    with contextlib.closing(SharedFolders(config, "float32")) as folders:
        published = folders.write(1, params)
        tensors = load_file(published.folder / "model.safetensors")
        held = {name: sha256([tensor]) for name, tensor in tensors.items()}
        published.checksums.check([held], "this server")
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name].view(np.uint8).reshape(-1)[-1] ^= 1
        with pytest.raises(WeightsMismatch, match=rf"this server: .*{name} has the checksum"):
            published.checksums.check([held | {name: sha256([tensors[name]])}], "this server")
        with pytest.raises(WeightsMismatch, match=r"this server: .*model\.more\.weight, which was not sent"):
            published.checksums.check([held | {"model.more.weight": "0" * 16}], "this server")
        del held["model.norm.weight"]
        with pytest.raises(WeightsMismatch, match="this server: "):
            published.checksums.check([held], "this server")


# --- with servers in a thread ---------------------------------------------------------------------


@pytest.mark.slow
async def test_the_least_loaded_server_of_a_seat_takes_a_request(pair: Servers, here: JaxEngine) -> None:
    with contextlib.closing(fleet_of(*pair.addresses, seats=1)) as fleet:
        seat = fleet.seats[0]
        version = await publish([seat], here)
        await until(lambda: all(server.up for server in fleet.servers()))
        await asyncio.gather(*(exact(seat, here, asked(n=3, seed=seed), version) for seed in range(6)))
        assert [proxy.calls["/generate"] for proxy in pair.proxies] == [3, 3]  # the samples of each together


@pytest.mark.slow
async def test_a_seat_uses_its_own_servers_while_it_has_some(pair: Servers, here: JaxEngine) -> None:
    with contextlib.closing(fleet_of(*pair.addresses)) as fleet:
        seats = fleet.seats
        version = await publish(seats, here)
        await until(lambda: all(server.up for server in fleet.servers()))
        await asyncio.gather(*(exact(seats[1], here, asked(seed=seed), version) for seed in range(3)))
        assert [proxy.calls["/generate"] for proxy in pair.proxies] == [0, 3]
        fleet.leave("server 1")
        await exact(seats[1], here, asked(), version)
        assert [proxy.calls["/generate"] for proxy in pair.proxies] == [1, 3]


@pytest.mark.slow
async def test_a_server_that_is_behind_does_not_help_a_seat_that_is_ahead(pair: Servers, here: JaxEngine) -> None:
    with contextlib.closing(fleet_of(*pair.addresses)) as fleet:
        seats = fleet.seats
        await publish(seats, here)
        version = await publish(seats[:1], here, 1)
        fleet.leave("server 0")
        waits = asyncio.create_task(exact(seats[0], here, asked(), version))
        await asyncio.sleep(0.5)
        assert not waits.done() and not any(proxy.calls["/generate"] for proxy in pair.proxies)
        fleet.join(pair.addresses[0])
        await waits


@pytest.mark.slow
async def test_nothing_is_left_on_a_server_of_a_stream_that_nobody_reads(pair: Servers, here: JaxEngine) -> None:
    with contextlib.closing(fleet_of(*pair.addresses, seats=1)) as fleet:
        seat = fleet.seats[0]
        await publish([seat], here)
        stream = seat.generate(asked(n=8, tokens=50, temperature=0.0))
        await until(lambda: any(each.stats().running for each in pair.engines))
        await stream.aclose()
        await until(lambda: not any(each.stats().running + each.stats().waiting for each in pair.engines))
        await until(lambda: seat.stats().running == 0)


@pytest.mark.slow
async def test_an_abort_reaches_a_server_whatever_comes_first(pair: Servers, here: JaxEngine) -> None:
    """Also before the samples do, and where an order to the server fails."""
    with contextlib.closing(fleet_of(*pair.addresses, seats=1)) as fleet:
        seat = fleet.seats[0]
        try:
            await publish([seat], here)
            for each in pair.engines:  # behind the back of the fleet: no sample ends by itself
                pair.call(each.pause())
            for delay in (0.0, 0.001, 0.01, 0.1):
                pair.proxies[0].script.append(Fault("status 500", route="/abort_request"))
                answers = asyncio.create_task(collect(seat.generate(wanted := asked(n=2, tokens=40)), 2))
                await asyncio.sleep(delay)
                await until(lambda: seat.stats().running)
                await seat.abort(wanted.rid)
                assert [answer.finish for answer in await answers] == [FinishReason.ABORT] * 2
            await until(lambda: not any(each.stats().running + each.stats().waiting for each in pair.engines))
        finally:
            for each in pair.engines:
                pair.call(each.resume())


@pytest.mark.slow
async def test_a_server_that_comes_up_during_an_update_gets_it(pair: Servers, here: JaxEngine) -> None:
    """It is not up when the update begins, and has been brought to what was wanted before."""
    pair.proxies[0].script.append(Fault("late", route="/continue_generation"))
    with contextlib.closing(fleet_of(pair.addresses[0])) as fleet:
        seat = fleet.seats[0]
        fleet.start()
        await until(lambda: pair.proxies[0].calls["/continue_generation"])
        assert not fleet.servers()[0].up
        version = await publish([seat], here)
        await until(lambda: fleet.servers()[0].up)
        assert fleet.servers()[0].version == version
        await exact(seat, here, asked(), version)


@pytest.mark.slow
async def test_a_full_shared_memory_leaves_the_old_weights(
    pair: Servers, here: JaxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(fleet_of(*pair.addresses, seats=1)) as fleet:
        seat = fleet.seats[0]
        version = await publish([seat], here)
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
            with pytest.raises(OSError, match=r"fluxjax-weights-.*MiB of shared memory"):
                await seat.update_weights(version + 1000, models.split(model("text", 1))[1])
        assert seat.stats().version == version
        await exact(seat, here, asked(), version)


# --- with processes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serve(forked_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerCommand]:
    with checkpoint("text", tmp_path_factory.mktemp("fleet") / "model") as folder:
        yield command("serve", folder)


@pytest.fixture(scope="module")
def long_here() -> JaxEngine:
    return JaxEngine(model("text"), slots=SLOTS, max_sequence_tokens=LONGEST)


@pytest.fixture(scope="module")
def two(serve: ServerCommand, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """A fleet of two servers for all tests that find it as it was: both up again."""
    folder = tmp_path_factory.mktemp("two")
    servers = [LocalServer(serve, folder / f"{number}.log") for number in range(2)]
    with contextlib.closing(fleet_of(*servers, seats=1, longest=LONGEST)) as fleet:
        yield Two(fleet, servers, fleet.seats[0])


@dataclasses.dataclass
class Two:
    fleet: Fleet
    servers: list[LocalServer]
    seat: FleetEngine

    async def serves(self, here: JaxEngine, seed: int = 0) -> int:
        """Both servers have the weights of this seed. Returns their version."""
        version = await publish([self.seat], here, seed)
        await until(lambda: [(server.up, server.version) for server in self.fleet.servers()] == [(True, version)] * 2)
        return version


def jobs_of(seat: FleetEngine, here: JaxEngine, version: int, count: int, n: int) -> list[asyncio.Task]:
    """Requests of many tokens, whose answers must be right."""
    return [asyncio.create_task(exact(seat, here, asked(n=n, seed=s, tokens=200), version)) for s in range(count)]


@pytest.mark.long
async def test_a_server_that_dies_or_hangs_is_replaced(two: Two, long_here: JaxEngine) -> None:
    """Its samples go on elsewhere; it comes back with the newest weights, also with those of an update in between."""
    fleet, servers, seat = two.fleet, two.servers, two.seat
    version = await two.serves(long_here)
    await exact(seat, long_here, asked(n=2, tokens=20), version)  # compiled by now
    for number, signals in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        jobs = jobs_of(seat, long_here, version, 2, 4)
        await until(lambda: all(server.open > 0 for server in fleet.members))
        before, pid = fleet.servers()[number].restarts, servers[number].running.pid
        os.killpg(pid, signals)
        began = time.monotonic()
        await until(lambda number=number, before=before: fleet.servers()[number].restarts > before)
        assert time.monotonic() - began < QUICK.patience + 60  # whatever else the machine does
        await until(lambda pid=pid: not group_exists(pid))
        await asyncio.gather(*jobs)
        if signals is signal.SIGKILL:  # with an update while it is down
            version = await two.serves(long_here, 1)
        await until(lambda version=version: [each.version for each in fleet.servers()] == [version] * 2)
        tokens = fleet.servers()[number].tokens
        await asyncio.gather(*(exact(seat, long_here, asked(n=2, seed=seed), version) for seed in range(4)))
        assert fleet.servers()[number].tokens > tokens


@pytest.mark.long
async def test_a_server_that_ends_in_its_sleep_starts_when_it_is_to_wake(two: Two, long_here: JaxEngine) -> None:
    """Its memory is lent to others until then. One that is starting comes up first, or it never would."""
    fleet, servers, seat = two.fleet, two.servers, two.seat
    await two.serves(long_here)
    before = fleet.servers()[1].restarts
    os.killpg(servers[1].running.pid, signal.SIGKILL)
    await until(lambda: fleet.servers()[1].restarts > before and servers[1].ended() is None and servers[1].running)
    starting = servers[1].running.pid
    await seat.sleep()
    assert [server.asleep for server in fleet.servers()] == [True, True] and servers[1].running.pid == starting
    pid = servers[0].running.pid
    os.killpg(pid, signal.SIGKILL)
    await until(lambda: not group_exists(pid) and not fleet.servers()[0].up)
    await asyncio.sleep(1.0)
    assert servers[0].running is None and servers[1].running.pid == starting
    version = await publish([seat], long_here, 1)  # wakes
    await exact(seat, long_here, asked(n=4), version)
    await until(lambda: [server.version for server in fleet.servers()] == [version] * 2)


@pytest.mark.long
async def test_servers_join_and_leave_a_running_fleet(
    two: Two, serve: ServerCommand, long_here: JaxEngine, tmp_path: pathlib.Path
) -> None:
    """Whoever leaves is stopped; its samples go on elsewhere."""
    fleet, seat = two.fleet, two.seat
    version = await two.serves(long_here)
    late = LocalServer(serve, tmp_path / "late.log")
    name = fleet.join(late)
    await until(lambda: all(server.up for server in fleet.servers()))
    jobs = jobs_of(seat, long_here, version, 6, 2)
    await until(lambda: all(server.open == 4 for server in fleet.members))
    pid = late.running.pid
    fleet.leave(name)
    await asyncio.gather(*jobs)
    await until(lambda: not group_exists(pid))


@pytest.mark.long
async def test_a_server_that_slept_when_the_fleet_came_wakes(
    serve: ServerCommand, long_here: JaxEngine, tmp_path: pathlib.Path
) -> None:
    """Servers of others outlive a run: the next one finds them as it left them. Preemptions on them are counted."""
    server = LocalServer(
        dataclasses.replace(serve, flags=(*serve.flags, "--kv-tokens", str(LONGEST))), tmp_path / "server.log"
    )
    server.start()
    try:
        for n, tokens in ((1, 12), (8, LONGEST // 2)):
            with contextlib.closing(fleet_of(server.address, longest=LONGEST)) as fleet:
                seat = fleet.seats[0]
                version = await publish([seat], long_here)
                await exact(seat, long_here, asked(n=n, tokens=tokens), version)
                assert (seat.stats().preemptions > 0) == (n > 1)
                await seat.sleep()
    finally:
        server.stop()


@pytest.mark.long
async def test_samples_of_another_seat_end_before_a_server_sleeps(
    serve: ServerCommand, long_here: JaxEngine, tmp_path: pathlib.Path
) -> None:
    """They are there because their own server is down. What comes later waits for that; and where no server is left,
    for one to come back."""
    servers = [LocalServer(serve, tmp_path / f"{number}.log") for number in range(2)]
    with contextlib.closing(fleet_of(*servers, seats=2, longest=LONGEST)) as fleet:
        lent, other = fleet.seats
        version = await publish([lent, other], long_here)
        await until(lambda: all(server.up for server in fleet.servers()))
        os.killpg(servers[1].running.pid, signal.SIGKILL)
        await until(lambda: fleet.servers()[1].restarts)
        early = asyncio.create_task(exact(other, long_here, asked(tokens=200), version))
        await until(lambda: fleet.members[0].open)
        asleep = asyncio.create_task(lent.sleep())
        await asyncio.sleep(0.1)
        late = asyncio.create_task(exact(other, long_here, asked(), version))
        await asyncio.gather(asleep, early)
        assert [server.restarts for server in fleet.servers()] == [0, 1] and fleet.servers()[0].asleep
        await late  # on the other server, which is back
        restarts = fleet.servers()[1].restarts
        job = asyncio.create_task(exact(other, long_here, asked(tokens=200), version))
        await until(lambda: fleet.members[1].open)
        os.killpg(servers[1].running.pid, signal.SIGKILL)
        await job  # waits for it, since the only other one sleeps
        assert fleet.servers()[1].restarts == restarts + 1
        job = asyncio.create_task(collect(other.generate(asked(n=8, tokens=200)), 8))
        await until(lambda: fleet.members[1].open)
        pid = servers[1].running.pid
        await asyncio.to_thread(fleet.close)
        await until(lambda: not group_exists(pid))
        with pytest.raises(EngineError, match="closed"):
            await job
