"""The memory part of the pre-flight, for the devices that a run is about to start on, before it reads any weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from models.config import AnyConfig
from sharding.target import Target
from sharding.walk import HOST_MEMORY

from ..config import ODC, Config, ConfigError, Remat

if TYPE_CHECKING:
    from ..sizing.check import DeviceRoom

JAX_FRACTION = 0.75  # of a GPU's memory, which JAX takes by itself


def settled_remat(
    config: Config, model: AnyConfig, mesh: Mesh, never_sampled: tuple[int, ...], progress: Callable[[str], None]
) -> Remat:
    """The rematerialisation to train with: as configured, or for `auto` the first that fits.

    On GPUs, and where `sharding.device_memory_gib` says what to fit into, the run's largest programs are compiled; with
    a compilation cache the run then finds them there. Raises ConfigError, in the pre-flight's words, for a run
    that needs more memory, and for activations offloaded where there is no such memory.
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
        progress("memory is not checked before the start: odc's layers are programs of their own")
        return Remat.LAYER if settings.remat is Remat.AUTO else settings.remat

    from ..sizing.check import check

    def said(text: str) -> None:
        progress(f"does it fit? {text}")

    if config.stream_trainer:
        said("what training keeps on engines that are lent to it (stream_trainer) is not counted")

    devices = list(mesh.devices.flat)
    verdict = check(config, model, devices, room, said, never_sampled=never_sampled, longest_row=False)
    if not verdict.fits:
        raise ConfigError("\n".join([*verdict.answer(), "Or try it all the same: --config.sharding.preflight=false"]))
    return verdict.remat


def _room(config: Config) -> DeviceRoom | None:
    """Returns the memory that training may use on a device; None if the check is turned off, or the memory is not
    known."""
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
