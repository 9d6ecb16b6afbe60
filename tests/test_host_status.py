"""What processes tell process 0 of themselves: as it is measured, sent, shown, exported and logged."""

import dataclasses
import gc
import io
import logging
import queue
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from process_cases import free_port
from rich.console import Console

from fluxjax.base.process import resident_bytes
from fluxjax.base.statuses import HostStage, HostStatus, slowest
from fluxjax.base.timeline import Span
from fluxjax.batch.composer import Team
from fluxjax.config import Config, ConfigError, ReportConfig
from fluxjax.hosts.gang import Gang, heard_status, shifted, told_status
from fluxjax.hosts.orders import Status, decode, encode
from fluxjax.report.display import MOST, Display, host_lines
from fluxjax.report.metrics import MetricsLog, host_lanes, host_metrics, process_log, read
from fluxjax.report.prometheus import HostCollector, PrometheusPort
from fluxjax.run.follower import prometheus_port
from sharding.links import Links


def status(process: int = 0, layout: float = 0.25, **own: Any) -> HostStatus:
    stages = (HostStage("layout", 10.0, 10.0 + layout), HostStage("train", 11.0, 13.0))
    return dataclasses.replace(HostStatus(process, f"gpu{process}", 8, 3 * 10**9, 0, 4, stages, 0.5), **own)


def test_a_status_travels_whole():
    sent = status(3, idle=0.75)
    data = b"".join(encode(told_status(sent, 8.0)))
    assert len(data) < 300
    told = decode(data)
    assert isinstance(told, Status) and heard_status(told, 8.0) == sent


def test_only_what_is_not_waiting_is_a_process_s_own():
    assert status().prepare_seconds == 0.25 and status().train_seconds == 2.0
    assert status().own_seconds == 0.25, "collectives end everywhere at once"
    assert status(idle=1.5).own_seconds == 0.75


class Wire(Links):
    """One end of what ties two gangs of this process."""

    def __init__(self, process: int, boxes: Sequence[queue.SimpleQueue[bytes]]) -> None:
        self.process = self.rank_here = process
        self.processes, self.boxes = 2, boxes

    def send(self, process: int, data: bytes) -> int:
        self.boxes[process].put(data)
        return len(data)

    def receive(self, process: int) -> bytes:
        return self.boxes[self.process].get_nowait()  # what would have to be waited for is an error

    def counted(self, topic: str) -> int:
        return 0

    def notify(self, process: int, topic: str) -> None:
        """Nobody here is waited for."""


@pytest.fixture
def gangs() -> Iterator[tuple[Gang, Gang]]:
    boxes: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    both = Gang(Wire(0, boxes)), Gang(Wire(1, boxes))
    for gang in both:
        gang.equip(Config(), lambda ticket: "", None)
    yield both
    for gang in both:
        gang.close()


def test_process_0_hears_of_a_step_when_the_next_is_agreed_on(gangs):
    lead, other = gangs
    orders = other.orders()
    for step in (1, 2):
        lead.hand_out([[], []])
        next(orders)
        with other.watch.stage("media"):
            pass
        other.agree([])
        lead.agree([])
        assert [known.step for known in lead.statuses()] == ([1, 1] if step == 2 else [])
        lead.stepped()
        other.stepped()
        other.stepped()  # a step is told once
    assert [known.step for known in lead.statuses()] == [2, 1], "it waits for nobody"
    lead._hear_statuses()
    lead._hear_statuses()  # nothing more comes
    mine, theirs = lead.statuses()
    assert (mine.process, theirs.process, theirs.step) == (0, 1, 2)
    assert [stage.name for stage in theirs.stages] == ["media", "train"]
    assert mine.stages[-1].end == pytest.approx(theirs.stages[-1].end, abs=0.1), "on one clock: the step's end"
    assert theirs.memory_bytes == pytest.approx(resident_bytes(), rel=0.5) and theirs.host == socket.gethostname()
    assert [known.step for known in other.statuses()] == [2]


def test_one_process_tells_nothing():
    gang = Team()
    gang.stepped()
    assert gang.statuses() == [] and host_metrics([]) == {} and host_lines([]) == []


def test_a_line_a_host_says_who_is_slowest():
    hosts = [status(0), status(1, layout=1.5, device_memory_bytes=70 * 10**9)]
    assert slowest(hosts).process == 1
    first, second = host_lines(hosts)
    assert first.startswith("process 0 (gpu0) | devices 8 | memory 3.0 GB | on device - | prepares 0.25 s")
    assert second.endswith("| on device 70.0 GB | prepares 1.50 s | trains 2.00 s | waits 0.50 s | slowest")
    assert "slowest" not in first


def test_of_many_hosts_the_slowest_are_shown():
    hosts = [status(process, layout=float(process % 50)) for process in range(64)]
    lines = host_lines(hosts)
    assert len(lines) == MOST + 1 and lines[-1] == f"and {64 - MOST} faster ones"
    assert any(line.startswith("process 49 ") and line.endswith("slowest") for line in lines)
    assert not any(line.startswith("process 0 ") for line in lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_display_has_a_line_a_host(terminal):
    file = io.StringIO()
    with Display(1, console=Console(file=file, force_terminal=terminal, width=160)) as display:
        display.show(hosts=lambda: [status(0), status(1, layout=1.5)])
        display.phase("RL", 1)
        display.step(1, {"reward/mean": 0.25}, {})
    text = file.getvalue()
    if terminal:
        last = text[text.rindex("prepares") :].splitlines()
        assert last[1].split() == ["0", "gpu0", "8", "3.0", "GB", "-", "0.25", "s", "2.00", "s", "0.50", "s"]
        assert last[2].split()[:2] == ["1", "gpu1"] and last[2].split()[-1] == "slowest"
    else:
        assert [line.split(" | ")[-1] for line in text.splitlines() if "process 1 (gpu1)" in line] == ["slowest"]


def test_each_process_has_a_lane():
    lanes = host_lanes([status(0), shifted(status(1), -1.0), status(2, step=3)], 7)
    assert Span("train", "process 1", 10.0, 12.0, 7) in lanes
    assert {span.lane for span in lanes} == {"process 0", "process 1"}, "who has not told of this step has no bar"


def test_records_name_each_process(tmp_path):
    hosts = [status(0), status(1, layout=1.5)]
    log = MetricsLog(tmp_path, ReportConfig())
    log.log("rl", 1, host_metrics(hosts), hosts)
    log.log("eval", 1, {})
    log.close()
    record, evaluation = read(tmp_path / "metrics.jsonl")
    assert (record["hosts/slowest"], record["hosts/own_seconds_max"], record["hosts/processes"]) == (1.0, 1.5, 2.0)
    told = [(host["process"], host["own_seconds"], host["memory_bytes"]) for host in record["hosts"]]
    assert told == [(0, 0.25, 3 * 10**9), (1, 1.5, 3 * 10**9)]
    assert "hosts" not in evaluation


def test_a_process_serves_its_own_state():
    number, hosts = free_port(), []
    port = PrometheusPort(number, "127.0.0.1", HostCollector(lambda: hosts))
    try:
        with pytest.raises(ConfigError, match=rf"^report\.prometheus: cannot serve on {number}"):
            PrometheusPort(number)
        hosts.append(status(1))
        with urllib.request.urlopen(f"http://127.0.0.1:{number}/metrics", timeout=60) as reply:
            text = reply.read().decode()
    finally:
        port.close()
    assert 'fluxjax_host_train_seconds{host="gpu1",process="1"} 2.0' in text
    assert "fluxjax_host_slowest" not in text, "it knows of no other"
    assert "process_resident_memory_bytes" in text


@pytest.mark.medium
def test_processes_that_share_a_host_serve_on_neighbouring_ports(gangs):
    config, (_, second) = Config(), gangs
    assert prometheus_port(config, second) == 0
    config.report.prometheus = "9100"
    assert prometheus_port(config, second) == 9101 and prometheus_port(config, Team()) == 9100
    with pytest.raises(ConfigError, match="cannot serve on 65536"):
        PrometheusPort(65536)
    gc.collect()  # a socket that was left open fails this test, not the next one that collects


def test_a_process_logs_into_the_folder_of_the_run(tmp_path):
    terminal = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(terminal)
    try:
        for attempt in range(2):  # a resumed run writes behind what is there
            with pytest.raises(ValueError, match="out of luck"), process_log(tmp_path, 1, 2):
                logging.getLogger("fluxjax.hosts").info("step %d", attempt)
                logging.getLogger("elsewhere").warning("look out")
                raise ValueError("out of luck")
        logging.getLogger("fluxjax.hosts").info("after the run")
    finally:
        logging.getLogger().removeHandler(terminal)
    lines = (tmp_path / "processes" / "process-1.log").read_text().splitlines()
    assert len(lines) == 8 and "process 1 of 2" in lines[0]
    for line, end in zip(lines[1:4], ("step 0", "look out", "ValueError: out of luck"), strict=True):
        assert line.endswith(end)
    assert lines[5].endswith("step 1")
    shown = terminal.stream.getvalue()
    assert "look out" in shown and "step" not in shown, "the terminal is for warnings, as before"


def test_one_process_has_no_log_of_its_own(tmp_path):
    with process_log(tmp_path, 0, 1):
        pass
    assert not list(tmp_path.iterdir())
