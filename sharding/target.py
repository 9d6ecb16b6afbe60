"""The target: the device that programs are traced for, which may differ from the device that traces them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterator

import jax

from .mesh import GPU_PLATFORMS, Device


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device: the facts that choices depend on while a program is traced."""

    platform: str  # cpu, gpu, ...
    capability: int = 0  # the compute capability of NVIDIA GPUs, 90 for 9.0; 0 for all other devices

    @staticmethod
    def of(device: Device) -> Target:
        """The target that a device is; the device may be only described."""
        version = re.fullmatch(r"(\d+)\.(\d)", str(getattr(device, "compute_capability", "")))  # AMD has gfx942, ...
        return Target(device.platform, 10 * int(version[1]) + int(version[2]) if version else 0)

    @property
    def is_gpu(self) -> bool:
        return self.platform in GPU_PLATFORMS


_given: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


def target() -> Target:
    """The target of `compiling_for`, or else JAX's default device. On a mesh of the other kind (GPU or CPU): a target
    of its platform without capability."""
    found = _given.get() or Target.of(jax.local_devices()[0])
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is None or Target(device.platform).is_gpu == found.is_gpu:
        return found
    return Target(device.platform)


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Makes all choices while tracing within the block for this target."""
    token = _given.set(target)
    try:
        yield
    finally:
        _given.reset(token)
