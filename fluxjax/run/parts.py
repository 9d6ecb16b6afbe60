"""Builds the parts of a run from its settled configuration."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from models.config import DecoderConfig, VisionConfig
from models.decoder import Decoder
from models.processing import Processor
from sharding.mesh import Target
from sharding.walk import HOST_MEMORY

from ..algorithms import RLAlgorithm
from ..base.errors import as_config_error
from ..batch.composer import Composer, Team
from ..config import ODC, Config, ConfigError, Remat, RolloutEngine
from ..learner.run_models import RunModels
from ..runtime.engine_pool import EnginePool, engine_count, engines_sleep
from .build import AnyPixels, build_learning, open_pixels, run_mesh, sampling_params
from .checkpoint import Checkpoints

if TYPE_CHECKING:
    from ..learner.learner import Learner
    from ..runtime.fleet_pool import EngineServers, FleetPool
    from ..sizing.check import DeviceRoom

JAX_FRACTION = 0.75  # the share of a GPU's memory that JAX takes by default


def settled(
    config: Config,
    sizes: DecoderConfig,
    processor: Processor,
    gang: Team,
    note: Callable[[str], None] | None,
    own_policy: bool = False,
) -> Config:
    """Returns a copy of the configuration that refuses changes. The number from `engine_count` replaces
    `rollout.engines=0`. The result of the pre-flight's memory check replaces `sharding.remat=auto`. `note` gets the
    progress of the check (None: no check). `engines_sleep` describes `own_policy`. Raises `ConfigError` if there are
    too few devices, or if the run does not fit into the devices' memory."""
    config = copy.deepcopy(config)
    if note is not None:
        mesh, sleeping = run_mesh(config), engines_sleep(config, gang.alone, own_policy)
        config.sharding.remat = settled_remat(config, sizes, mesh, processor.media_token_ids, note, sleeping)
    config.rollout.engines = engine_count(config, jax.local_devices(), gang.processes)
    config.validate_scheduling()  # needs the settled number of engines
    config.settle()
    return config


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that every process of a run has, on its own share of the devices."""

    config: Config  # a result of `settled`
    processor: Processor
    vision: VisionConfig | None  # None: a text model
    pixels: AnyPixels
    model: Decoder  # abstract: the learner has its weights
    composer: Composer
    models: RunModels
    checkpoints: Checkpoints

    @property
    def learner(self) -> Learner:
        return self.models.learner

    def close(self) -> None:
        """Ends all threads, and waits for checkpoints under way."""
        self.models.close()
        self.checkpoints.close()
        self.pixels.close()


def assemble(
    config: Config,
    sizes: DecoderConfig,
    processor: Processor,
    algorithm: RLAlgorithm,
    gang: Team,
    run_dir: pathlib.Path,
    token: str,
    fetched: Callable[[float, float, int], None] = lambda start, end, bytes: None,
    read_only: bool = False,
) -> Parts:
    """Builds the parts of one process from the settled configuration. Collective. `token` and `fetched` are the
    arguments `token` and `note` of `Pixels`. With `read_only`, nothing changes in the run's folder, and the checkpoint
    shows whether there is a critic. Raises `ConfigError` and the errors of `Pixels`."""
    pixels = open_pixels(config, processor, gang, run_dir, token, fetched)
    learning = build_learning(
        config, sizes, processor, token_loss=algorithm.token_loss, links=gang.links, materializer=pixels.materializer
    )
    learner, critic = learning.learner, None
    gang.equip(config, pixels.place_of, None if pixels.materializer is None else pixels.materializer.expect)
    largest, folder = max(weight.nbytes for weight in jax.tree.leaves(learner.params)), run_dir / "checkpoints"
    checkpoints = Checkpoints(folder, config.checkpoint.keep, read_only=read_only, largest=largest)
    if checkpoints.holds("critic") if read_only else algorithm.critic:
        from ..learner.critic import Critic

        critic = Critic(config, learning.model, mesh=learner.mesh, links=gang.links, materializer=pixels.materializer)
    models = RunModels(config, algorithm, learner, critic, processor.media_token_ids)
    return Parts(config, processor, sizes.vision, pixels, learning.model, learning.composer, models, checkpoints)


def settled_remat(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    never_sampled: tuple[int, ...],
    progress: Callable[[str], None],
    sleeping: bool = False,
) -> Remat:
    """Returns the rematerialisation to train with. For `auto`, this is the first rematerialisation that fits into
    memory. If memory is unknown or `sharding.preflight` is false, `auto` becomes `none`. Otherwise, under odc, `auto`
    becomes `layer`.

    If a device's memory is known (on GPUs, or by `sharding.device_memory_gib`), the run's largest programs are
    compiled, except under odc. `Account` describes `sleeping`. Raises ConfigError for a run that needs more memory, and
    for `offload` on devices without host memory.
    """
    settings, room = config.sharding, _room(config)
    if settings.remat is Remat.OFFLOAD and not _has_host_memory():
        raise ConfigError(
            f"sharding.remat is offload, but {jax.default_backend()} devices have no {HOST_MEMORY} memory here; set it "
            "to layer"
        )
    if room is None:
        return Remat.NONE if settings.remat is Remat.AUTO else settings.remat
    if isinstance(settings.strategy, ODC):
        progress("memory is not checked before the start: with odc, each layer is a program of its own")
        return Remat.LAYER if settings.remat is Remat.AUTO else settings.remat

    from ..sizing.check import check

    def said(text: str) -> None:
        progress(f"does it fit? {text}")

    if config.stream_trainer:
        said("the memory that training takes on lent engines (stream_trainer) is not counted")

    devices = list(mesh.devices.flat)
    verdict = check(
        config, model, devices, room, said, never_sampled=never_sampled, longest_row=False, sleeping=sleeping
    )
    if not verdict.fits:
        raise ConfigError(
            "\n".join([*verdict.answer(), "Or start the run without this check: --config.sharding.preflight=false"])
        )
    return verdict.remat


def _room(config: Config) -> DeviceRoom | None:
    """Returns the memory that training may use on a device, or None if the check is off or the memory is unknown."""
    if not config.sharding.preflight:
        return None
    device = jax.local_devices()[0]
    usable = (device.memory_stats() or {}).get("bytes_limit", 0) if Target.of(device).is_gpu else 0
    if not usable and not config.sharding.device_memory_gib:
        return None
    from ..sizing.account import GIB
    from ..sizing.check import DeviceRoom
    from ..sizing.topology import MEMORY_FRACTION, memory_fraction

    given = config.sharding.device_memory_gib * GIB
    if given and not 0 < usable < given:
        return DeviceRoom(given, given, f"sharding.device_memory_gib={config.sharding.device_memory_gib:g}")
    fraction = memory_fraction(JAX_FRACTION)
    return DeviceRoom(usable / fraction, usable, f"{MEMORY_FRACTION}={fraction:.2f}")


def _has_host_memory() -> bool:
    return any(memory.kind == HOST_MEMORY for memory in jax.local_devices()[0].addressable_memories())


def make_pool(
    parts: Parts,
    gang: Team,
    token: str,
    checkpoint: Callable[[], pathlib.Path],
    logs: pathlib.Path,
    read_only: bool = False,
) -> EnginePool | FleetPool:
    """Returns the engines that process 0 uses. These are the embedded engines of all processes, or rollout servers.
    With `read_only`, these are embedded engines of this process. `checkpoint` makes a folder that servers can start
    from. `token` is for the engines of the other processes. Raises the errors of the pools."""
    config, model, fetch = parts.config, parts.model, parts.pixels.fetch
    embedded = config.rollout.engine is RolloutEngine.JAX
    if read_only or (embedded and gang.alone):
        return EnginePool(config, model, fetch=fetch, sampling=sampling_params(config, parts.processor))
    from ..runtime.fleet_pool import FleetPool, for_all_engines

    if not embedded:
        return FleetPool(config, model, checkpoint(), logs, fetch=fetch)
    servers = serve_engines(parts, gang, token)
    addresses = [*itertools.chain.from_iterable(gang.exchange(servers.addresses))]
    config = for_all_engines(config, addresses)
    return FleetPool(config, model, logs, logs, token, fetch=fetch, shadows=fetch is not None, local_servers=servers)


def serve_engines(parts: Parts, gang: Team, token: str) -> EngineServers:
    """Starts the engines of this process as servers for process 0. Raises ConfigError if they can't listen."""
    from ..runtime.fleet_pool import EngineServers

    links = gang.links
    assert links is not None
    given, fetch = (parts.config, parts.model, parts.processor), parts.pixels.fetch
    with as_config_error(f"the engines of {links.name} can't listen on {links.address}", ValueError):
        return EngineServers(*given, gang.processes, host=links.address, token=token, failed=links.fail, fetch=fetch)
