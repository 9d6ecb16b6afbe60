"""What users see of pixels: metrics, words, the table and the port, lanes and the picture of who held what when."""

import dataclasses
import io
import itertools
import json
import threading
import time

import numpy as np
import prometheus_client
import pytest
from flight_cases import SETTINGS, PlainStore, pictures
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from rich.text import Text
from run_cases import colours, flags
from test_flight_store import until_up

from fluxjax.base.statuses import MediumStage, PreprocessorStatus, Transition
from fluxjax.base.timeline import Span
from fluxjax.config.cli import load
from fluxjax.config.data import DataConfig
from fluxjax.data.flight_server import FlightServer
from fluxjax.data.local_store import LocalStore, StoreStats
from fluxjax.data.materializer import Materialized
from fluxjax.report.display import Display, data_words, policy_words
from fluxjax.report.metrics import read
from fluxjax.report.pictures import MOST_NAMED, MediumBar, bars_of, look_lanes, media_picture, of_steps
from fluxjax.report.prometheus import PreprocessorCollector
from fluxjax.run.pixels import DataMetrics
from fluxjax.run.trainer import FluxTrainer
from fluxjax.runtime.flight_store import FlightStore
from fluxjax.runtime.places import PlaceCounts

LOOKED_AT, HELD, LOST = MediumStage.LOOKED_AT, MediumStage.HELD, MediumStage.LOST


def place(number: int = 0, **own) -> PreprocessorStatus:
    status = PreprocessorStatus(f"preprocessor-{number}", True, 12, 3_400_000, 2, 0, 9, 5_000_000, 30, 10)
    return dataclasses.replace(status, **own)


# --- numbers ------------------------------------------------------------------------------------


def test_a_step_has_what_is_new_since_the_last_one():
    metrics = DataMetrics()
    now = time.perf_counter()
    stats = StoreStats(hits=3, misses=1, decoded_media=5, decoded_frames=40, queue_depth=2, memory_bytes=3_000_000)
    metrics.since_last(Materialized(1_000_000, 1.0, 0.5), stats, now + 1.0, [])
    more = dataclasses.replace(stats, hits=12, decoded_media=9, decoded_frames=100)
    told = metrics.since_last(Materialized(5_000_000, 3.0, 0.75), more, now + 5.0, [])
    assert told == {
        "data/waited": 0.25,
        "data/fetched_mb": 4.0,
        "data/fetch_mb_per_second": 2.0,
        "data/decoded_media": 4.0,
        "data/decoded_frames_per_second": pytest.approx(15.0),
        "data/queue": 2.0,
        "data/memory_mb": 3.0,
        "data/cache_hits": 1.0,
    }
    told = metrics.since_last(Materialized(5_000_000, 3.0, 0.75), more, now + 5.0, [])
    assert told["data/decoded_frames_per_second"] == pytest.approx(15.0), "nobody was asked meanwhile"
    assert told["data/decoded_media"] == told["data/fetch_mb_per_second"] == 0.0
    assert "data/cache_hits" not in told, "nothing was asked for"


def test_a_step_has_what_each_preprocessor_gave():
    metrics = DataMetrics()
    places = [place(0), place(1, up=False, lost=2)]
    told = metrics.since_last(Materialized(), StoreStats(), 0.0, places)
    assert (told["data/preprocessors_up"], told["data/preprocessors_lost"]) == (1.0, 2.0)
    told = metrics.since_last(Materialized(), StoreStats(), 0.0, [place(0, bytes=5_400_000), places[1]])
    assert (told["data/mb_from/preprocessor-0"], told["data/mb_from/preprocessor-1"]) == (2.0, 0.0)


def test_counts_go_on_when_a_place_begins_anew():
    counts = PlaceCounts()
    counts.hear(StoreStats(hits=5, decoded_media=3, memory_bytes=100))
    counts.hear(StoreStats(hits=7, decoded_media=3, memory_bytes=80))
    assert StoreStats(**counts.total) == StoreStats(hits=7, decoded_media=3, memory_bytes=80)
    counts.silent()
    assert StoreStats(**counts.total) == StoreStats(hits=7, decoded_media=3), "it keeps nothing for us now"
    counts.hear(StoreStats(hits=1, decoded_media=3, memory_bytes=20))
    assert StoreStats(**counts.total) == StoreStats(hits=8, decoded_media=6, memory_bytes=20)


class SilentStore(PlainStore):
    """Says nothing of itself until it may."""

    may = threading.Event()

    def stats(self):
        self.may.wait(60)
        return super().stats()


def test_one_that_does_not_answer_delays_nobody(tmp_path):
    config = DataConfig()
    servers = [
        FlightServer(lambda s: SilentStore(s), "127.0.0.1", 0),
        FlightServer(lambda s: LocalStore(s, config, workers=0), "127.0.0.1", 0),
    ]
    store = FlightStore([server.address for server in servers], SETTINGS, stats_seconds=0.05)
    try:
        until_up(store)
        refs = pictures(tmp_path, 6)
        store.look(refs)
        deadline = time.monotonic() + 60
        while store.stats().decoded_media < 3 and time.monotonic() < deadline:
            began = time.perf_counter()
            store.statuses()
            assert time.perf_counter() - began < 1.0
            time.sleep(0.01)
        stats = store.stats()
        assert stats.decoded_media == stats.decoded_frames == 3 and store.known <= time.perf_counter()
        by_name = {status.name: status for status in store.statuses()}
        assert [by_name[server.address].looks for server in servers] == [3, 3]
        assert [by_name[server.address].decoded for server in servers] == [0, 3]
        assert by_name[servers[1].address].memory_bytes == stats.memory_bytes > 0
    finally:
        SilentStore.may.set()
        store.close()
        for server in servers:
            server.close(0.1)


# --- words, table, port -------------------------------------------------------------------------


def test_words_say_something_or_nothing():
    assert data_words({}) == data_words({"data/waited": 0.0, "data/fetched_mb": 0.0}) == ""
    metrics = {"data/waited": 0.012, "data/decoded_frames_per_second": 340.2, "data/fetched_mb": 12.4}
    assert data_words(metrics) == "waits 0.01 s, decodes 340 frames/s, fetches 12 MB"
    assert data_words(metrics | {"data/decoded_frames_per_second": 0.0}) == "waits 0.01 s, fetches 12 MB"


def test_words_about_a_policy_name_what_is_not_nothing():
    names = {"degree": 1.0, "running": 3.0, "barriers": 2.0, "too_old": 0.0, "deferred": 0.0, "dropped": 4.0}
    metrics = {f"scheduling/{name}": value for name, value in names.items()}
    assert policy_words({}) == policy_words({"scheduling/degree": 1.0}) == ""
    assert policy_words(metrics) == "barriers 2, dropped 4"
    assert policy_words(metrics | {"scheduling/async_ratio": 0.5}) == "async ratio 0.50, barriers 2, dropped 4"


@pytest.mark.parametrize("terminal", [False, True])
def test_display_shows_preprocessors_as_they_are_now(terminal):
    file = io.StringIO()
    lost = place(1, up=False, lost=1, reason="it has moved\nelsewhere")
    with Display(2, console=Console(file=file, force_terminal=terminal, width=160)) as display:
        display.show(preprocessors=lambda: [place(0), lost])
        display.phase("RL", 2)
        display.step(2, {"reward/mean": 0.25, "data/waited": 0.5, "data/fetched_mb": 3.0}, {})
    text = file.getvalue()
    assert "waits 0.50 s, fetches 3.0 MB" in text
    if terminal:
        lines = [Text.from_ansi(line).plain.split() for line in text[text.rindex("restarts") :].splitlines()]
        assert lines[1] == ["preprocessor-0", "2", "9", "3.4", "MB", "5.0", "MB", "0", "up"]
        assert lines[2][-5:] == ["1", "lost:", "it", "has", "moved"]
    else:
        assert " | preprocessors 1/2 up | " in text


def test_prometheus_reads_preprocessors_when_it_asks():
    registry = prometheus_client.CollectorRegistry()
    places: list[PreprocessorStatus] = []
    registry.register(PreprocessorCollector(lambda: places))
    assert prometheus_client.generate_latest(registry) == b"", "nothing where there are none"
    places.append(place(0, lost=3))
    text = prometheus_client.generate_latest(registry).decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    expected = {"up": 1, "queued": 2, "memory_bytes": 5e6}
    totals = {"looks": 12, "decoded": 9, "bytes": 3.4e6, "hits": 30, "misses": 10, "lost": 3}
    expected |= {f"{name}_total": value for name, value in totals.items()}
    assert {key: float(value) for key, value in values.items()} == {
        f'fluxjax_preprocessor_{name}{{preprocessor="preprocessor-0"}}': value for name, value in expected.items()
    }


# --- who held what when -------------------------------------------------------------------------

HISTORY = [
    Transition("x", "a", LOOKED_AT, 1.0),
    Transition("y", "b", LOOKED_AT, 1.5),
    Transition("x", "a", HELD, 2.0),
    Transition("z", "a", LOOKED_AT, 2.0),
    Transition("", "a", LOST, 4.0),
    Transition("z", "b", LOOKED_AT, 4.0),
    Transition("z", "b", HELD, 6.0),
    Transition("y", "b", MediumStage.UNUSABLE, 7.0),
]


def test_bars_end_with_an_answer_and_with_the_place():
    assert bars_of(HISTORY, 10.0) == [
        MediumBar(0, "a", False, 1.0, 2.0),
        MediumBar(0, "a", True, 2.0, 4.0),
        MediumBar(1, "b", False, 1.5, 7.0),
        MediumBar(2, "a", False, 2.0, 4.0),
        MediumBar(2, "b", False, 4.0, 6.0),
        MediumBar(2, "b", True, 6.0, 10.0),
    ]


def test_lanes_are_on_the_clock_of_the_picture():
    spans = [Span("rollout", "engine 0", 102.5, 104.0, 3), Span("train", "trainer", 104.5, 106.0, 4)]
    lanes = look_lanes(HISTORY, spans, 10.0, 100.0)
    assert {(s.name, s.lane, s.start, s.end, s.step) for s in lanes} == {
        ("decode", "a", 102.5, 104.0, 3),
        ("decode", "b", 102.5, 106.0, 3),
    }
    assert look_lanes(HISTORY, [], 10.0, 100.0) == look_lanes([], spans, 10.0, 100.0) == []


EVENTS = st.lists(st.tuples(st.sampled_from("lllhhhux"), st.integers(0, 5), st.integers(0, 2)), max_size=60)


@given(EVENTS)
def test_bars_are_those_of_the_history(events):
    """At each moment, a row has one look at most, which is the last one, and who has looked at it holds it."""
    looks: dict[str, str] = {}
    holds: dict[str, str] = {}
    history, now = [], 0.0
    for kind, key, number in events:
        now += 1.0
        medium, name = f"m{key}", f"p{number}"
        if kind == "x":
            looks, holds = ({k: at for k, at in books.items() if at != name} for books in (looks, holds))
            history.append(Transition("", name, LOST, now))
        elif kind == "l":
            looks[medium] = name
            history.append(Transition(medium, name, LOOKED_AT, now))
        elif looks.get(medium) == name:
            del looks[medium]
            holds.pop(medium, None)
            if kind == "h":
                holds[medium] = name
            history.append(Transition(medium, name, HELD if kind == "h" else MediumStage.UNUSABLE, now))
    bars = bars_of(history, now + 1.0)
    assert all(bar.start <= bar.end for bar in bars)
    for row, key in enumerate(dict.fromkeys(transition.key for transition in history if transition.key)):
        for held, books in ((False, looks), (True, holds)):
            times = [(bar.start, bar.end) for bar in bars if (bar.row, bar.held) == (row, held)]
            assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(times))
            now_open = [bar.place for bar in bars if (bar.row, bar.held) == (row, held) and bar.end > now]
            assert now_open == ([books[key]] if key in books else [])


@pytest.mark.medium
def test_the_picture_is_one_of_thousands_of_media(tmp_path):
    many = []
    for number in range(3000):
        key, name, now = f"m{number}", f"place {number % (MOST_NAMED + 3)}", 0.1 * number
        many += [Transition(key, name, LOOKED_AT, now), Transition(key, name, HELD, now + 0.5)]
    many.append(Transition("", "place 3", LOST, 301.0))
    for name, history in (("many", many), ("one", HISTORY), ("none", [Transition("", "a", LOST, 0.0)])):
        media_picture(history, history[-1].time + 1.0, tmp_path / f"{name}.png")
    with Image.open(tmp_path / "many.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    assert (pixels == (0x1F, 0x77, 0xB4)).all(axis=1).sum() > 1000, "the first place's colour"
    for name in ("one", "none"):
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.format == "PNG"


# --- all of it ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_shows_where_its_pixels_come_from(tmp_path):
    settings = flags(**colours(tmp_path), steps=2, warm_start__steps=1, data__preprocessors=1)
    run_dir = tmp_path / "run"
    with FluxTrainer(load(["--config=configs/vlm.py", f"--config.run_dir={run_dir}", *settings])) as trainer:
        trainer.fit()
        [status] = trainer.pixels.preprocessors()
        assert status.up and status.looks and status.bytes and not status.lost
        lanes = trainer.pixels.lanes(of_steps(trainer.timeline.spans()))
        assert {(span.name, span.lane) for span in lanes} == {("decode", "preprocessor-0")}
    steps = [record for record in read(run_dir / "metrics.jsonl") if record["phase"] == "rl"]
    assert [0 < step.get("data/first_batch", 0) < 600 for step in steps] == [True, False]
    for step in steps:
        assert 0 <= step["data/waited"] < 600 and step["data/fetched_mb"] > 0
        assert step["data/fetch_mb_per_second"] > 0 and step["data/decoded_frames_per_second"] >= 0
        assert (step["data/preprocessors_up"], step["data/preprocessors_lost"]) == (1.0, 0.0)
        assert step["data/mb_from/preprocessor-0"] > 0 and step["data/queue"] == 0
        assert 0 < step.get("data/cache_hits", 1.0) <= 1.0
    assert steps[-1]["data/memory_mb"] > 0
    stages = trainer.timeline.spans()
    assert "materializer" in {span.lane for span in stages if span.name == "materialize"}
    assert json.loads((run_dir / "summary.json").read_text())["complete"]
    for name in ("media", "timeline"):
        with Image.open(run_dir / f"{name}.png") as image:
            assert image.format == "PNG"
