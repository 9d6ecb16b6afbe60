"""The settings of rollout servers, and of the route of new weights to them."""

import dataclasses
import enum
from urllib.parse import urlsplit

from ..base.errors import ConfigError
from .bounds import Section, positive


class RolloutEngine(enum.Enum):
    JAX = "jax"  # the embedded engine, in this process
    SERVE = "serve"  # the embedded engine in processes of its own, python -m rollout.serve
    SGLANG = "sglang"  # SGLang servers


# The flags that the run sets, and the flags that divide or change weights in ways that checksums do not cover.
_OURS = ("--model", "--model-path", "--host", "--port", "--weight-version", "--dtype")
_DIVIDED = ("--dp-size", "--dp", "--pp-size", "--pp", "--mm-enable-dp-encoder", "--enable-dp-attention")
_UNKNOWN = (*_DIVIDED, "--quantization")


@dataclasses.dataclass(slots=True)
class ServersConfig(Section):
    """Rollout servers, if rollout.engine is serve or sglang."""

    count: int = positive(1)  # servers that the run starts on its host; without effect if there are addresses
    addresses: tuple[str, ...] = ()  # servers that others start: ("http://127.0.0.1:30000",); FLUXJAX_TOKEN is sent
    # Flags of servers that the run starts: ("--tp-size", "{degree}", "--base-gpu-id", "{device}"). {server} is a
    # server's number, {degree} the number of its devices, {device} the first device, {devices} all devices, as in 2,3.
    flags: tuple[str, ...] = ()
    # Environment variables of servers that the run starts, filled in as flags are: ("CUDA_VISIBLE_DEVICES={devices}",).
    environment: tuple[str, ...] = ()
    python: str = ""  # the interpreter that has SGLang; empty: the run's interpreter
    start_seconds: float = positive(600.0)  # seconds that a server may take to start, or to be up again after a failure
    colocated: bool = False  # the servers share the training devices, and sleep during training

    def validate(self) -> None:
        """Raises `ConfigError` for servers that can't be started or reached."""
        for address in self.addresses:
            check_address(address, "servers.addresses")
        if twice := {address for address in self.addresses if self.addresses.count(address) > 1}:
            raise ConfigError(f"servers.addresses has {sorted(twice)[0]} twice")
        for flag in self.flags:
            if flag.partition("=")[0] in _OURS:
                raise ConfigError(f"servers.flags has {flag}, which the run sets itself; leave it out")
            if flag.partition("=")[0] in _UNKNOWN:
                raise ConfigError(
                    f"servers.flags has {flag}: weights that are divided or changed in this way can't be proven to be "
                    "those of the run; start more servers, or give each server more ranks (--tp-size)"
                )
        for entry in self.environment:
            if not entry.partition("=")[0] or "=" not in entry:
                raise ConfigError(f"servers.environment has {entry!r}; an entry is like NAME=value")
        if self.addresses and (self.flags or self.environment or self.python):
            raise ConfigError(
                "servers.addresses are of servers that others start; servers.flags, servers.environment and "
                "servers.python are for servers that the run starts: leave them out"
            )
        if self.colocated and not all(map(on_this_host, self.addresses)):
            raise ConfigError("servers.colocated needs servers on this host, but servers.addresses has others")

    @property
    def servers(self) -> int:
        return len(self.addresses) or self.count


def check_address(address: str, where: str) -> None:
    """Raises `ConfigError` for a text that is no address of a server; `where` names the text's origin."""
    try:
        parts = urlsplit(address)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/")
    except ValueError:  # http://[
        known = False
    if not known:
        raise ConfigError(f"{where} has {address!r}; an address is like http://127.0.0.1:30000")


def on_this_host(address: str) -> bool:
    """Returns True if the address is a loopback address, which always means this host."""
    from rollout.listening import is_loopback

    return is_loopback(urlsplit(address).hostname or "")


class Route(enum.Enum):
    AUTO = "auto"  # shm on this host; to other hosts orbax if there is weights.folder, else bucket
    SHM = "shm"  # files in shared memory
    IPC = "ipc"  # CUDA IPC, from GPU to GPU of one host; this route was never tested on GPUs
    BUCKET = "bucket"  # over HTTP
    ORBAX = "orbax"  # files, complete or deltas, on a file system that hosts share


@dataclasses.dataclass(slots=True)
class WeightsConfig(Section):
    """The route of new weights to rollout servers, if rollout.engine is serve or sglang."""

    route: Route = Route.AUTO  # way of new weights to the servers
    folder: str = ""  # orbax: a folder that this host and the servers' hosts see under this name
    # orbax: the address of python -m rollout.weights.agent for each of servers.addresses, in their order
    agents: tuple[str, ...] = ()

    def chosen(self, servers: ServersConfig) -> Route:
        """Returns the route; for `auto`, the route that suits the servers."""
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
                f"{name}, which reaches only servers on this host, but servers.addresses has servers on other hosts: "
                "set weights.route to bucket, or to orbax with weights.folder"
            )
        if route is Route.IPC and engine is RolloutEngine.SERVE:
            raise ConfigError(f"{name}, which needs servers with PyTorch; rollout.serve takes shm, bucket or orbax")
        if route is Route.ORBAX and not self.folder:
            raise ConfigError(f"{name}; set weights.folder to a folder that the hosts of the servers see, too")
        if self.agents and len(self.agents) != len(servers.addresses):
            raise ConfigError(
                f"weights.agents has {len(self.agents)} addresses, servers.addresses {len(servers.addresses)}; give "
                "the agent of each server's host, in the servers' order (one agent serves all servers of a host)"
            )
        if route is Route.ORBAX and engine is RolloutEngine.SGLANG and remote and not self.agents:
            raise ConfigError(
                f"{name}, but SGLang 0.5.23 can't pull weights: run python -m rollout.weights.agent on the hosts of "
                "servers.addresses, and name these agents in weights.agents"
            )
