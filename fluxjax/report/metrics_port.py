"""The port on which Prometheus reads the metrics of a run."""

from __future__ import annotations

import hmac
import http.server
import os
import threading
from typing import Any, cast

import prometheus_client

from sharding.links.relay import is_loopback

from ..config import ConfigError

TOKEN = "FLUXJAX_TOKEN"


class MetricsPort:
    """Serves a registry until it is closed; with FLUXJAX_TOKEN in the environment, only to clients that send it as
    `Authorization: Bearer`."""

    def __init__(self, registry: prometheus_client.CollectorRegistry, host: str, port: int) -> None:
        """Raises ConfigError for a port that is taken or none, and for an address that others reach without a token."""
        wanted = f"Bearer {os.environ[TOKEN]}".encode() if os.environ.get(TOKEN) else b""
        if not wanted and not is_loopback(host):
            raise ConfigError(f"report.prometheus_host is {host}, which other machines reach: set {TOKEN}")
        handler: Any = prometheus_client.MetricsHandler.factory(registry)  # a class

        class GuardedMetrics(handler):
            def do_GET(self) -> None:
                given = self.headers.get("Authorization", "").encode()
                if wanted and not hmac.compare_digest(given, wanted):
                    self.send_error(401)
                else:
                    super().do_GET()

        try:
            self._server = http.server.ThreadingHTTPServer((host, port), cast(Any, GuardedMetrics))
        except (OSError, OverflowError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"report.prometheus_port: cannot serve on {port}: {reason}") from error
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="metrics-port", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
