"""The embedded engines of one process of several, behind the HTTP routes of `rollout.serve`: process 0 has a fleet of
the engines of all processes, its own included."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import pathlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax

from models.decoder import Decoder
from models.processing import Processor
from models.shadow import Fetch
from rollout.listening import address_of, bound_socket, http_server
from rollout.serve_app import RolloutServer

from ..config import Config, RolloutEngine
from .engine_pool import EnginePool, engine_count
from .fleet_pool import FleetPool

if TYPE_CHECKING:
    import uvicorn

GRACE = 10.0  # seconds in which they end


class EngineServers:
    """Engines on the devices of this process, one of `processes`, served from a thread of their own. `model` may be
    abstract: weights come over HTTP. `addresses` has the address of each engine.

    The servers listen on `host`, for clients that know `token`. `failed` is called, from their thread, when they can't
    go on. With `fetch`, they take tickets in the place of pixels. Raises what `EnginePool` raises, and ValueError for a
    host that is none of this machine's.
    """

    def __init__(
        self,
        config: Config,
        model: Decoder,
        processor: Processor,
        processes: int,
        *,
        host: str,
        token: str,
        failed: Callable[[str], None],
        fetch: Fetch | None = None,
    ) -> None:
        process_config = copy.deepcopy(config)
        process_config.rollout.engines = engine_count(config, jax.local_devices(), processes) // processes
        self._pool, dtype = EnginePool(process_config, model, fetch=fetch), config.model.compute_dtype.value
        served = [RolloutServer(e, model.config, processor, dtype=dtype, token=token) for e in self._pool.engines]
        self._sockets = [bound_socket(host, 0) for _ in served]
        self._servers = [http_server(server.app) for server in served]
        self.addresses = [address_of(listening) for listening in self._sockets]
        self._failed = failed
        self._thread = threading.Thread(target=self._run, name="engine-servers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the servers; requests that run are lost. It may be called again."""
        for server in self._servers:
            server.should_exit = True
        self._thread.join(GRACE)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._failed(f"its engines ended: {type(error).__name__}: {error}")

    async def _serve(self) -> None:
        async def serve(server: uvicorn.Server, listening: socket.socket) -> None:
            with contextlib.closing(listening):
                await server.serve([listening])

        await asyncio.gather(*map(serve, self._servers, self._sockets))
        for engine in self._pool.engines:
            await engine.close()


class SharedPool(FleetPool):
    """The engines of all processes, at these addresses, as process 0 uses them; closing it also closes `local_servers`,
    those of process 0. `shadows` says that every engine was made with a `fetch`. Raises ConfigError for a weight route
    that does not reach the servers."""

    def __init__(
        self,
        config: Config,
        model: Decoder,
        local_servers: EngineServers,
        addresses: Sequence[str],
        logs: pathlib.Path,
        token: str,
        *,
        fetch: Fetch | None = None,
        shadows: bool = False,
    ) -> None:
        fleet = copy.deepcopy(config)
        fleet.rollout.engine = RolloutEngine.SERVE
        fleet.servers = dataclasses.replace(config.servers, addresses=tuple(addresses))
        fleet.rollout.engines = len(addresses)
        fleet.weights.validate(fleet.rollout.engine, fleet.servers)
        super().__init__(fleet, model, logs, logs, token, fetch=fetch, shadows=shadows)
        self._own = local_servers

    def close(self) -> None:
        super().close()
        self._own.close()
