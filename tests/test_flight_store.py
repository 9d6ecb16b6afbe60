"""A store over several preprocessors: real processes that are killed, stopped and started while threads ask."""

import concurrent.futures
import contextlib
import itertools
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from flight_cases import SETTINGS, PlainStore, Process, all_rows, check, pictures, processes
from process_cases import until

from fluxjax.base.errors import DataError
from fluxjax.base.statuses import MediumStage
from fluxjax.data.flight_client import PlaceRefuses, PlaceSilent
from fluxjax.data.flight_server import FlightServer
from fluxjax.data.tickets import MediaRef, MediaStore, StaleTicket, Ticket
from fluxjax.runtime import flight_store
from fluxjax.runtime.flight_store import FlightStore
from models.processing import MediaError
from models.shadow import Rows, ShadowError


@contextlib.contextmanager
def store_of(count=1, token="", slow=0.0, make=PlainStore, threads=8, **options):
    """A store, and its preprocessors, which are all there, in this process."""
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(count):
            servers.append(FlightServer(lambda s: make(s, slow), "127.0.0.1", 0, token=token, threads=threads))
            stack.callback(servers[-1].close, 0.1)
        addresses = {f"place {n}": server.address for n, server in enumerate(servers)}
        store = FlightStore(addresses, SETTINGS, token, **options)
        stack.callback(store.close)
        until_up(store)
        yield store, servers


def until_up(store):
    until(lambda: all(place.up for place in store.statuses()))


def counts(store, name):
    return [seat.counts[name] for seat in store.seats.values()]


def questions(store):
    """The places that were asked to look, in order."""
    return [step.place for step in store.history() if step.stage is MediumStage.LOOKED_AT]


class MuteStore(PlainStore):
    """Says nothing of itself for a while."""

    def stats(self):
        time.sleep(1.5)
        return super().stats()


@contextlib.contextmanager
def stuck_stores(ref, everywhere, **options):
    """A store as of `store_of`; the first place that is asked for the medium `ref` is stuck then, or all are."""
    ending = threading.Event()
    stuck: list[PlainStore] = []

    class StuckStore(PlainStore):
        def _load(self, wanted):
            if wanted == ref and (everywhere or not stuck or self in stuck):
                stuck.append(self)
                ending.wait(60)
            return super()._load(wanted)

    with store_of(2, make=StuckStore, **options) as found:
        try:
            yield found
        finally:
            ending.set()


@contextlib.contextmanager
def stores(count=1, token="", lease_seconds=30.0, patience=30.0, **process):
    """A store, and its preprocessors by place."""
    with processes(count, token=token, **process) as started:
        addresses = {f"place {number}": process.address for number, process in enumerate(started)}
        store = FlightStore(addresses, SETTINGS, token, lease_seconds=lease_seconds, patience=patience)
        with contextlib.closing(store):
            yield store, started


def test_media_are_spread_over_places_and_slices_come_from_their_holders(tmp_path):
    refs = pictures(tmp_path, 12)
    with store_of(3, token="word") as (store, _):
        assert isinstance(store, MediaStore)
        tickets: list[Any] = store.look(refs + refs[:2])
        assert tickets[12:] == tickets[:2]
        check(store, refs, tickets[:12])
        assert counts(store, "looks") == [4, 4, 4], "as many at each"
        assert counts(store, "fetches") == [4, 4, 4], "each from where it is"
        patches = sum(ticket.num_patches for ticket in tickets[:12])
        assert sum(place.bytes for place in store.statuses()) == SETTINGS.patch_bytes * patches
        assert all(place.lost == place.queued == 0 for place in store.statuses())
        assert not any(seat.busy for seat in store.seats.values())
        holders = [store.holder(str(ticket)) for ticket in tickets]
        assert store.look(refs) == tickets[:12] and [store.holder(str(ticket)) for ticket in tickets] == holders
        assert {step.stage for step in store.history()} == {MediumStage.LOOKED_AT, MediumStage.HELD}


def test_rows_come_in_the_order_asked_and_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_store, "MOST_BATCH", 3 * SETTINGS.patch_bytes)
    monkeypatch.setattr(flight_store, "MOST_RANGES", 4)
    monkeypatch.setattr(flight_store, "_MOST_FETCHED", 10 * SETTINGS.patch_bytes)
    refs, direct = pictures(tmp_path, 4), PlainStore(SETTINGS)
    with store_of(2) as (store, _):
        tickets: list[Any] = store.look(refs)
        a, b, c, d = tickets
        whole = Rows(str(a), 0, a.num_patches)
        rows = [Rows(str(d), 1, 4), whole, Rows(str(d), 0, 1), whole, Rows(str(c), 1, 7)]
        got, wanted = store.fetch(rows), direct.fetch(rows)
        for ours, theirs in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert store.fetch([]) == []
        assert store.fetch([Rows(str(b), 2, 2)])[0].shape == (0, SETTINGS.patch_bytes)
        shadow = d.shadow(SETTINGS.patch_bytes)
        np.testing.assert_array_equal(shadow.materialize(store.fetch), direct.fetch(all_rows([d]))[0])
        with pytest.raises(ShadowError):
            np.asarray(shadow)


def test_errors_are_those_of_direct_decoding(tmp_path):
    refs = pictures(tmp_path, 3)
    absent = MediaRef("image", str(tmp_path / "absent.png"), "1-1")
    with store_of(2) as (store, _):
        found: list[Any] = store.look([refs[0], absent, refs[1]])
        assert isinstance(found[1], MediaError) and "absent.png: cannot be read" in str(found[1])
        assert isinstance(found[0], Ticket) and isinstance(found[2], Ticket)
        os.utime(refs[2].path, ns=(1, 1))
        assert isinstance(store.look(refs[2:])[0], StaleTicket)
        with pytest.raises(StaleTicket, match="has changed"):
            stale = Ticket(refs[2], SETTINGS.digest, found[0].medium)
            store.fetch([*all_rows([found[0]]), *all_rows([stale])])


def test_a_medium_that_no_preprocessor_can_look_at_ends_the_look(tmp_path):
    (ref,) = pictures(tmp_path / "broken store", 1)
    with store_of(2) as (store, _):
        with pytest.raises(DataError, match="RuntimeError: this store is broken"):
            store.look([ref])
        assert sorted(questions(store)) == ["place 0"] * 2 + ["place 1"] * 2, "places are tried in turn"
        check(store, pictures(tmp_path / "fine", 2))


def test_a_hint_tells_who_holds_a_medium(tmp_path):
    refs = pictures(tmp_path, 6)
    with store_of(3) as (store, started):
        tickets: list[Any] = store.look(refs)
        addresses = {f"place {number}": process.address for number, process in enumerate(started)}
        with contextlib.closing(FlightStore(addresses, SETTINGS)) as other:
            until_up(other)
            for ticket in tickets:
                other.hint(str(ticket), store.holder(str(ticket)))
                other.hint(str(ticket), "a place that is not there")
            check(other, refs, tickets)
            assert counts(other, "fetches") == counts(store, "looks") and sum(counts(other, "fetches")) == 6


def test_a_place_that_comes_back_at_its_address_is_used_again(tmp_path):
    refs = pictures(tmp_path, 4)
    with stores(1) as (store, started):
        tickets: list[Any] = store.look(refs[:2])
        seat = store.seats["place 0"]
        earlier = seat.link
        assert earlier is not None
        started[0].end()
        asking = concurrent.futures.ThreadPoolExecutor(2)
        looked, fetched = asking.submit(store.look, refs), asking.submit(store.fetch, all_rows(tickets))
        time.sleep(0.5)
        assert not looked.done() and not fetched.done()
        started[0] = Process("--listen", started[0].address)
        check(store, refs, looked.result(30))
        assert len(fetched.result(30)) == 2
        with store.lock:
            store.lose(seat, earlier, "somebody notices late")
        assert store.statuses()[0].up, "the connection that was lost is another one"
        asking.shutdown()


def test_all_places_gone_is_an_error_that_names_them(tmp_path):
    refs = pictures(tmp_path, 1)
    with stores(2, patience=0.7) as (store, started):
        tickets = store.look(refs)
        for process in started:
            process.end()
        for ask in (lambda: store.look(pictures(tmp_path / "more", 3)), lambda: store.fetch(all_rows(tickets))):
            with pytest.raises(DataError, match="no preprocessor answers for 1 s: place 0 at") as told:
                ask()
            assert all(process.address in str(told.value) for process in started)
    nobody = FlightStore([], SETTINGS, patience=0.1)
    with contextlib.closing(nobody), pytest.raises(DataError, match="there are no addresses"):
        nobody.look(refs)


def test_a_place_that_refuses_is_an_error_at_once(tmp_path):
    refs = pictures(tmp_path, 1)
    with store_of(token="right") as (_, (server,)):
        stranger = FlightStore([server.address], SETTINGS, "wrong")
        said = f"preprocessor at {server.address} wants another token"
        with contextlib.closing(stranger), pytest.raises(DataError, match=said):
            stranger.look(refs)
    assert issubclass(PlaceRefuses, DataError)
    with stores(protocol=7) as (store, _), pytest.raises(DataError, match="this preprocessor 7: start both from one"):
        store.look(refs)


def test_a_closed_or_failed_store_lets_nobody_wait(tmp_path):
    refs = pictures(tmp_path, 2)
    with stores(1, slow=1.0) as (store, started), concurrent.futures.ThreadPoolExecutor(2) as asking:
        tickets = store.look(refs[:1])
        started[0].send(signal.SIGSTOP)
        waiting = asking.submit(store.look, refs)
        time.sleep(0.2)
        store.fail("preprocessors can't be started")
        with pytest.raises(DataError, match="can't be started"):
            waiting.result(10)
        store.close()
        with pytest.raises(DataError, match="is closed"):
            store.fetch(all_rows(tickets))
        with pytest.raises(DataError, match="is closed"):
            store.look(refs)
        started[0].send(signal.SIGCONT)


def test_a_hung_place_is_lost_after_the_lease(tmp_path):
    refs = pictures(tmp_path, 16)
    silent: list[str] = []
    with processes(2, slow=0.2) as started:
        addresses = {f"place {number}": process.address for number, process in enumerate(started)}

        def lapsed(place: str) -> None:
            silent.append(store.seats[place].reason)

        store = FlightStore(addresses, SETTINGS, lease_seconds=1.0, silent=lapsed)
        until_up(store)
        started[1].send(signal.SIGSTOP)
        begin = time.monotonic()
        check(store, refs)
        assert time.monotonic() - begin > 1.0 and silent == ["it did not answer for 1 s"]
        assert not store.statuses()[1].up
        started[1].send(signal.SIGCONT)
        until(lambda: store.statuses()[1].up)
        tickets: list[Any] = store.look(refs[:4])
        assert {store.holder(str(ticket)) for ticket in tickets} == {"place 0"}
        started[0].send(signal.SIGSTOP)
        check(store, refs[:4], tickets)
        assert len(silent) == 2 and counts(store, "lost") == [1, 1], "a fetch, too, loses it"
        store.close()


@pytest.mark.parametrize(
    ("media", "slow", "make"),
    [
        pytest.param(6, 0.12, PlainStore, id="for each of many ranges it has a lease"),
        pytest.param(3, 0.5, MuteStore, id="batches that come are signs of life"),
        pytest.param(1, 0.7, PlainStore, id="statistics are signs of life"),
    ],
)
def test_a_place_that_gives_slowly_is_not_lost(tmp_path, media, slow, make):
    silent: list[str] = []
    tickets = PlainStore(SETTINGS).look(refs := pictures(tmp_path, media))
    with store_of(1, slow=slow, make=make, threads=1, lease_seconds=0.4, silent=silent.append) as (store, servers):
        check(store, refs, tickets)
        assert counts(store, "lost") == [0] and not silent
        assert servers[0]._served.store._decoded == media, "what was decoded for the first question is still there"


def test_many_media_wait_until_the_place_has_room(tmp_path):
    silent: list[str] = []
    refs = pictures(tmp_path, 60)
    with store_of(1, slow=0.03, threads=2, lease_seconds=0.25, silent=silent.append) as (store, _):
        with concurrent.futures.ThreadPoolExecutor(1) as asking:
            looked = asking.submit(store.look, refs)
            until(lambda: store.statuses()[0].queued > 0, 10.0)
            link = store.seats["place 0"].link
            assert link is not None and link.working <= 4, "it is asked for twice as many as it has threads"
            assert sum(thread.name == "flight-look" for thread in threading.enumerate()) <= 32
            assert looked.result(30) == PlainStore(SETTINGS).look(refs)
        assert len(questions(store)) == 60, "no lease ran out: leases begin when a question is really asked"
        assert counts(store, "lost") == [0] and not silent
        until(lambda: store.statuses()[0].queued == 0, 10.0)


def test_what_nobody_waits_for_any_more_is_not_decoded(tmp_path):
    refs = pictures(tmp_path, 3)
    with store_of(1, slow=0.3, threads=1) as (store, servers), concurrent.futures.ThreadPoolExecutor(1) as asking:
        link = store.seats["place 0"].link
        busy = asking.submit(link.look, refs[0], 30.0)
        time.sleep(0.05)
        with pytest.raises(PlaceSilent):
            link.look(refs[1], 0.1)
        assert link.look(refs[2], 30.0).ref == refs[2] and busy.result(30).ref == refs[0]
        assert servers[0]._served.store._decoded == 2


@pytest.mark.parametrize("fetch", [False, True])
def test_one_medium_that_a_place_is_stuck_on_is_asked_of_another(tmp_path, fetch):
    silent: list[str] = []
    refs = pictures(tmp_path, 2)
    tickets = PlainStore(SETTINGS).look(refs)
    with stuck_stores(refs[0], False, lease_seconds=0.3, silent=silent.append) as (store, _):
        begin = time.monotonic()
        store.fetch(all_rows(tickets)) if fetch else store.look(refs)
        assert 0.3 < time.monotonic() - begin < 1.2, "after one lease"
        assert counts(store, "lost") == [0, 0] and not silent, "it answers others"


@pytest.mark.parametrize("fetch", [False, True])
def test_a_medium_that_all_places_are_stuck_on_ends_the_question(tmp_path, fetch, monkeypatch):
    monkeypatch.setattr(flight_store, "_LOSSES", 3)
    refs = pictures(tmp_path, 1)
    tickets = PlainStore(SETTINGS).look(refs)
    with stuck_stores(refs[0], True, lease_seconds=0.1) as (store, _):
        with pytest.raises(
            DataError, match="were lost or did not answer 3 times over the same media; the last time: place"
        ):
            store.fetch(all_rows(tickets)) if fetch else store.look(refs)
        assert fetch or questions(store)[:2] in (["place 0", "place 1"], ["place 1", "place 0"])


def test_one_file_asked_for_by_many_is_looked_at_once(tmp_path):
    refs = pictures(tmp_path, 3)
    with store_of(2, slow=0.3) as (store, _), concurrent.futures.ThreadPoolExecutor(8) as asking:
        found = [asking.submit(store.look, refs) for _ in range(8)]
        assert all(future.result(30) == found[0].result() for future in found)
        assert sum(counts(store, "looks")) == 3


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(s, marks=pytest.mark.long) for s in (1, 2))]
)
def test_kills_and_stops_lose_and_double_nothing(tmp_path, seed):
    """While threads look and fetch, one preprocessor after the other is killed (and started again, at its address or
    another one) or stopped for longer than the lease, or for a moment."""
    chance = random.Random(seed)
    refs = pictures(tmp_path, 40, seed)
    direct = PlainStore(SETTINGS)
    wanted: list[Any] = direct.look(refs)
    patches = direct.fetch(all_rows(wanted))
    ending, rounds = threading.Event(), itertools.count()

    with stores(3, slow=0.02, lease_seconds=1.0, patience=60.0) as (store, started):

        def ask(number: int) -> int:
            mine, done = random.Random(f"{seed} {number}"), 0
            while not ending.is_set() or not done:
                chosen = mine.sample(range(len(refs)), 12)
                assert store.look([refs[i] for i in chosen]) == [wanted[i] for i in chosen]
                rows = []
                for i in chosen:
                    start = mine.randrange(wanted[i].num_patches)
                    rows.append((i, start, mine.randint(start + 1, wanted[i].num_patches)))
                got = store.fetch([Rows(str(wanted[i]), start, stop) for i, start, stop in rows])
                for (i, start, stop), some in zip(rows, got, strict=True):
                    np.testing.assert_array_equal(some, patches[i][start:stop])
                done += 1
            return done

        with concurrent.futures.ThreadPoolExecutor(3) as asking:
            threads = [asking.submit(ask, number) for number in range(3)]
            try:
                for _ in range(5):
                    time.sleep(chance.uniform(0.1, 0.8))
                    victim = chance.randrange(3)
                    process = started[victim]
                    if chance.random() < 0.5:
                        process.send(signal.SIGSTOP)
                        time.sleep(chance.choice([0.1, 1.5]))
                        process.send(signal.SIGCONT)
                        continue
                    process.end()
                    here = ("--listen", process.address) if chance.random() < 0.5 else ()
                    started[victim] = Process(*here, slow=0.02)
                    store.moved(f"place {victim}", started[victim].address)
                    next(rounds)
            finally:
                ending.set()
            assert all(future.result(120) for future in threads)
        assert sum(counts(store, "lost")) > 0 or not next(rounds)
