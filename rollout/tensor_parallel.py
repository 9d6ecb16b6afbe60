"""Tensor parallelism: lays weights and cache of an embedded engine on the devices that compute together.

Attention is cut by heads, an MLP by its inner width, so that a layer needs one sum after each of the two; embedding and
head are cut by the vocabulary. The compiler divides the programs accordingly (GSPMD); they say nothing about devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from models.config import TextConfig
from models.decoder import Decoder
from sharding.mesh import Device, make_mesh
from sharding.strategy import Params
from sharding.weights import WeightSpec, map_weights

from .engine import EngineError

CUT = frozenset("NKFV")  # heads, KV heads, inner width of an MLP, vocabulary; no weight has two of them


@dataclasses.dataclass(frozen=True)
class EngineLayout:
    """The devices that one engine computes on, and the way its arrays lie there.

    A dimension that the devices do not divide is cut over as many as do, a power of two, and lies on each of the rest
    again (all of it, where that is one): 2 KV heads on 4 devices are on 2 devices each, beside the query heads that
    read them.
    """

    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        count = len(self.devices)
        if not count or count & (count - 1) or len(set(self.devices)) < count:
            raise EngineError(f"an engine computes on 1, 2, 4, ... different devices, not on {list(self.devices)}")

    @staticmethod
    def of(devices: Sequence[Device] | None) -> EngineLayout:
        """`devices` as given; the first of this process for None. Raises EngineError unless they are a power of two,
        all different."""
        return EngineLayout(tuple(jax.local_devices()[:1] if devices is None else devices))

    def weights(self, model: Decoder) -> Params:
        """Shardings in the structure of the model's parameters; the model may be abstract."""

        def sharding(_: tuple, variable: nnx.Variable) -> Sharding:
            spec: WeightSpec = variable.get_metadata("spec")
            for dim, (axis, size) in enumerate(zip(spec.axes, spec.shape, strict=True)):
                if axis in CUT:
                    return self._sharding(dim + len(variable.shape) - len(spec.shape), size)
            return self._sharding(0, 1)

        return map_weights(sharding, model)

    def rows(self, text: TextConfig) -> Sharding:
        """The sharding of keys and values `[L, B, T, K, H]`, those of the cache and of a prefill."""
        return self._sharding(3, text.num_kv_heads)

    def _sharding(self, dim: int, size: int) -> Sharding:
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        mesh = make_mesh(devices=self.devices)
        # Outer axes first: device `i` then has KV head `i * K // devices`, the one that its query heads read.
        axes = mesh.axis_names[1:]
        while size % math.prod(mesh.shape[axis] for axis in axes):
            axes = axes[:-1]
        return NamedSharding(mesh, P(*[None] * dim, axes) if axes else P())
