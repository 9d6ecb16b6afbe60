"""A preprocessor and a client's connection with it: real processes, real sockets, real files."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from flight_cases import OTHERS, ROOT, SETTINGS, PlainStore, pictures, processes
from pyarrow import flight

from fluxjax.base.errors import DataError
from fluxjax.data import flight_wire
from fluxjax.data.flight_client import FlightPlace, PlaceLost, PlaceRefuses
from fluxjax.data.flight_server import FlightServer
from fluxjax.data.flight_wire import batch_of, patches_of
from fluxjax.data.tickets import MediaRef, StaleTicket, Ticket
from models.processing import MediaError
from models.shadow import Rows


@pytest.fixture
def served():
    """A server in this process."""
    server = FlightServer(PlainStore, "127.0.0.1", 0)
    yield server
    server.close()


@pytest.fixture
def place(served):
    place = FlightPlace(served.address, SETTINGS)
    yield place
    place.close()


def looked(place, refs) -> list[Any]:
    return [outcome_of(place, ref) for ref in refs]


def outcome_of(place, ref) -> Any:
    try:
        return place.look(ref, 30.0)
    except (MediaError, DataError) as error:
        return error


def test_slices_are_those_of_direct_decoding(tmp_path):
    refs = pictures(tmp_path, 5)
    direct = PlainStore(SETTINGS)
    with processes() as (process,):
        place = FlightPlace(process.address, SETTINGS)
        place.greet(30.0)
        tickets = looked(place, refs)
        assert tickets == direct.look(refs)
        rows = [Rows(str(ticket), 1, ticket.num_patches) for ticket in reversed(tickets)]
        rows.append(Rows(str(tickets[2]), 0, 1))
        for ours, theirs in zip(place.fetch(rows, 30.0), direct.fetch_bytes(rows), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert place.stats(10.0) == {"decoded": 5, "queue_depth": 0}
        place.close()
        assert process.end(signal.SIGTERM) == 0, "SIGTERM is a polite end"


def test_batches_share_memory_with_patches():
    patches = np.arange(6 * 3 * 4, dtype=np.uint8).reshape(6, 3, 4)
    batch = batch_of(patches[2:5])
    assert batch.column(0).buffers()[1].address == patches[2:].ctypes.data
    back = patches_of(batch.slice(1), 12)
    np.testing.assert_array_equal(back, patches[3:5])
    assert np.shares_memory(back, patches)
    with pytest.raises(ValueError, match="not of patches of 15 bytes"):
        patches_of(batch, 15)


def test_errors_travel_by_kind(place, tmp_path):
    good, changed = pictures(tmp_path, 2)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    store = tmp_path / "broken store.png"
    store.write_bytes(b"")
    stamps = [f"{file.stat().st_size}-{file.stat().st_mtime_ns}" for file in (broken, store)]
    absent = MediaRef("image", str(tmp_path / ("ä" * 2000)), "1-1")
    place.greet(30.0)
    ticket = looked(place, [changed])[0]
    os.utime(changed.path, ns=(1, 1))
    refs = [good, MediaRef("image", str(broken), stamps[0]), MediaRef("image", str(store), stamps[1]), absent, changed]
    fine, unusable, failed, missing, _ = looked(place, refs)
    assert isinstance(fine, Ticket)
    assert isinstance(unusable, MediaError) and unusable.path == str(broken)[:256] and unusable.reason
    assert isinstance(failed, DataError) and "RuntimeError: this store is broken" in str(failed)
    assert isinstance(missing, MediaError) and "File name too long" in str(missing)
    other = Ticket(MediaRef("image", changed.path, "7-7"), ticket.settings, ticket.medium)
    with pytest.raises(StaleTicket, match="has changed"):
        place.fetch([Rows(str(fine), 0, 1), Rows(str(other), 0, 1)], 30.0)
    with pytest.raises(MediaError, match="File name too long"):
        place.fetch([Rows(str(Ticket(absent, ticket.settings, ticket.medium)), 0, 1)], 30.0)


def test_a_preprocessor_that_was_started_anew_answers_as_before(served, place, tmp_path):
    refs = pictures(tmp_path, 1)
    ticket = looked(place, refs)[0]
    served._served = None
    assert looked(place, refs) == [ticket]
    served._served = None
    assert len(place.fetch([Rows(str(ticket), 0, 2)], 30.0)[0]) == 2


def test_a_preprocessor_serves_the_settings_of_one_run(served, place, tmp_path):
    (ticket,) = looked(place, pictures(tmp_path, 1))
    assert ticket.settings == SETTINGS.digest
    with pytest.raises(PlaceRefuses, match="serves a run with other media settings"):
        FlightPlace(served.address, OTHERS).greet(30.0)


def test_the_token_is_needed():
    with processes(token="right") as (process,):
        for token in ("", "wrong", "right and more"):
            place = FlightPlace(process.address, SETTINGS, token)
            for ask in (place.greet, place.stats):
                with pytest.raises(PlaceRefuses, match="FLUXJAX_TOKEN must be the same"):
                    ask(10.0)
            with pytest.raises(PlaceRefuses, match="FLUXJAX_TOKEN must be the same"):
                place.fetch([Rows("x", 0, 1)], 10.0)
            place.close()
        FlightPlace(process.address, SETTINGS, "right").greet(30.0)


@pytest.mark.parametrize(
    ("flags", "token", "message"),
    [
        (["--listen", "0.0.0.0:0"], "", "--listen 0.0.0.0:0 can be reached from other machines: set FLUXJAX_TOKEN"),
        (["--listen", "127.0.0.1"], "", "--listen 127.0.0.1: must be HOST:PORT"),
        (["--listen", "203.0.113.1:0"], "secret", "--listen 203.0.113.1:0 can't be listened on"),
        (["--cache-gib", "0"], "", "--cache-gib is 0.0; it must be greater than 0"),
        (["--workers", "many"], "", "argument --workers: invalid int value: 'many'"),
        ([], "two words", "FLUXJAX_TOKEN must be ASCII without white space"),
    ],
)
def test_wrong_flags_are_one_line(flags, token, message):
    words = [sys.executable, "-m", "fluxjax.preprocess", *flags]
    environment = {**os.environ, "FLUXJAX_TOKEN": token}
    ended = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.splitlines()[-1].startswith(f"error: {message}")


def test_an_answer_of_another_release_is_refused(place, monkeypatch):
    monkeypatch.setattr("fluxjax.data.flight_client.PROTOCOL", 3)
    monkeypatch.setattr(FlightServer, "_greet", lambda self, question: {"protocol": 1})
    with pytest.raises(PlaceRefuses, match="has protocol 1 and reads the media settings as None, this run has 3 and"):
        place.greet(30.0)


@pytest.mark.parametrize(
    ("action", "body", "message"),
    [
        ("look", b"x" * (flight_wire.MOST_REQUEST + 1), "a question has at most 4194304 bytes, not 4194305"),
        ("look", b'{"ref": ["film", "a", "b", "c"]}', "is no medium"),
        ("look", b'{"ref": ["image", "a", "b", "c"]}', "the media settings of the question are not settings"),
        ("settings", b"[]", "is not a JSON object"),
        ("settings", b"\xff", "is not JSON"),
        ("settings", b'{"protocol": 2, "settings": {"layout": 3}}', "are not settings of this release"),
        ("delete", b"", "there is no action 'delete'"),
    ],
)
def test_questions_that_are_none_are_refused(served, action, body, message):
    client = flight.FlightClient(f"grpc://{served.address}")
    with pytest.raises(flight.FlightServerError, match=message):
        list(client.do_action(flight.Action(action, body), flight.FlightCallOptions(timeout=30)))
    client.close()


def test_ranges_that_are_none_are_refused(served, place, tmp_path):
    place.greet(30.0)
    ticket = looked(place, pictures(tmp_path, 1))[0]
    word, count = str(ticket), ticket.num_patches
    fields = json.loads(word)
    huge = json.dumps([*fields[:5], 1, 2**15, 2**15, 0.0, False])
    words = json.dumps([*fields[:5], "1", 4, 4, 0.0, False])
    other = json.dumps([*fields[:4], "other digest", *fields[5:]])

    def asked(ranges):
        return json.dumps({"settings": SETTINGS.to_json(), "ranges": ranges}).encode()

    cases = [
        (b"x" * (flight_wire.MOST_REQUEST + 1), "a question has at most"),
        (b"{}", "has no list of ranges"),
        (asked([]), "has 1 to 64 ranges, not 0"),
        (asked([[word, 0, 1]] * 65), "has 1 to 64 ranges, not 65"),
        (asked([[word, 1, 1]]), "are no range"),
        (asked([[word, -1, 1]]), "are no range"),
        (asked([[word, 0, True]]), "are no range"),
        (asked([["ticket", 0, 1]]), "is no ticket"),
        (asked([[words, 0, 1]]), "^question: "),
        (asked([[word, 0, count + 1]]), f"rows 0 to {count + 1} were asked for, but the medium has {count}"),
        (asked([[huge, 0, 2**16]]), "a range has at most 67108864 bytes"),
        (asked([[other, 0, 1]]), "has other media settings"),
        (asked([[word, 0, 1], [other, 0, 1]]), "has other media settings"),
    ]
    client = flight.FlightClient(f"grpc://{served.address}")
    for body, message in cases:
        with pytest.raises(flight.FlightServerError, match=message):
            client.do_get(flight.Ticket(body), flight.FlightCallOptions(timeout=30)).read_all()
    client.close()


def test_nobody_there_and_something_else_there_are_lost_places(tmp_path):
    with processes() as (process,):
        address = process.address
    place = FlightPlace(address, SETTINGS)
    with pytest.raises(PlaceLost, match="FlightUnavailableError"):
        place.greet(10.0)
    place.close()
    with pytest.raises(PlaceLost):
        place.greet(10.0)

    class Other(flight.FlightServerBase):
        def do_action(self, context, action):
            return iter([b"[]"])

        def do_get(self, context, ticket):
            return flight.RecordBatchStream(pa.table({"a": [1]}))

    with Other("grpc://127.0.0.1:0") as other:
        place = FlightPlace(f"127.0.0.1:{other.port}", SETTINGS)
        with pytest.raises(PlaceLost, match="that can't be read"):
            place.greet(10.0)
        with pytest.raises(PlaceLost, match="not of patches"):
            place.fetch([Rows("x", 0, 1)], 10.0)
        place.close()


def test_addresses_that_are_none_are_named():
    for address in ("nowhere", "a b:1"):
        with pytest.raises((PlaceRefuses, PlaceLost)):
            FlightPlace(address, SETTINGS).greet(5.0)
    assert issubclass(PlaceRefuses, DataError)


def test_two_preprocessors_do_not_share_a_port(served):
    with pytest.raises(OSError, match=f"{served.address} can't be listened on"):
        FlightServer(PlainStore, "127.0.0.1", served.port)


def test_the_process_does_without_jax():
    """It would take longer to start, and a GPU's memory is not for preprocessors."""
    imports = "import sys, fluxjax.preprocess, fluxjax.data.flight_server, fluxjax.data.local_store"
    code = f"{imports}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
