"""The port on which Prometheus reads the metrics of a run."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import prometheus_client
from starlette.applications import Starlette
from starlette.routing import Mount

from rollout.listening import TOKEN, http_server, is_loopback
from rollout.serve_guard import Guarded, health_route

from ..config import ConfigError


class MetricsPort:
    """Serves a registry until it is closed; with FLUXJAX_TOKEN in the environment, only to clients that send it as
    `Authorization: Bearer`."""

    def __init__(self, registry: prometheus_client.CollectorRegistry, host: str, port: int) -> None:
        """Raises ConfigError for a port that is taken or none, and for an address that others reach without a token."""
        token = os.environ.get(TOKEN, "")
        if not token and not is_loopback(host):
            raise ConfigError(f"report.prometheus_host is {host}, which other machines reach: set {TOKEN}")
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:  # `socket.create_server` leaves its socket open where host or port is none
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen()
        except (OSError, OverflowError, TypeError) as error:
            listening.close()
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"report.prometheus_port: cannot serve on {port}: {reason}") from error
        app = Starlette(routes=[health_route(), Mount("/", prometheus_client.make_asgi_app(registry))])
        self._server = http_server(Guarded(app, token, lambda: False))
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._server.serve([listening]),), name="metrics-port", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
