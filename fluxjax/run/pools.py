"""The engines of a run: those of this process, those of all its processes, or rollout servers."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from models.decoder import Decoder
from models.processing import Processor
from models.shadow import Fetch

from ..config import Config, ConfigError, RolloutEngine
from ..hosts.gang import Gang
from ..runtime.engine_pool import EnginePool

if TYPE_CHECKING:
    from ..runtime.engine_servers import EngineServers
    from ..runtime.fleet_pool import FleetPool


def make_pool(
    config: Config,
    model: Decoder,
    processor: Processor,
    gang: Gang,
    *,
    token: str,
    checkpoint: Callable[[], pathlib.Path],
    logs: pathlib.Path,
    fetch: Fetch | None = None,
) -> EnginePool | FleetPool:
    """Returns the engines that process 0 uses: those of its own process, those of all processes, or rollout servers.

    `model` may be abstract. `checkpoint` makes a folder that servers can start from, and `token` is for the engines of
    the other processes. With `fetch`, prompts may have their pixels elsewhere: then all processes must have a `fetch`.
    Raises what the pools raise.
    """
    if config.rollout.engine is not RolloutEngine.JAX:
        from ..runtime.fleet_pool import FleetPool

        return FleetPool(config, model, checkpoint(), logs, fetch=fetch)
    if gang.alone:
        return EnginePool(config, model, fetch=fetch)
    from ..runtime.engine_servers import SharedPool

    servers = serve_engines(config, model, processor, gang, token, fetch)
    addresses = [*itertools.chain.from_iterable(gang.exchange(servers.addresses))]
    return SharedPool(config, model, servers, addresses, logs, token, fetch=fetch, shadows=fetch is not None)


def serve_engines(
    config: Config, model: Decoder, processor: Processor, gang: Gang, token: str, fetch: Fetch | None = None
) -> EngineServers:
    """Starts the engines of this process, one of several, as servers that process 0 uses for all of them."""
    from ..runtime.engine_servers import EngineServers

    links = gang.links
    assert links is not None
    try:
        return EngineServers(
            config,
            model,
            processor,
            gang.processes,
            host=links.address,
            token=token,
            failed=links.fail,
            fetch=fetch,
        )
    except ValueError as error:
        raise ConfigError(f"the engines of {links.name} can't listen on {links.address}: {error}") from error
