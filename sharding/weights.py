"""A weight is declared once; its abstract shape, initial value, sharding and gather derive from the declaration.

Low-rank adapters (LoRA, arXiv:2106.09685) are weights, too: beside `q` (`[in..., out...]`, frozen) are `q_lora_a`
(`[in..., R]`) and `q_lora_b` (`[R, out...]`), which are trained. A walk adds their product to `q` when it uses a layer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

# Makes initial values of a shape on the host, with a generator of random numbers
Initializer = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
A, B = "_lora_a", "_lora_b"  # suffixes of the names of a weight's two adapters
CUT = ("V", "F", "D", "N", "K", "H", "X")  # logical axes, in the order in which `cut_of` tries them


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The declaration of one weight: `axes` names each dimension of `shape` with a letter of the legend. The spec of a
    layer's weight leaves out the stack's leading layer axis `L`."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Initializer = dataclasses.field(compare=False)
    dtype: DTypeLike = jnp.float32
    inputs: int = 0  # number of dimensions that `models.layers.project` sums over; 0: not for `project`
    outputs_first: bool = False  # the dimensions that `project` sums over are the last ones, as in an engine
    frozen: bool = False  # not trained
    lora: float = 0.0  # factor on the product of its adapters; 0: no adapters

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"a weight of shape {self.shape} needs {len(self.shape)} axis names, got {self.axes}")
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"axis names of one weight must differ, got {self.axes}")

    def turned(self) -> "WeightSpec":
        """The same matrix with its outputs first."""
        order = [*range(self.inputs, len(self.axes)), *range(self.inputs)]
        shape, axes = tuple(self.shape[i] for i in order), tuple(self.axes[i] for i in order)
        return dataclasses.replace(self, shape=shape, axes=axes, outputs_first=True)


def zeros(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)


Weight: TypeAlias = tuple[WeightSpec, jax.Array]
Path: TypeAlias = tuple[Any, ...]


def weight(spec: WeightSpec, stack: int | None = None) -> nnx.Param:
    """The declared weight, as a shape; with `stack`, `stack` weights along a leading axis."""
    shape = spec.shape if stack is None else (stack, *spec.shape)
    return nnx.Param(jax.ShapeDtypeStruct(shape, spec.dtype), spec=spec)


class Cut(NamedTuple):
    """The cut of one weight: dimension `dim` (layers do not count) is cut over the mesh axes `axes`, in their order."""

    dim: int
    axes: tuple[str, ...]


def cut_of(spec: WeightSpec, mesh: Mesh) -> Cut | None:
    """The cut of this weight under FSDP, or None to replicate it. The cut goes through the first logical axis of `CUT`
    whose size is a multiple of the number of devices. If none fits, the weight is cut over the largest suffix of the
    mesh axes that fits, and replicated over the other mesh axes: over all, if no suffix fits, as with 3 devices."""
    names = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1)
    for first in range(len(names)):
        axes = names[first:]
        num_shards = math.prod(mesh.shape[name] for name in axes)
        for axis in CUT:
            if axis in spec.axes and spec.shape[spec.axes.index(axis)] % num_shards == 0:
                return Cut(spec.axes.index(axis), axes)
    return None


def specs(model: nnx.Module) -> dict[str, Any]:
    """The declarations of the model's weights, in the structure of its parameter dict."""
    return map_weights(lambda _, variable: variable.get_metadata("spec"), model)


def shardings(model: nnx.Module, mesh: Mesh) -> dict[str, Any]:
    """NamedShardings in the structure of the model's parameter dict; the model may be abstract."""

    def sharding(_: tuple, variable: nnx.Variable) -> NamedSharding:
        spec: WeightSpec = variable.get_metadata("spec")
        cut = cut_of(spec, mesh)
        if cut is None:
            return NamedSharding(mesh, P())
        stacked = len(variable.shape) - len(spec.shape)
        return NamedSharding(mesh, P(*[None] * (cut.dim + stacked), cut.axes))

    return map_weights(sharding, model)


def with_shardings(tree: PyTree, shardings: PyTree) -> PyTree:
    """The shapes and dtypes of `tree` with these shardings, as abstract arrays."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def like(arrays: PyTree) -> PyTree:
    """Abstract arrays with the shapes, dtypes and shardings of `arrays`, which may be abstract, too."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


def by_path(params: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """The leaves of a nested parameter dict, by their paths of keys."""
    return dict(flatten_dict(dict(params)))


def map_weights(function: Callable[[tuple, nnx.Variable], object], model: nnx.Module) -> dict[str, Any]:
    """The results of `function(path, weight)` for each weight, in the structure of the model's parameter dict."""
    state = nnx.state(model, nnx.Param)
    return nnx.to_pure_dict(jax.tree.map_with_path(function, state, is_leaf=lambda v: isinstance(v, nnx.Variable)))


def place(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts a weight from the host onto its devices; each device gets only its shard. All processes need `value`."""
    if sharding.is_fully_addressable:
        array = jax.block_until_ready(jax.device_put(value, sharding, may_alias=False))
        _dispatch(np.float32(0))  # a call usually makes the runtime free host values whose transfer is done
        return array
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


_dispatch = jax.jit(lambda nothing: nothing)


def place_stack(layers: Iterable[np.ndarray], depth: int, sharding: Sharding) -> jax.Array:
    """The stack `[L, ...]` of `depth` layers of one weight, assembled on its devices, one layer at a time."""
    stack, of_a_layer = None, sharding
    if isinstance(sharding, NamedSharding):  # stacks are never cut along their layers
        of_a_layer = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    for number, value in zip(range(depth), layers, strict=False):  # `layers` may have more than `depth`
        if stack is None:
            stack = jnp.zeros((depth, *value.shape), value.dtype, device=sharding)
        # Waits for each layer, or values in transfer would pile up on the host. No variable holds the layer's array.
        stack = jax.block_until_ready(_with_layer(stack, place(value, of_a_layer), number))
    assert stack is not None, "a stack has layers"
    return stack


@functools.partial(jax.jit, donate_argnums=0)
def _with_layer(stack: jax.Array, layer: jax.Array, number: jax.Array | int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, number, 0)


def on_first_device(model: nnx.Module) -> dict[str, Any]:
    """For each weight, a sharding on JAX's default device, or this process's first device if none is set."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  (a device or a platform's name)
    device = default if isinstance(default, jax.Device) else jax.local_devices(backend=default or None)[0]
    return map_weights(lambda *_: SingleDeviceSharding(device), model)


def beside(path: Path) -> tuple[Path, Path]:
    """The paths of the two adapters of a weight."""
    *parents, name = path
    return (*parents, f"{name}{A}"), (*parents, f"{name}{B}")


def is_adapter(path: Path) -> bool:
    return str(path[-1]).endswith((A, B))


def attach(model: nnx.Module, paths: Iterable[Path], rank: int, factor: float, init_a: Initializer) -> None:
    """Freezes all weights of an abstract model, and adds adapters to those at `paths`: `a` by `init_a`, `b` zero."""
    adapted_paths = set(paths)
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        path = tuple(map(str, keys))
        parent: Any = model
        for name in path[:-1]:
            parent = getattr(parent, name)
        spec: WeightSpec = variable.get_metadata("spec")
        frozen = dataclasses.replace(spec, frozen=True, lora=factor if path in adapted_paths else 0.0)
        setattr(parent, path[-1], nnx.Param(variable.get_raw_value(), spec=frozen))
        if not frozen.lora:
            continue
        inputs, outputs = slice(None, spec.inputs), slice(spec.inputs, None)
        declared = (
            WeightSpec((*spec.shape[inputs], rank), (*spec.axes[inputs], "R"), init_a, inputs=spec.inputs),
            WeightSpec((rank, *spec.shape[outputs]), ("R", *spec.axes[outputs]), zeros, inputs=1),
        )
        stack = variable.shape[0] if len(variable.shape) > len(spec.shape) else None
        for name, adapter in zip(beside(path), declared, strict=True):
            setattr(parent, name[-1], weight(adapter, stack))


def with_product(spec: WeightSpec, weight: Array, a: Array, b: Array) -> Array:
    """`weight + factor * a @ b` of one layer, or of matching shards, computed in float32, in the dtype of `weight`."""
    rank = a.shape[-1]
    flat = a.reshape(-1, rank), b.reshape(rank, math.prod(b.shape[1:]))
    product = jnp.matmul(*flat, precision=jax.lax.Precision.HIGHEST).reshape(weight.shape)
    return (weight.astype(jnp.float32) + spec.lora * product.astype(jnp.float32)).astype(weight.dtype)


def without_adapters(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, or a tree of their structure, without the adapters."""
    return unflatten_dict({path: leaf for path, leaf in by_path(tree).items() if not is_adapter(path)})


def adapted(tree: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of `tree`, a tree like the parameters, that have adapters."""
    declared, leaves = by_path(specs), by_path(tree)
    return unflatten_dict({path: leaf for path, leaf in leaves.items() if path in declared and declared[path].lora})


def with_adapters(weights: Mapping[str, Any], adapters: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that `adapted` returns, each with the product of its adapters added."""
    declared, found = by_path(specs), by_path(adapters)

    def merged(path: Path, value: Array) -> Array:
        spec: WeightSpec = declared[path]
        add = functools.partial(with_product, spec)
        for _ in range(value.ndim - len(spec.shape)):
            add = jax.vmap(add)
        return add(value, *(found[name] for name in beside(path)))

    return unflatten_dict({path: merged(path, value) for path, value in by_path(weights).items()})
