"""The Prometheus port of a process, for metrics of a run, its rollout servers, trainer processes and preprocessors."""

from __future__ import annotations

import asyncio
import operator
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.routing import Mount

from rollout.listening import TOKEN, http_server, is_loopback
from rollout.serve_guard import Guarded, health_route

from ..base.statuses import slowest
from ..config import ConfigError


class PrometheusPort:
    """Serves metrics from a thread until `close`. Memory, CPU seconds and open files of this process are served as
    `process_*`. If FLUXJAX_TOKEN is in the environment, clients must send the token as `Authorization: Bearer`."""

    def __init__(self, port: int, host: str = "127.0.0.1", *collectors: StatusCollector) -> None:
        """Raises ConfigError for a taken or invalid port, or if other machines need no token to reach it."""
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, prometheus_client.Gauge] = {}
        prometheus_client.ProcessCollector(registry=self._registry)
        for collector in collectors:
            self._registry.register(collector)
        token = os.environ.get(TOKEN, "")
        if not token and not is_loopback(host):
            raise ConfigError(f"report.prometheus names {host}, which other machines reach: set {TOKEN}")
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:  # `socket.create_server` would leave its socket open if host or port is invalid
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen()
        except (OSError, OverflowError, TypeError) as error:
            listening.close()
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"report.prometheus: cannot serve on {port}: {reason}") from error
        app = Starlette(routes=[health_route(), Mount("/", prometheus_client.make_asgi_app(self._registry))])
        self._server = http_server(Guarded(app, token, lambda: False))
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._server.serve([listening]),), name="metrics-port", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for label, value in metrics.items():
            if label not in self._gauges:
                name = "fluxjax_" + "".join(c if c.isalnum() else "_" for c in label)
                self._gauges[label] = prometheus_client.Gauge(name, label, registry=self._registry)
            self._gauges[label].set(value)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


Family: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
_RENAMED = {"version": "weight_version"}


class StatusCollector(Collector):
    """Offers statuses as Prometheus metrics `fluxjax_KIND_*`, with the values at the time of each request."""

    kind: ClassVar[str]
    labels: ClassVar[Mapping[str, str]]  # label -> attribute of a status
    metrics: ClassVar[Mapping[str, tuple[Family, str]]]  # attribute of a status -> (family, description)

    def __init__(self, statuses: Callable[[], Sequence[Any]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[Metric]:
        statuses = self._statuses()
        for name, (family, text) in self.metrics.items() if statuses else ():
            yield self._metric(family, _RENAMED.get(name, name), text, statuses, operator.attrgetter(name))

    def _metric(
        self, family: Family, name: str, text: str, statuses: Sequence[Any], value: Callable[[Any], float]
    ) -> Metric:
        metric = family(f"fluxjax_{self.kind}_{name}", text, labels=list(self.labels))
        for status in statuses:
            labels = [str(getattr(status, attribute)) for attribute in self.labels.values()]
            metric.add_metric(labels, float(value(status)))
        return metric


class ServerCollector(StatusCollector):
    """Metrics of the rollout servers."""

    kind, labels = "server", {"server": "name"}
    metrics: ClassVar = {
        "up": (GAUGE, "1: the server takes requests, 0: it starts, or was lost"),
        "asleep": (GAUGE, "1: the server gave its memory back, until it is needed"),
        "version": (GAUGE, "the version of the weights that the server was proven to have, -1: none"),
        "running": (GAUGE, "samples that the server generates"),
        "waiting": (GAUGE, "samples that wait for a slot"),
        "tokens_per_second": (GAUGE, "generated tokens a second, as the server says itself"),
        "restarts": (COUNTER, "times that the server was lost"),
        "tokens": (COUNTER, "generated tokens that came from the server"),
    }


class HostCollector(StatusCollector):
    """Metrics of the trainer processes, from their first step on, in a run of several processes."""

    kind, labels = "host", {"process": "process", "host": "host"}
    metrics: ClassVar = {
        "devices": (GAUGE, "devices that the process trains on"),
        "memory_bytes": (GAUGE, "resident memory after the process's last step"),
        "device_memory_bytes": (GAUGE, "peak of the bytes in use on the fullest device of the process, 0: unknown"),
        "step": (GAUGE, "training steps since the process was started"),
        "prepare_seconds": (GAUGE, "time for planning, reading media and laying out the last step"),
        "train_seconds": (GAUGE, "time in the programs of the last step, with waits for other processes within them"),
        "wait_seconds": (GAUGE, "time without work before the programs of the last step"),
        "own_seconds": (GAUGE, "time for which other processes may have waited for this process in the last step"),
    }

    def collect(self) -> Iterable[Metric]:
        yield from super().collect()
        if len(hosts := self._statuses()) > 1:
            last = slowest(hosts)
            yield self._metric(
                GAUGE, "slowest", "1: the others wait for this process", hosts, lambda host: host is last
            )


class PreprocessorCollector(StatusCollector):
    """Metrics of the preprocessors."""

    kind, labels = "preprocessor", {"preprocessor": "name"}
    metrics: ClassVar = {
        "up": (GAUGE, "1: the preprocessor answers, 0: it starts, or was lost"),
        "queued": (GAUGE, "media that wait to be decoded by the preprocessor"),
        "memory_bytes": (GAUGE, "bytes of decoded media that the preprocessor keeps in memory"),
        "looks": (COUNTER, "media whose size the preprocessor read"),
        "decoded": (COUNTER, "media that the preprocessor decoded, all or in part"),
        "bytes": (COUNTER, "bytes of pixels that came from the preprocessor to process 0"),
        "hits": (COUNTER, "slices that were asked for and were in memory"),
        "misses": (COUNTER, "slices that were asked for and had to be decoded again"),
        "lost": (COUNTER, "times that the preprocessor was lost"),
    }


COLLECTORS = (ServerCollector, HostCollector, PreprocessorCollector)
