"""The settings of the way of new weights to rollout servers."""

import dataclasses
import enum

from ..base.errors import ConfigError
from .servers import RolloutEngine, ServersConfig, on_this_host


class Route(enum.Enum):
    AUTO = "auto"  # shm on this host; to others orbax where there is weights.folder, bucket where there is none
    SHM = "shm"  # files in shared memory
    IPC = "ipc"  # CUDA IPC, from GPU to GPU of one host; never run on one
    BUCKET = "bucket"  # over HTTP
    ORBAX = "orbax"  # files, whole or deltas, on a file system that hosts share


@dataclasses.dataclass(slots=True)
class WeightsConfig:
    """The way of new weights to rollout servers, where rollout.engine is serve or sglang."""

    route: Route = Route.AUTO  # auto: shm to servers of this host; to others orbax, or bucket without weights.folder
    folder: str = ""  # orbax: a folder that this host and those of the servers see under this name
    agents: tuple[str, ...] = ()  # orbax: python -m rollout.weights.agent for each of servers.addresses, in their order

    def chosen(self, servers: ServersConfig) -> Route:
        """The route that is not auto any more."""
        if self.route is not Route.AUTO:
            return self.route
        if all(on_this_host(address) for address in servers.addresses):
            return Route.SHM
        return Route.ORBAX if self.folder else Route.BUCKET

    def validate(self, engine: RolloutEngine, servers: ServersConfig) -> None:
        """Raises `ConfigError` for a route that can't reach the servers."""
        route = self.chosen(servers)
        name, remote = f"weights.route is {self.route.value}", not all(map(on_this_host, servers.addresses))
        if route in (Route.SHM, Route.IPC) and remote:
            raise ConfigError(
                f"{name}, which is for servers of this host; servers.addresses has others: set it to bucket, or to "
                "orbax with weights.folder"
            )
        if route is Route.IPC and engine is RolloutEngine.SERVE:
            raise ConfigError(f"{name}, which needs servers with PyTorch; rollout.serve takes shm, bucket or orbax")
        if route is Route.ORBAX and not self.folder:
            raise ConfigError(f"{name}; set weights.folder to a folder that the hosts of servers see, too")
        if self.agents and len(self.agents) != len(servers.addresses):
            raise ConfigError(
                f"weights.agents has {len(self.agents)} addresses, servers.addresses {len(servers.addresses)}; give "
                "the agent of each server's host, in their order (one agent does for all servers of a host)"
            )
        if route is Route.ORBAX and engine is RolloutEngine.SGLANG and remote and not self.agents:
            raise ConfigError(
                f"{name}, but SGLang 0.5.23 can't pull weights: run python -m rollout.weights.agent on the hosts of "
                "servers.addresses, and name them in weights.agents"
            )
