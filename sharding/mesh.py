"""The device mesh: one outer axis (replicas or hosts), then axes of size two.

A sequence-parallel group of any power-of-two degree `p` is the product of the last `log2(p)` axes of size two, so that
nested groups need no mesh of their own. FSDP shards over all axes at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
GPU_PLATFORMS = ("gpu", "cuda")
REPLICA = "replica"  # the outer axis: the odd factor of the number of devices


class MeshError(ValueError):
    """The devices can't be arranged as asked. The message says which devices there are, and what was asked for."""


def make_mesh(num_devices: int = 0, *, devices: Sequence[Device] | None = None) -> Mesh:
    """A mesh `(replica, s{k-1}, ..., s1, s0)` over the first `num_devices` of `devices`.

    `num_devices=0` takes all of them; without `devices`, these are all that JAX sees. The outer axis has the odd factor
    of the number of devices (1 for 8, 3 for 6).
    """
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
    """The last `log2(degree)` of a mesh's axes of size two: the axes of a nested group; for degree 1 no axis at all.
    Raises MeshError for a degree that no product of them has."""
    twos = degree.bit_length() - 1
    if degree < 1 or degree != 1 << twos or twos > len(axes):
        raise MeshError(f"no group of {degree} devices on this mesh; a power of two up to {1 << len(axes)}")
    return axes[len(axes) - twos :]


# By default one collective is under way at a time, so that a round's all-to-all back, or a gather of weights, keeps the
# next round's all-to-all from starting. A start is also scheduled as late as its estimated duration allows, and a loop
# over tiles counts for nothing in that: in the backward pass it comes after the attention that should hide it. Both
# were seen in schedules compiled for 8 H100 by jax 0.10.2. All collectives get one queue (`operation_queue_id`), that
# is, they still run in program order.
GPU_OVERLAP: Mapping[str, int | bool] = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
}


def compiler_options(mesh: Mesh) -> dict[str, int | bool]:
    """Options for `jax.jit(..., compiler_options=...)` of programs that contain `spread.ulysses`; empty but on GPUs."""
    return dict(GPU_OVERLAP) if mesh.devices.flat[0].platform in GPU_PLATFORMS else {}
