"""The target: the device that programs are traced for, which may differ from the device that traces them.

Triton kernels are launched here, through jax-triton, where the target can run them. Triton is imported and asked for
only where the computation goes to an NVIDIA GPU.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.metadata
import logging
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .mesh import GPU_PLATFORMS, Device

LEAST_CAPABILITY = 80  # Ampere, the first with bfloat16 and TF32 products

_log = logging.getLogger(__name__)


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


def runs_triton(*arrays: Array) -> bool:
    """Says, while a program is traced, whether a Triton kernel can compute with these arrays.

    It can where the target is an NVIDIA GPU since Ampere, jax-triton can be imported, and all
    arrays are bfloat16 or all float32.
    """
    device = target()
    if not device.is_gpu or not _importable() or not _capable(device.capability):
        return False
    return {array.dtype.name for array in arrays} in ({"bfloat16"}, {"float32"})


@functools.cache
def _importable() -> bool:
    try:
        for module in ("jax_triton", "triton"):
            importlib.import_module(module)
        if jax.__version_info__ >= (0, 12) and importlib.metadata.version("jax-triton").startswith("0.4."):
            raise ImportError("jax-triton 0.4 does not know JAX 0.12")  # tracing would fail
    except Exception as error:  # versions that do not fit each other fail in many ways
        _log.warning("GPUs compute without our Triton kernels, slowly: %s (pip install 'fluxjax[cuda13]')", error)
        return False
    return True


@functools.cache
def _capable(capability: int) -> bool:
    if capability < LEAST_CAPABILITY:
        _log.warning("GPUs compute without our Triton kernels, slowly: these need NVIDIA GPUs since Ampere")
    return capability >= LEAST_CAPABILITY


def launch(
    module: str,
    kernel: str,
    arguments: tuple[Array | int | float, ...],
    outs: Any,
    grid: tuple[int, int, int],
    *,
    warps: int,
    stages: int,
    **constants: int | bool | str,
) -> list[Array]:
    """Launches a kernel of a module of `sharding.kernels`. The program names its calls `module_kernel`."""
    jax_triton: Any = importlib.import_module("jax_triton")
    kernels: Any = importlib.import_module(f"{__package__}.kernels.{module}")
    name = f"{module}_{kernel}"
    with jax.named_scope(name):
        return jax_triton.triton_call(
            *arguments,
            kernel=getattr(kernels, kernel),
            out_shape=tuple(outs),
            grid=grid,
            name=name,
            num_warps=warps,
            num_stages=stages,
            compute_capability=target().capability,
            **constants,
        )


def varying_zero(*arrays: Array) -> Array:
    """A float32 zero that varies over every mesh axis over which one of `arrays` does. A loop's initial value must vary
    like its results, and a kernel's results like its inputs; only the arrays tell these axes."""
    zero = jnp.zeros((), jnp.float32)
    for array in arrays:
        zero = zero + jnp.where(False, array.reshape(-1)[0], 0).astype(jnp.float32)
    return zero
