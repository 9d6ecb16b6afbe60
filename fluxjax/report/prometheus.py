"""The Prometheus port of a process: the metrics of a run, its rollout servers, trainer processes and preprocessors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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

    def export(self, collector: StatusCollector) -> None:
        """Serves what `collector` says whenever it is asked."""
        if self._server is not None:
            self._registry.register(collector)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


Family: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


class StatusCollector(Collector):
    """Statuses as Prometheus metrics, `fluxjax_KIND_*`, as they are whenever somebody asks. Nothing where there are
    none."""

    kind: ClassVar[str]
    labels: ClassVar[Mapping[str, str]]  # by label, the attribute of a status
    metrics: ClassVar[Mapping[str, tuple[Family, str, str]]]  # by name: the family, the attribute, and what it is

    def __init__(self, statuses: Callable[[], Sequence[Any]]) -> None:
        self._statuses = statuses

    def describe(self) -> Iterable[Metric]:
        return ()  # else a registry asks before there are any

    def collect(self) -> Iterable[Metric]:
        statuses = self._statuses()
        for name, (family, attribute, text) in self.metrics.items() if statuses else ():
            yield self._metric(family, name, text, statuses, operator.attrgetter(attribute))

    def _metric(
        self, family: Family, name: str, text: str, statuses: Sequence[Any], value: Callable[[Any], float]
    ) -> Metric:
        metric = family(f"fluxjax_{self.kind}_{name}", text, labels=list(self.labels))
        for status in statuses:
            labels = [str(getattr(status, attribute)) for attribute in self.labels.values()]
            metric.add_metric(labels, float(value(status)))
        return metric


class ServerCollector(StatusCollector):
    """The rollout servers."""

    kind, labels = "server", {"server": "name"}
    metrics: ClassVar = {
        "up": (GAUGE, "up", "1: it takes requests, 0: it starts, or was lost"),
        "asleep": (GAUGE, "asleep", "1: it gave its memory back, until it is needed"),
        "weight_version": (GAUGE, "version", "the version of the weights that it was proven to have, -1: none"),
        "running": (GAUGE, "running", "samples that it generates"),
        "waiting": (GAUGE, "waiting", "samples that wait for a place"),
        "tokens_per_second": (GAUGE, "tokens_per_second", "generated tokens a second, as it says itself"),
        "restarts": (COUNTER, "restarts", "times that it was lost"),
        "tokens": (COUNTER, "tokens", "generated tokens that came from it"),
    }


class HostCollector(StatusCollector):
    """Trainer processes. Nothing before they have made a step, and of a run of one process."""

    kind, labels = "host", {"process": "process", "host": "host"}
    metrics: ClassVar = {
        "devices": (GAUGE, "devices", "devices that it trains on"),
        "memory_bytes": (GAUGE, "memory", "resident memory after its last step"),
        "device_memory_bytes": (GAUGE, "device_memory", "bytes in use at most, of its fullest device, 0: unknown"),
        "step": (GAUGE, "step", "optimizer steps since it was started"),
        "prepare_seconds": (GAUGE, "prepared", "planning, reading media and laying out the last step"),
        "train_seconds": (GAUGE, "trained", "programs of the last step, waiting for others within them included"),
        "wait_seconds": (GAUGE, "waited", "standing still before the programs of the last step"),
        "own_seconds": (GAUGE, "own_seconds", "what others may have waited for in the last step"),
    }

    def collect(self) -> Iterable[Metric]:
        yield from super().collect()
        if len(hosts := self._statuses()) > 1:
            last = slowest(hosts)
            yield self._metric(GAUGE, "slowest", "1: the others wait for it", hosts, lambda host: host is last)


class PreprocessorCollector(StatusCollector):
    """Preprocessors."""

    kind, labels = "preprocessor", {"preprocessor": "name"}
    metrics: ClassVar = {
        "up": (GAUGE, "up", "1: it answers, 0: it starts, or was lost"),
        "queued": (GAUGE, "queued", "media that wait to be decoded by it"),
        "memory_bytes": (GAUGE, "memory_bytes", "decoded media that it keeps in memory"),
        "spilled_bytes": (GAUGE, "spilled_bytes", "decoded media that it keeps on its disk"),
        "looks": (COUNTER, "looks", "media that it looked at"),
        "decoded": (COUNTER, "decoded", "media that it decoded, whole or in part"),
        "bytes": (COUNTER, "bytes", "bytes of pixels that came from it to process 0"),
        "hits": (COUNTER, "hits", "slices that were asked for, and there"),
        "misses": (COUNTER, "misses", "slices that were asked for, and had to be decoded again"),
        "lost": (COUNTER, "lost", "times that it was lost"),
    }
