"""The Prometheus port of a process: the metrics of a run, its rollout servers, trainer processes and preprocessors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.fleet_job import ServerStatus

from ..base.host_status import HostStatus
from ..base.preprocessor_status import PreprocessorStatus
from .hosts_shown import slowest
from .metrics_port import MetricsPort


class PrometheusPort:
    """Serves metrics from a thread, with memory, CPU seconds and open files of this process (`process_*`). Port 0:
    nothing is served, and what it is told is forgotten."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Raises ConfigError as `MetricsPort` does."""
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, prometheus_client.Gauge] = {}
        self._server: MetricsPort | None = None
        if port:
            self._server = MetricsPort(self._registry, host, port)
            prometheus_client.ProcessCollector(registry=self._registry)

    def set(self, tag: str, value: float) -> None:
        """Shows a metric by its name in `metrics.jsonl`."""
        if self._server is None:
            return
        if tag not in self._gauges:
            name = "fluxjax_" + "".join(c if c.isalnum() else "_" for c in tag)
            self._gauges[tag] = prometheus_client.Gauge(name, tag, registry=self._registry)
        self._gauges[tag].set(value)

    def export(self, collector: ServerCollector | HostCollector | PreprocessorCollector) -> None:
        """Serves what `collector` says whenever it is asked."""
        if self._server is not None:
            self._registry.register(collector)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


_Families: TypeAlias = Mapping[str, tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str]]
_SERVER_METRICS: _Families = {
    "up": (GaugeMetricFamily, "1: it takes requests, 0: it starts, or was lost"),
    "asleep": (GaugeMetricFamily, "1: it gave its memory back, until it is needed"),
    "weight_version": (GaugeMetricFamily, "the version of the weights that it was proven to have, -1: none"),
    "running": (GaugeMetricFamily, "samples that it generates"),
    "waiting": (GaugeMetricFamily, "samples that wait for a place"),
    "tokens_per_second": (GaugeMetricFamily, "generated tokens a second, as it says itself"),
    "restarts": (CounterMetricFamily, "times that it was lost"),
    "tokens": (CounterMetricFamily, "generated tokens that came from it"),
}


class ServerCollector(Collector):
    """The rollout servers as Prometheus metrics, `fluxjax_server_*`, with a label `server`. Nothing where there are
    none."""

    def __init__(self, servers: Callable[[], Sequence[ServerStatus]]) -> None:
        self._servers = servers

    def describe(self) -> Iterable[Metric]:
        return ()  # else a registry asks before there are any

    def collect(self) -> Iterable[Metric]:
        servers = self._servers()
        for name, (family, text) in _SERVER_METRICS.items() if servers else ():
            metric = family(f"fluxjax_server_{name}", text, labels=["server"])
            for server in servers:
                value = server.version if name == "weight_version" else getattr(server, name)
                metric.add_metric([server.name], float(value))
            yield metric


_HOST_METRICS: Mapping[str, tuple[str, Callable[[HostStatus], float]]] = {
    "devices": ("devices that it trains on", lambda host: host.devices),
    "memory_bytes": ("resident memory after its last step", lambda host: host.memory),
    "device_memory_bytes": (
        "bytes in use at most so far on its fullest device, 0: unknown",
        lambda host: host.device_memory,
    ),
    "step": ("optimizer steps since it was started", lambda host: host.step),
    "prepare_seconds": ("planning, reading media and laying out the last step", lambda host: host.prepared),
    "train_seconds": ("programs of the last step, waiting for others within them included", lambda host: host.trained),
    "wait_seconds": ("standing still before the programs of the last step", lambda host: host.waited),
    "own_seconds": ("what others may have waited for in the last step", lambda host: host.own_seconds),
}


class HostCollector(Collector):
    """Trainer processes as Prometheus gauges, `fluxjax_host_*`, with labels `process` and `host`. Nothing before they
    have made a step, and of a run of one process."""

    def __init__(self, hosts: Callable[[], Sequence[HostStatus]]) -> None:
        self._hosts = hosts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        hosts = self._hosts()
        for name, (text, value) in _HOST_METRICS.items() if hosts else ():
            metric = GaugeMetricFamily(f"fluxjax_host_{name}", text, labels=["process", "host"])
            for host in hosts:
                metric.add_metric([str(host.process), host.host], float(value(host)))
            yield metric
        if len(hosts) > 1:
            metric = GaugeMetricFamily("fluxjax_host_slowest", "1: the others wait for it", labels=["process", "host"])
            for host in hosts:
                metric.add_metric([str(host.process), host.host], float(host is slowest(hosts)))
            yield metric


_PREPROCESSOR_METRICS: _Families = {
    "up": (GaugeMetricFamily, "1: it answers, 0: it starts, or was lost"),
    "queued": (GaugeMetricFamily, "media that wait to be decoded by it"),
    "memory_bytes": (GaugeMetricFamily, "decoded media that it keeps in memory"),
    "spilled_bytes": (GaugeMetricFamily, "decoded media that it keeps on its disk"),
    "looks": (CounterMetricFamily, "media that it looked at"),
    "decoded": (CounterMetricFamily, "media that it decoded, whole or in part"),
    "bytes": (CounterMetricFamily, "bytes of pixels that came from it to process 0"),
    "hits": (CounterMetricFamily, "slices that were asked for, and there"),
    "misses": (CounterMetricFamily, "slices that were asked for, and had to be decoded again"),
    "lost": (CounterMetricFamily, "times that it was lost"),
}


class PreprocessorCollector(Collector):
    """Preprocessors as Prometheus metrics, `fluxjax_preprocessor_*`, with a label `preprocessor`. Nothing where there
    are none."""

    def __init__(self, preprocessors: Callable[[], Sequence[PreprocessorStatus]]) -> None:
        self._preprocessors = preprocessors

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        preprocessors = self._preprocessors()
        for name, (family, text) in _PREPROCESSOR_METRICS.items() if preprocessors else ():
            metric = family(f"fluxjax_preprocessor_{name}", text, labels=["preprocessor"])
            for place in preprocessors:
                metric.add_metric([place.name], float(getattr(place, name)))
            yield metric
