"""A weight is declared once; its abstract shape, initial value, sharding and gather derive from that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The declaration of one weight: `axes` names each dimension of `shape` with a letter of the legend.

    The spec of a layer's weight leaves out the leading layer axis `L` of the stack: it is what one layer sees.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Initializer = dataclasses.field(compare=False)
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"a weight of shape {self.shape} needs {len(self.shape)} axis names, got {self.axes}")
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"axis names of one weight must differ, got {self.axes}")


def weight(rngs: nnx.Rngs, spec: WeightSpec, stack: int | None = None) -> nnx.Param:
    """Creates the declared weight, `stack` copies of it (drawn independently) along a leading axis if given."""
    if stack is None:
        value = spec.init(rngs.params(), spec.shape, spec.dtype)
    else:
        keys = jax.random.split(rngs.params(), stack)
        value = jax.vmap(lambda key: spec.init(key, spec.shape, spec.dtype))(keys)
    return nnx.Param(value, spec=spec)


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Which logical axis of a weight FSDP cuts: the first of `order` whose size the mesh divides.

    Weights with none (small norms and biases on odd device counts) are replicated.
    """

    order: tuple[str, ...] = ("V", "F", "D", "N", "K", "H", "X")

    def __post_init__(self) -> None:
        repeated = sorted({axis for axis in self.order if self.order.count(axis) > 1})
        if repeated:
            raise ValueError(f"sharding rules name these axes more than once: {', '.join(repeated)}")

    def shard_dim(self, spec: WeightSpec, num_shards: int) -> int | None:
        """The dimension of `spec.shape` to cut into `num_shards`, or None to replicate."""
        for axis in self.order:
            if axis in spec.axes:
                dim = spec.axes.index(axis)
                if spec.shape[dim] % num_shards == 0:
                    return dim
        return None


def shardings(model: nnx.Module, mesh: Mesh, axis_names: tuple[str, ...], rules: ShardingRules) -> dict[str, Any]:
    """NamedShardings with the structure of the model's parameter dict, each weight cut over `axis_names`."""
    num_shards = 1
    for name in axis_names:
        num_shards *= mesh.shape[name]

    def one(variable: nnx.Variable) -> NamedSharding:
        spec: WeightSpec = variable.get_metadata("spec")
        dim = rules.shard_dim(spec, num_shards)
        if dim is None:
            return NamedSharding(mesh, P())
        stacked = len(variable.shape) - len(spec.shape)
        return NamedSharding(mesh, P(*[None] * (dim + stacked), axis_names))

    state = nnx.state(model, nnx.Param)
    return nnx.to_pure_dict(jax.tree.map(one, state, is_leaf=lambda v: isinstance(v, nnx.Variable)))
