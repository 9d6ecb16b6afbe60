"""The Grafana dashboard: every metric that its queries name is one that a real run exports, servers and all."""

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT
from process_cases import free_port
from run_cases import flags, letters

from fluxjax.base.statuses import HostStage, HostStatus, PreprocessorStatus
from fluxjax.config.cli import load
from fluxjax.report.metrics import read
from fluxjax.run.callbacks import Callback
from fluxjax.run.trainer import FluxTrainer
from rollout.fleet_server import ServerStatus

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
PATTERN = re.compile(r'__name__=~"([^"]+)"')
HOSTS = [HostStatus(i, "gpu7", 8, 10**9, 0, 3, (HostStage("layout", 0.0, 0.1 + i),), 0.5) for i in range(2)]
SERVERS = [ServerStatus(f"server {i}", f"http://127.0.0.1:{i}", i, True, 3, 5, 1, 99.5, i, 1000, "") for i in range(2)]
PREPROCESSORS = [PreprocessorStatus(f"preprocessor-{i}", i == 0, 9, 5000, 3, i, hits=7, misses=1) for i in range(2)]
PIXELS = {"data/waited": 0.25, "data/decoded_frames_per_second": 340.0, "data/cache_hits": 0.875}


class Scrape(Callback):
    def __init__(self, port: int) -> None:
        self.port, self.text = port, ""

    def on_step(self, trainer, step, groups, metrics):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as reply:
            self.text = reply.read().decode()


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Iterator[str]:
    """What the port of a run says after its step. Its engine is embedded, and it has one process and no pixels; it is
    told that there are servers, two processes and preprocessors."""
    folder, port = tmp_path_factory.mktemp("run"), free_port()
    small = {"steps": 1, "warm_start__steps": 1, "warm_start__batch_size": 2, "report__prometheus": port}
    config = load(["--config=configs/text.py", *flags(**letters(folder), **small, run_dir=folder / "run")])
    scrape = Scrape(port)
    with FluxTrainer(config, callbacks=[scrape]) as trainer:
        trainer.pool.servers = lambda: SERVERS
        trainer.gang.statuses = lambda: HOSTS
        trainer.pixels.preprocessors = lambda: PREPROCESSORS
        trainer.pixels.metrics = lambda: PIXELS
        trainer.fit()
    loss = next(line for line in scrape.text.splitlines() if line.startswith("fluxjax_loss "))
    (step,) = [record for record in read(folder / "run" / "metrics.jsonl") if record["phase"] == "rl"]
    assert float(loss.split()[1]) == pytest.approx(step["loss"])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "it is closed at the end of the run"
    yield scrape.text


@pytest.mark.parametrize(
    "line",
    [
        'fluxjax_server_up{server="server 1"} 1.0',
        "fluxjax_servers_up 2.0",
        'fluxjax_host_own_seconds{host="gpu7",process="1"} 1.1',
        'fluxjax_host_slowest{host="gpu7",process="0"} 0.0',
        'fluxjax_host_slowest{host="gpu7",process="1"} 1.0',
        "fluxjax_hosts_slowest 1.0",
        'fluxjax_preprocessor_up{preprocessor="preprocessor-1"} 0.0',
        "fluxjax_data_waited 0.25",
        "fluxjax_scheduling_degree 1.0",
    ],
)
@pytest.mark.slow
def test_a_run_exports_each_server_process_and_preprocessor(exported, line):
    assert f"\n{line}\n" in exported


@pytest.mark.medium
def test_queries_name_what_a_run_exports(exported):
    names = {line.split("{")[0].split(" ")[0] for line in exported.splitlines() if not line.startswith("#")}
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    assert len(queries) >= 15
    for query in queries:
        patterns = PATTERN.findall(query)
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in names), f"nothing is called {pattern}"
        asked = set(re.findall(r"\bfluxjax_\w+", re.sub(r'"(?:[^"\\]|\\.)*"', "", query)))  # names outside of strings
        assert asked or patterns, f"{query} asks for nothing of ours"
        assert asked <= names, f"{query} asks for {asked - names}"


def test_every_panel_can_be_read():
    assert DASHBOARD["schemaVersion"] >= 42
    [variable] = DASHBOARD["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Training", "Rollout", "Processes", "Data", "Policy"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["id"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["expr"] and target["legendFormat"]
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        columns, rows = (range(place[at], place[at] + place[size]) for at, size in ("xw", "yh"))
        cells = {(x, y) for x in columns for y in rows}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
