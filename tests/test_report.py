"""Display, metrics, samples, pictures and summary: what they write, and what survives a kill."""

import contextlib
import dataclasses
import io
import itertools
import json
import queue
import re
import threading
import time
import types
import urllib.error
import urllib.request
from typing import Any

import jax
import prometheus_client
import pytest
from PIL import Image
from process_cases import free_port, until
from rich.console import Console
from rich.text import Text
from tensorboardX.proto import event_pb2

from fluxjax.base.timeline import Span, Timeline, activity
from fluxjax.base.types import Group, Prompt, Response, Reward, Sample
from fluxjax.batch.composer import Team
from fluxjax.config import Config, ConfigError, ReportConfig
from fluxjax.report import pictures
from fluxjax.report.display import Display
from fluxjax.report.metrics import MetricsLog, Summary, read
from fluxjax.report.prometheus import PrometheusPort, ServerCollector
from fluxjax.report.samples import dump_samples
from fluxjax.run import callbacks
from fluxjax.run.callbacks import Reporter
from fluxjax.runtime.ports import StepReport
from fluxjax.runtime.server_watch import ServerWatch, server_lanes
from rollout.fleet_server import Attempt, FleetState, Seat, Server, ServerStatus
from rollout.sglang import SampleReply, ServerClient

EVENTS: Any = event_pb2  # generated, without types


def test_a_resumed_log_has_every_step_once(tmp_path):
    log = MetricsLog(tmp_path, ReportConfig())
    log.log("warm_start", 1, {"loss": 2.0})
    for step in (1, 2, 3):
        log.log("rl", step, {"reward/mean": step / 10})
    log.log("eval", 2, {"accuracy/a": 0.5})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 4, "rew')  # the kill came here
    log = MetricsLog(tmp_path, ReportConfig(), resume={"rl": 2, "eval": 2})
    log.log("rl", 3, {"reward/mean": 0.9})
    log.close()
    records = read(tmp_path / "metrics.jsonl")
    steps = [("warm_start", 1), ("rl", 1), ("rl", 2), ("eval", 2), ("rl", 3)]
    assert [(r["phase"], r["step"]) for r in records] == steps
    assert records[-1]["reward/mean"] == 0.9
    assert list((tmp_path / "tensorboard").iterdir())


def test_tensorboard_gets_the_same_numbers(tmp_path):
    log = MetricsLog(tmp_path, ReportConfig(), resume={"rl": 4, "eval": 4})
    log.log("rl", 5, {"loss": 0.5, "reward/mean": 0.25})
    log.log("eval", 5, {"accuracy/a": 0.75})
    log.close()
    [file] = (tmp_path / "tensorboard").iterdir()
    content, events = file.read_bytes(), []
    while content:  # records: length, its checksum, data, their checksum
        length = int.from_bytes(content[:8], "little")
        events.append(EVENTS.Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    assert [e.step for e in events if e.HasField("session_log")] == [5], "later steps of a killed run are forgotten"
    values = {(e.step, value.tag): value.simple_value for e in events for value in e.summary.value}
    assert values == {(5, "loss"): 0.5, (5, "reward/mean"): 0.25, (5, "eval/accuracy/a"): 0.75}


def test_a_fresh_log_forgets_an_older_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n')
    MetricsLog(tmp_path, ReportConfig()).close()
    assert read(tmp_path / "metrics.jsonl") == []


def shown(terminal: bool) -> str:
    file = io.StringIO()
    with Display(2, console=Console(file=file, force_terminal=terminal, width=160)) as display:
        display.phase("RL", 2)
        display.evaluated({"digits": 0.5})
        metrics = {"reward/mean": 0.25, "accuracy/digits": 0.1, "tokens_per_second": 1234.5}
        for step in (1, 2):
            display.step(step, metrics, {"rollout": 1.0, "train": 3.0})
        display.note("done")
    return file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_display_says_what_matters(terminal):
    text = shown(terminal)
    for expected in ("RL", "2/2", "reward", "0.250", "digits 10%", "held out", "digits 50%", "1,234 tok/s", "75%"):
        assert expected in text, expected
    assert "done" in text
    assert not any(word in text for word in ("server", "preprocessor", "data")), "there are none"
    if not terminal:
        assert "\x1b" not in text and "\r" not in text, "no control characters"
        assert [line for line in text.splitlines() if line][-1] == "done"


def group(draw: int, source: str) -> Group:
    prompt = Prompt(f"p{draw}", source, "<image>?", "7", draw=draw)
    samples = [
        Sample(Response(f"r{draw}/{i}", draw, i, (1, 2), (-0.5, -0.25), (3, 3), "stop"), Reward(float(i), i == 1), 0.5)
        for i in range(2)
    ]
    return Group(prompt, tuple(samples))


def test_samples_take_turns_between_groups(tmp_path):
    dump_samples(tmp_path, 20, [group(0, "a"), group(1, "b")], lambda ids, **_: f"{len(ids)} tokens", 3)
    records = [json.loads(line) for line in (tmp_path / "samples" / "000020.jsonl").read_text().splitlines()]
    assert [r["source"] for r in records] == ["a", "b", "a"]
    assert records[0] | {"response": "2 tokens", "reward": 0.0, "logprob": -0.75, "versions": [3]} == records[0]


@pytest.mark.medium
def test_pictures_are_pictures(tmp_path):
    records = [{"phase": "rl", "step": s, "accuracy/digits": s / 10} for s in range(5)]
    records += [{"phase": "eval", "step": s, "accuracy/digits": s / 10} for s in (0, 4)]
    pictures.learning_curve(records, {"blind": {"digits": 0.1}, "chance": {"digits": 0.05}}, tmp_path / "a.png")
    spans = [Span("rollout", "engine 0", 0.0, 1.0, 1), Span("train", "trainer", 1.0, 2.5, 1)]
    pictures.timeline(spans, tmp_path / "b.png")
    pictures.timeline([], tmp_path / "c.png")
    for name in "abc":
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.format == "PNG" and len(image.convert("RGB").getcolors(1 << 24) or []) > 2


@contextlib.contextmanager
def compiling():
    """As JAX says it."""
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.record_scalar(event, 0.0)
    try:
        yield
    finally:
        jax.monitoring.record_event_duration_secs(event, 0.0)


def test_compilations_are_a_stage_of_their_own():
    timeline = Timeline()
    for name, start, end in [("train", 0.0, 5.0), ("train", 4.0, 6.0), ("compile", 1.0, 4.5), ("rollout", 4.0, 9.0)]:
        timeline.add(Span(name, "lane", start, end, 1))
    assert timeline.seconds(1) == {"train": 2.5, "compile": 3.5, "rollout": 4.5}
    summary = Summary()
    with summary.stage("eval"), compiling():
        time.sleep(0.1)
    assert summary.seconds["eval"] < 0.05 and summary.seconds["compile"] >= 0.1


def test_compilations_are_no_part_of_the_estimate():
    file = io.StringIO()
    display = Display(100, console=Console(file=file, width=300))
    display.phase("RL", 100)
    with compiling():
        time.sleep(0.3)
    display.step(1, {}, {})
    [eta] = re.findall(r"eta (\d+) s", file.getvalue())
    assert int(eta) < 10, "0.3 s for each of 99 steps"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_silence_is_broken_by_words(terminal):
    """Also where nothing is said to be under way, but the run stops."""
    file = io.StringIO()
    with Display(2, console=Console(file=file, force_terminal=terminal, width=200)) as display:
        display.phase("RL", 2)
        with activity(lambda: "evaluating 3/200"), compiling():
            display._noted -= 30
            until(lambda: "evaluating 3/200, compiling" in file.getvalue())
        display.stopping = True
        display._noted -= 30
        until(lambda: "stopping, waits for: this step" in file.getvalue())


def test_summary_round_trip(tmp_path):
    summary = Summary(name="x", accuracy={"digits": {"start": 0.25}}, samples_skipped={"missing file": 2})
    summary.add_seconds("train", 1.5)
    summary.add_seconds("train", 1.0)
    written = json.loads(summary.write(tmp_path).read_text())
    assert written["seconds"] == {"train": 2.5} and written["samples_skipped"] == {"missing file": 2}
    assert Summary(**json.loads(json.dumps(dataclasses.asdict(summary)))) == summary
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def server(number: int = 0, **own: Any) -> ServerStatus:
    status = ServerStatus(f"server {number}", f"http://127.0.0.1:{number}", number, True, 3, 5, 1, 1234.5, 0, 100, "")
    return dataclasses.replace(status, **own)


LOST = {"up": False, "version": -1, "restarts": 1, "reason": "its log, a.log, ends with:\nfirst\nout of memory"}
LONG = LOST | {"reason": "x" * 200}


@pytest.mark.parametrize("terminal", [False, True])
def test_display_shows_servers_as_they_are_now(terminal):
    file = io.StringIO()
    servers = [server(0), server(1, **LOST)]
    with Display(2, console=Console(file=file, force_terminal=terminal, width=160)) as display:
        display.show(lambda: servers)
        display.phase("RL", 2)
        display.step(2, {"reward/mean": 0.25}, {})
        servers = [server(0), server(1, version=4, restarts=1, running=77)]  # between steps, too
    text = file.getvalue()
    if terminal:
        last = text[text.rindex("restarts") :].splitlines()  # as it was drawn last
        assert last[1].split() == ["server", "0", "3", "5", "1", "1,234", "0", "up"]
        assert last[2].split() == ["server", "1", "4", "77", "1", "1,234", "1", "up"]
    else:
        assert [line.split(" | ").count("servers 1/2 up") for line in text.splitlines()] == [1]


def test_a_lost_server_has_its_reason_in_the_table():
    file = io.StringIO()
    with Display(2, console=Console(file=file, force_terminal=True, width=80, soft_wrap=True)) as display:
        display.show(lambda: [server(0, up=False, version=-1), server(1, **LOST), server(2, **LONG)])
        display.note("a note")
    lines = [Text.from_ansi(line).plain for line in file.getvalue().splitlines()]
    rows = [line for line in lines if line.startswith("server")]
    assert any("server 0" in row and "starting" in row for row in rows)
    assert any("server 1" in row and "lost: its log, a.log" in row and "first" not in row for row in rows)
    assert any("server 2" in row and "lost: xxxx" in row and row.rstrip().endswith("…") for row in rows)
    assert max(map(len, rows)) <= 80, "else what was drawn before is not wiped out"


def test_words_in_brackets_are_no_style():
    file = io.StringIO()
    Display(2, console=Console(file=file, width=160)).note("server 0 is lost: [/red] [bold]x")
    assert file.getvalue() == "server 0 is lost: [/red] [bold]x\n"


def test_each_event_of_a_server_is_told_once():
    news = ServerWatch(tuple)
    down = server(up=False, version=-1)
    assert news.hear([down], 0.0) == []
    assert news.hear([server(version=-1)], 7.5) == ["server 0 is up after 7.5 s: http://127.0.0.1:0"]
    assert news.hear([server()], 8.0) == [], "weights come at every step: no news"
    assert news.hear([down], 10.0) == [], "why, is known only when it is started again"
    lost = server(**LOST)
    assert news.hear([lost], 10.25) == ["server 0 is lost: its log, a.log, ends with: out of memory"]
    assert news.hear([lost], 10.5) == []
    assert news.hear([dataclasses.replace(lost, restarts=2)], 11.0) == [], "the same reason, again"
    other = dataclasses.replace(lost, restarts=3, reason="no port\nmore")
    assert news.hear([other], 12.0) == ["server 0 did not come back: no port"]
    back = server(restarts=3, version=9)
    assert news.hear([back], 13.0) == ["server 0 is back with version 9 after 3.0 s"]
    assert news.hear([back], 14.0) == []
    assert news.down(20.0) == [Span("start", "server 0", 0.0, 7.5, 0), Span("restart", "server 0", 10.0, 13.0, 0)]


def test_a_server_that_was_away_between_two_looks_is_told_of():
    news = ServerWatch(tuple)
    news.hear([server()], 0.0)
    lost, back = news.hear([server(restarts=1, reason="gone")], 1.0)
    assert lost == "server 0 is lost: gone" and back == "server 0 is back with version 3 after 0.0 s"


def test_servers_that_never_start_or_leave_are_told_of():
    news = ServerWatch(tuple)
    never = server(up=False, version=-1, restarts=1, reason="no such program")
    assert news.hear([never, server(1)], 0.0)[0] == "server 0 did not start: no such program"
    assert news.hear([never], 1.0) == ["server 1 has left"]
    assert news.hear([never], 2.0) == []
    assert news.down(5.0)[-1] == Span("start", "server 0", 0.0, 5.0, 0), "up to now"


def test_the_watch_tells_from_its_own_thread_until_it_is_stopped():
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    servers = [server()]
    watch = ServerWatch(lambda: list(servers))
    watch.start(lambda line: told.put((line, threading.current_thread().name)))
    assert told.get(timeout=10)[0].startswith("server 0 is up")
    servers[:] = [server(**LOST)]
    line, thread = told.get(timeout=10)
    assert line.startswith("server 0 is lost") and thread == "server watch"
    watch.stop()
    servers[:] = [server(restarts=1)]
    assert told.empty() and [span.name for span in watch.down(time.perf_counter())][-1] == "restart"
    ServerWatch(tuple).stop()  # it was never started


def test_servers_have_lanes_in_place_of_engines():
    spans = [
        Span("rollout", "engine 0", 10.0, 14.0, 1),
        Span("rollout", "engine 1", 10.0, 15.0, 1),
        Span("train", "trainer", 15.0, 17.0, 1),
        Span("rollout", "engine 0", 20.0, 22.0, 2),
    ]
    busy = {
        "server 0": [(10.0, 12.0), (18.0, 19.0)],  # the second: an evaluation
        "server 1": [(10.5, 14.5), (19.5, 25.0)],
    }
    down = [Span("start", "server 0", 0.0, 9.0, 0), Span("restart", "server 0", 12.0, 30.0, 0)]
    lanes = server_lanes(spans, busy, down)
    assert {(s.name, s.lane, s.start, s.end, s.step) for s in lanes} == {
        ("rollout", "server 0", 10.0, 12.0, 1),
        ("restart", "server 0", 12.0, 22.0, 1),
        ("rollout", "server 1", 10.5, 14.5, 1),
        ("rollout", "server 1", 20.0, 22.0, 2),
        ("train", "trainer", 15.0, 17.0, 1),
    }
    assert len(lanes) == 5, "engines' overlapping rollouts are no two of the server's"
    assert server_lanes([], busy, down) == []


def server_record(seat: int) -> Server:
    nobody = object.__new__(FleetState)
    return Server(nobody, "server 0", Seat(seat), ServerClient("http://127.0.0.1:1"), None)


def test_a_server_knows_when_it_ran_samples():
    record = server_record(0)
    assert record.busy_times() == []
    before = time.perf_counter()
    attempts = [Attempt(record, {sample: SampleReply("") for sample in range(count)}) for count in (4, 2)]
    for attempt in attempts:
        record.begin(attempt)
    record.end(attempts[0])
    [(start, now)] = record.busy_times()
    assert before <= start <= now and record.open == 2
    record.end(attempts[1])
    [(start, end)] = record.busy_times()
    assert now <= end <= time.perf_counter() and record.busy_times() == [(start, end)]


def test_a_server_that_is_not_up_says_nothing_of_its_last_life():
    record = server_record(1)
    record.load = {"running": 3.0, "waiting": 2.0, "tokens_per_second": 9.5}
    record.restarts, record.reason = 1, "gone"
    assert record.status() == ServerStatus("server 0", "http://127.0.0.1:1", 1, False, -1, 0, 0, 0.0, 1, 0, "gone")
    record.up = True
    assert record.status() == ServerStatus("server 0", "http://127.0.0.1:1", 1, True, -1, 3, 2, 9.5, 1, 0, "gone")


def test_prometheus_reads_servers_when_it_asks():
    registry = prometheus_client.CollectorRegistry()
    servers: list[ServerStatus] = []
    registry.register(ServerCollector(lambda: servers))
    assert prometheus_client.generate_latest(registry) == b"", "nothing where there are no servers"
    servers += [server(0), server(1, **LOST)]
    text = prometheus_client.generate_latest(registry).decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    names = [
        "up",
        "asleep",
        "weight_version",
        "running",
        "waiting",
        "tokens_per_second",
        "restarts_total",
        "tokens_total",
    ]
    expected = {0: (1, 0, 3, 5, 1, 1234.5, 0, 100), 1: (0, 0, -1, 5, 1, 1234.5, 1, 100)}
    assert {key: float(value) for key, value in values.items()} == {
        f'fluxjax_server_{name}{{server="server {number}"}}': value
        for number, row in expected.items()
        for name, value in zip(names, row, strict=True)
    }
    servers[1] = server(1, restarts=1, version=4, asleep=True)
    text = prometheus_client.generate_latest(registry).decode()
    assert 'fluxjax_server_weight_version{server="server 1"} 4.0' in text
    assert 'fluxjax_server_asleep{server="server 1"} 1.0' in text


@pytest.mark.parametrize("servers", [True, False])
def test_steps_count_what_servers_delivered(tmp_path, servers, monkeypatch):
    clock = itertools.count(0, 20)  # asked once a step
    monkeypatch.setattr(callbacks, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    statuses = [server(0), server(1)] if servers else []
    log, display = MetricsLog(tmp_path, ReportConfig()), Display(2, console=Console(file=io.StringIO()))
    none = types.SimpleNamespace(metrics=dict)
    run: Any = types.SimpleNamespace(
        config=Config(),
        gang=Team(),
        summary=Summary(),
        metrics=log,
        display=display,
        pool=types.SimpleNamespace(servers=lambda: statuses),
        pixels=none,
        rewards=none,
        tell=lambda *event: None,
        coordinator=types.SimpleNamespace(scheduling=dict),
        **dict.fromkeys(("run_dir", "processor", "learner", "engine", "timeline", "model", "play"), None),
        **dict.fromkeys(("stop", "evaluate"), dict),
    )
    reporter = Reporter(run)
    display.phase("RL", 2)
    for step in (1, 2):
        if servers:
            statuses[:] = [server(0, tokens=100 + 50 * step), server(1, **LOST)]
        reporter.on_step(StepReport(step, step, (), {"reward/mean": 0.5}, {}))
    log.close()
    first, second = ({k: v for k, v in r.items() if k.startswith("servers/")} for r in read(tmp_path / "metrics.jsonl"))
    if servers:
        assert first == second == {"servers/up": 1.0, "servers/restarts": 1.0, "servers/tokens_per_second": 50 / 20}
    else:
        assert first == second == {}


def scraped(port: int, *, token: str = "") -> int:
    """The status of an answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_metrics_beyond_loopback_need_a_token(monkeypatch):
    port = free_port()
    monkeypatch.delenv("FLUXJAX_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0, which other machines reach: set FLUXJAX_TOKEN"):
        PrometheusPort(port, "0.0.0.0")
    served = PrometheusPort(port)
    assert scraped(port) == 200, "on loopback, without one"
    served.close()
    monkeypatch.setenv("FLUXJAX_TOKEN", "secret")
    served = PrometheusPort(port, "0.0.0.0")
    assert [scraped(port, token=token) for token in ("secret", "", "secre", "secrett")] == [200, 401, 401, 401]
    served.close()
