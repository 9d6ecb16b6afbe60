"""Devices: the mesh that a program runs on, and the target that it is traced for.

The target may differ from the device that traces the program. A mesh has one outer axis (replicas), then axes of
size two. A sequence-parallel group of any power-of-two degree `p` is the product of the last `log2(p)` axes of size
two, so that nested groups need no mesh of their own. FSDP shards over all axes at once. This module also launches
Triton kernels, which are imported, and their absence reported, only if the target is a GPU.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.metadata
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
GPU_PLATFORMS = ("gpu", "cuda")
REPLICA = "replica"  # the outer axis: the odd factor of the number of devices
LEAST_CAPABILITY = 80  # Ampere, the first generation with bfloat16 and TF32 products

_log = logging.getLogger(__name__)


class MeshError(ValueError):
    """The devices can't form the requested mesh or group. The message names the devices and the request."""


def make_mesh(num_devices: int = 0, *, devices: Sequence[Device] | None = None) -> Mesh:
    """A mesh `(replica, s{k-1}, ..., s1, s0)` over the first `num_devices` (0: all) of `devices`, by default all that
    JAX sees. The size of the outer axis is the odd factor of the number of devices (1 for 8, 3 for 6)."""
    devices = jax.devices() if devices is None else devices
    if not devices:
        raise MeshError("a mesh needs at least one device, got an empty sequence")
    count = num_devices or len(devices)
    if count < 0:
        raise MeshError(f"the number of devices must not be negative, got {num_devices}")
    if count > len(devices):
        raise MeshError(f"{count} devices asked for, but there are {len(devices)} ({devices[0].platform})")
    axes = binary_axes(count)
    grid = np.array(devices[:count], dtype=object).reshape(-1, *[2] * len(axes))
    return Mesh(grid, (REPLICA, *axes), axis_types=(AxisType.Auto,) * (1 + len(axes)))


def binary_axes(num_devices: int) -> tuple[str, ...]:
    """The axes of size two, outermost first, of the mesh that `make_mesh(num_devices)` makes."""
    return tuple(f"s{i}" for i in reversed(range(replica_size(num_devices).bit_length() - 1)))


def replica_size(num_devices: int) -> int:
    """The devices of a replica of `make_mesh(num_devices)`: no sequence is spread over more than one replica."""
    return num_devices & -num_devices


def group_axes(axes: tuple[str, ...], degree: int) -> tuple[str, ...]:
    """The axes of a nested group: the last `log2(degree)` of a mesh's axes of size two; for degree 1 no axis at all.
    Raises MeshError for a degree that no product of these axes has."""
    twos = degree.bit_length() - 1
    if degree < 1 or degree != 1 << twos or twos > len(axes):
        raise MeshError(f"no group of {degree} devices on this mesh; it must be a power of two up to {1 << len(axes)}")
    return axes[len(axes) - twos :]


# `spread.ulysses` computes attention in rounds and exchanges tokens meanwhile. By default XLA has one collective under
# way, so that a round's second all-to-all, or a gather of weights, delays the first all-to-all of the next round. XLA
# also starts collectives as late as its estimates allow, and estimates loops over tiles as 0 s. In the backward pass an
# all-to-all then starts after the attention that should hide it. Collectives share one queue of XLA (its
# `operation_queue_id`), and still run in program order.
GPU_OVERLAP: Mapping[str, int | bool] = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
}


def compiler_options(mesh: Mesh) -> dict[str, int | bool]:
    """Options for `jax.jit(..., compiler_options=...)` of programs with `spread.ulysses`; empty except on GPUs."""
    return dict(GPU_OVERLAP) if mesh.devices.flat[0].platform in GPU_PLATFORMS else {}


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device: the facts that choices depend on while a program is traced."""

    platform: str  # cpu, gpu, ...
    capability: int = 0  # the compute capability of NVIDIA GPUs, 90 for 9.0; 0 for all other devices

    @staticmethod
    def of(device: Device) -> "Target":
        """The target that describes `device`; a description of a device suffices, too."""
        version = re.fullmatch(r"(\d+)\.(\d)", str(getattr(device, "compute_capability", "")))  # AMD has gfx942, ...
        return Target(device.platform, 10 * int(version[1]) + int(version[2]) if version else 0)

    @property
    def is_gpu(self) -> bool:
        return self.platform in GPU_PLATFORMS


_given: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


def target() -> Target:
    """The target of `compiling_for`, or else of the first local device. If only one of this target and the mesh in use
    is for GPUs, a target of the mesh's platform without capability."""
    found = _given.get() or Target.of(jax.local_devices()[0])
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is None or Target(device.platform).is_gpu == found.is_gpu:
        return found
    return Target(device.platform)


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Makes all choices for this target in programs that are traced within the block."""
    token = _given.set(target)
    try:
        yield
    finally:
        _given.reset(token)


def exact_products(dtype: DTypeLike) -> None:
    """Makes this process multiply float32 in float32, if a run on GPUs computes in it: GPUs use TF32, with 10 bits of
    mantissa, and engine and trainer differ by 2e-4 then. A value of JAX_DEFAULT_MATMUL_PRECISION stays."""
    settings: Any = jax.config
    if jnp.dtype(dtype) == jnp.float32 and target().is_gpu and settings.jax_default_matmul_precision is None:
        settings.update("jax_default_matmul_precision", "highest")


def runs_triton(*arrays: Array | jax.ShapeDtypeStruct, multiple: int = 1, most: int | float = math.inf) -> bool:
    """Says, while a program is traced, whether a Triton kernel can compute with these arrays: the target is an NVIDIA
    GPU of Ampere or later, jax-triton can be imported, all arrays are bfloat16 or all float32, and the last dimension
    of the first array is a multiple of `multiple`, and at most `most`."""
    device, width = target(), arrays[0].shape[-1]
    if not device.is_gpu or width % multiple or width > most or not _importable() or not _capable(device.capability):
        return False
    return {array.dtype.name for array in arrays} in ({"bfloat16"}, {"float32"})


@functools.cache
def triton_trouble() -> str:
    """The reason why our Triton kernels can't be imported here; empty if they can."""
    try:
        for module in ("jax_triton", "triton"):
            importlib.import_module(module)
        if jax.__version_info__ >= (0, 12) and importlib.metadata.version("jax-triton").startswith("0.4."):
            raise ImportError("jax-triton 0.4 does not know JAX 0.12")  # tracing would fail
    except Exception as error:  # versions that do not fit each other fail in many ways
        return str(error) or type(error).__name__
    return ""


@functools.cache
def _importable() -> bool:
    if trouble := triton_trouble():
        _log.warning("GPUs compute without our Triton kernels, slowly: %s (pip install 'fluxjax[cuda13]')", trouble)
    return not trouble


@functools.cache
def _capable(capability: int) -> bool:
    if capability < LEAST_CAPABILITY:
        _log.warning("GPUs compute without our Triton kernels, slowly: the kernels need NVIDIA GPUs of Ampere or later")
    return capability >= LEAST_CAPABILITY


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The sizes of a kernel's tiles, and how the kernel is compiled."""

    sizes: tuple[int, ...]
    warps: int
    stages: int  # stages of the software pipeline
    precision: str = "tf32x3"  # how a product of float32 numbers is computed; bfloat16 needs no choice


def launch(
    module: str,
    kernel: str,
    arguments: tuple[Array | int, ...],
    outs: Any,
    grid: tuple[int, int, int],
    tiling: Tiling,
    **constants: int | bool | float,
) -> list[Array]:
    """Launches a kernel of a module of `sharding.kernels`. The program names the call `{module}_{kernel}`."""
    jax_triton: Any = importlib.import_module("jax_triton")
    kernels: Any = importlib.import_module(f"{__package__}.kernels.{module}")
    name = f"{module}_{kernel}"
    with jax.named_scope(name):
        results = jax_triton.triton_call(
            *arguments,
            kernel=getattr(kernels, kernel),
            out_shape=tuple(outs),
            grid=grid,
            name=name,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            compute_capability=target().capability,
            PRECISION=tiling.precision,
            **constants,
        )
    return varied(results, arguments)


def varied(results: Iterable[Array], arguments: Iterable[Array | int]) -> list[Array]:
    """The results of a kernel, which vary over every mesh axis over which one of its arguments varies."""
    zero = varying_zero(*(x for x in arguments if isinstance(x, jax.Array)))
    return [x + zero.astype(x.dtype) for x in results]


def varying_zero(*arrays: Array) -> Array:
    """A float32 zero that varies over every mesh axis over which one of `arrays` varies. A loop's initial value must
    vary like its results, and a kernel's results like its inputs; only the arrays know these axes."""
    zero = jnp.zeros((), jnp.float32)
    for array in arrays:
        zero = zero + jnp.where(False, array.reshape(-1)[0], 0).astype(jnp.float32)
    return zero
