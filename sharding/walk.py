"""The walk over a model's layers, which every strategy shares, and the types of losses and results.

A strategy decides where weights come from and what the backward pass keeps while a stack of layers is walked
(`docs/parallelism.md`, "Kernels and walks").

Under fully sharded data parallelism (`Fsdp`), every device holds a slice of every weight and computes its own rows. A
layer's weights are gathered when the walk reaches the layer, and dropped after it. The transpose of the gather scatters
and sums the layer's gradients, so that no device holds the complete gradients of all layers. Forward and backward pass
are one fully manual `shard_map`, since automatic partitioning left gradients replicated, without a reduce-scatter.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from .weights import (
    Weight,
    WeightSpec,
    beside,
    by_path,
    cut_of,
    is_adapter,
    shardings,
    specs,
    with_product,
    with_shardings,
)

T = TypeVar("T")
Gather = Callable[[WeightSpec, jax.Array], jax.Array]
Merge = Callable[[Weight, Weight, Weight], jax.Array]
Module = TypeVar("Module", bound=nnx.Module)
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")
Batch = TypeVar("Batch")  # a pytree of arrays


def _all_but(*primitives: str) -> Callable[..., bool]:
    """A rematerialisation policy: the backward pass keeps all values except the results of these primitives."""
    return lambda primitive, *_, **__: not primitive.name.startswith(primitives)


_ALL_BUT_GATHERED = _all_but("all_gather")
# For layers of a period. Kept slices would copy the weights of the stacks.
_ALL_BUT_WEIGHTS = _all_but("all_gather", "slice", "squeeze")
HOST_MEMORY = "pinned_host"  # JAX's name; GPUs read and write this memory by themselves
_LAYER_INPUT = "layer input"
REMAT: dict[str, Callable[..., Any] | None] = {  # the values of a layer, beside its input, that are kept for backward
    "none": _ALL_BUT_GATHERED,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with weights; attention runs again
    "layer": None,  # no values
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(  # no values; the input goes to the host
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_LAYER_INPUT],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    ),
}


def _entry(tree: PyTree, index: int | None) -> PyTree:
    return tree if index is None else jax.tree.map(lambda x: jax.lax.index_in_dim(x, index, keepdims=False), tree)


@dataclasses.dataclass(frozen=True)
class Stack:
    """The layers of a model, of one or several kinds: `order` has the kind of each layer. The layers of a kind are one
    module, whose weights have a leading layer axis. A kind is named like the model's attribute that has its layers."""

    modules: Mapping[str, nnx.Module]
    order: tuple[str, ...]

    @staticmethod
    def of(layers: nnx.Module) -> "Stack":
        """The stack of one kind of layers."""
        return Stack({"layers": layers}, ("layers",) * jax.tree.leaves(nnx.state(layers))[0].shape[0])

    @property
    def period(self) -> tuple[str, ...]:
        """The shortest beginning of `order` whose repetition gives `order`: a single layer if there is one kind."""
        layers = len(self.order)
        repeats = (n for n in range(1, layers) if layers % n == 0 and self.order[:n] * (layers // n) == self.order)
        return self.order[: next(repeats, layers)]

    def in_order(self, layers: Mapping[str, Iterable[T]]) -> list[T]:
        """The items of all layers in order, from the items of each kind."""
        items = {kind: iter(of_kind) for kind, of_kind in layers.items()}
        return [next(items[kind]) for kind in self.order]


@dataclasses.dataclass(frozen=True)
class Walk:
    """The single-device walk, and the base of all other walks.

    `gather(spec, local)` turns the local shard of an (unstacked) weight into the complete weight, in the compute dtype.
    `remat` says which values of a layer the backward pass computes again (`REMAT`); with `none`, it only gathers
    weights again. `merge(weight, a, b)` returns a complete weight plus the product of its adapters.
    """

    gather: Gather | None = None
    merge: Merge | None = None
    remat: str = "none"
    # With remat `none`, a loop over at most `unroll` layers is written out, so that kept values need no copy into
    # stacks.
    unroll: int = 8

    def use(self, module: Module) -> Module:
        """The module with its complete weights. Call it just before weights are read, so that they live briefly."""
        if self.gather is None:
            return module
        graphdef, state = nnx.split(module)
        weights = dict(nnx.to_flat_state(state))

        def declared(path: tuple) -> Weight:
            return weights[path].get_metadata("spec"), weights[path][...]

        whole: dict[tuple, nnx.Variable] = {}
        for path, variable in weights.items():
            spec, local = declared(path)
            if is_adapter(path):  # only `merge` reads adapters
                whole[path] = variable
            elif spec.lora and self.merge is not None:
                whole[path] = variable.replace(self.merge((spec, local), *map(declared, beside(path))))
            else:
                whole[path] = variable.replace(self.gather(spec, local))
        return nnx.merge(graphdef, nnx.from_flat_state(whole))

    def scan(
        self, stack: Stack, carry: Carry, step: Callable[[Any, Carry, X], tuple[Carry, Y]], xs: PyTree = None
    ) -> tuple[Carry, PyTree]:
        """Runs `carry, y = step(layer, carry, x)` over the stack; returns the last carry and the stacked `y`. `xs` is
        None or a pytree with a leading axis of all layers. For several kinds of layers, the loop goes over periods,
        each of whose layers gathers its weights and is computed again by itself."""
        period, layers = stack.period, len(stack.order)
        written_out = layers <= self.unroll and self.remat == "none"
        if len(period) == 1:
            layer = self._layer(stack.modules[period[0]], step, written_out)
            return jax.lax.scan(layer, carry, (nnx.state(stack.modules[period[0]]), xs), unroll=written_out)
        repeats = layers // len(period)

        def periods(tree: PyTree, count: int) -> PyTree:
            """Reshapes the leading axis of arrays to (periods, layers of a period), if `count` is more than 1."""
            return tree if count == 1 else jax.tree.map(lambda x: x.reshape(repeats, count, *x.shape[1:]), tree)

        def body(carry: Carry, inputs: tuple[dict[str, nnx.State], PyTree]) -> tuple[Carry, PyTree]:
            states, xs = inputs
            ys = []
            for place, kind in enumerate(period):
                entry = period[:place].count(kind) if period.count(kind) > 1 else None
                layer = self._layer(stack.modules[kind], step, written_out, (entry, place))
                carry, y = layer(carry, (states[kind], xs))
                ys.append(y)
            return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)

        states = {kind: periods(nnx.state(stack.modules[kind]), period.count(kind)) for kind in set(period)}
        carry, ys = jax.lax.scan(body, carry, (states, periods(xs, len(period))), unroll=written_out)
        return carry, jax.tree.map(lambda y: y.reshape(layers, *y.shape[2:]), ys)

    def _layer(
        self, module: nnx.Module, step: Callable, written_out: bool, entries: tuple[int | None, int] | None = None
    ) -> Callable[[Carry, tuple[nnx.State, PyTree]], tuple[Carry, PyTree]]:
        """The body of a loop over layers, in a period on the `entries` of weights and `x` of several layers."""
        graphdef = nnx.graphdef(module)

        def body(carry: Carry, inputs: tuple[nnx.State, PyTree]) -> tuple[Carry, PyTree]:
            state, x = inputs if entries is None else map(_entry, inputs, entries)
            if self.remat == "offload":
                carry = jax.tree.map(lambda array: checkpoint_name(array, _LAYER_INPUT), carry)
            return step(self.use(nnx.merge(graphdef, state)), carry, x)

        if self.remat == "none" and self.gather is None and entries is None:
            return body
        policy = _ALL_BUT_WEIGHTS if self.remat == "none" and entries is not None else REMAT[self.remat]
        # XLA must not replace recomputed values by those of the forward pass; in a loop XLA can't. In a period XLA
        # would compute all layers again at once, before the backward pass of the period's last layer.
        return jax.checkpoint(body, prevent_cse=written_out or entries is not None, policy=policy)

    def loop(
        self,
        layers: Iterable[Module],
        carry: Carry,
        step: Callable[[Module, Carry, X], tuple[Carry, Y]],
        xs: Iterable[X],
    ) -> tuple[Carry, list[Y]]:
        """As `scan`, over layers that are separate modules: returns the last carry and the list of `y`. The loop is
        written out: a copy out of a stack would cost a decoding engine time at every token."""
        ys = []
        for layer, x in zip(layers, xs, strict=True):
            carry, y = step(self.use(layer), carry, x)
            ys.append(y)
        return carry, ys


Params: TypeAlias = dict[str, Any]  # nested, one leaf for each weight; stacked layers have a leading axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """The quantities that a microbatch contributes to a step, by name. Every entry is a float32 scalar."""

    sums: dict[str, Any]  # added up over rows, devices and microbatches; an entry may be the sharding of the scalar
    maxima: dict[str, Any]  # the largest over rows, devices and microbatches

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: jnp.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )


# Forwards and losses run on one device's share of the rows; the walk supplies the model's weights.
Forward: TypeAlias = Callable[[nnx.Module, PyTree, Walk], PyTree]  # (model, inputs, walk) -> arrays with rows first
Loss: TypeAlias = Callable[[nnx.Module, PyTree, Walk], tuple[Array, Tally]]  # (model, batch, walk) -> sum over rows


class Fsdp:
    """FSDP of one model over all axes of `mesh`; any number of devices.

    `model` may be abstract: only its declarations are read. `forward` and `loss` compute on a device's share.
    `row_dims(batch)` says which dimension of each array of a batch counts rows (or vision patches): a pytree like the
    batch, or a prefix of it. Weights are stored in their declared dtype and cast to `compute_dtype` before a gather,
    which halves the traffic for bfloat16. Weights whose declaration says `frozen` have no gradients.

    A batch has the same loss and gradients on every mesh, to float tolerance, so that a run may change planners between
    steps. `copies`, `loss_and_grad` and `logprobs` are pure and meant to be traced: the caller compiles them.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: nnx.Module,
        *,
        forward: Forward,
        loss: Loss,
        row_dims: Callable[[PyTree], PyTree],
        compute_dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        unroll: int = Walk.unroll,
    ) -> None:
        self.mesh = mesh
        self.shardings = shardings(model, mesh)
        self.specs = specs(model)
        self.abstract: Params = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        self.graphdef = nnx.graphdef(model)
        self.forward, self.loss = forward, loss
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat = remat
        self._row_dims = row_dims
        self._axes = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1)
        declared: dict[tuple[str, ...], WeightSpec] = by_path(self.specs)
        self._frozen = {path for path, spec in declared.items() if spec.frozen}
        adapted = any(spec.lora for spec in declared.values())
        weights_as_they_are = not self._axes and self.compute_dtype == jnp.float32 and not adapted
        self._walk = Walk(
            gather=None if weights_as_they_are else self._gather,
            merge=self._merge if adapted else None,
            remat=remat,
            unroll=unroll,
        )

    def shard(self, params: Params) -> Params:
        """The parameters, laid on the mesh; parameters that already lie there are not copied."""
        return _put(params, self.shardings)

    def trained(self, tree: Params) -> Params:
        """The trained weights of parameters, or their leaves in a tree of the same structure."""
        if not self._frozen:
            return tree
        return unflatten_dict({path: leaf for path, leaf in by_path(tree).items() if path not in self._frozen})

    def frozen(self, params: Params) -> Params:
        """The parameters whose declarations say `frozen`."""
        return unflatten_dict({path: leaf for path, leaf in by_path(params).items() if path in self._frozen})

    def with_trained(self, params: Params, trained: Params) -> Params:
        """The parameters, with `trained` replacing the weights that are trained."""
        return unflatten_dict(by_path(params) | by_path(trained)) if self._frozen else trained

    def shard_trained(self, tree: Params) -> Params:
        """The trained weights, or their gradients, laid on the mesh."""
        return _put(tree, self.trained(self.shardings))

    def place(self, batch: Batch) -> Batch:
        """The host arrays of a batch (or of its inputs), laid on the mesh. Each process gives the rows of its own
        devices, in the order of the mesh. Raises ValueError if these devices can't divide the rows evenly."""
        jax.tree.map(self._check, self._row_dims(batch), batch)
        placed = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self._row_specs(batch))
        return _put(batch, placed, local=True)

    @property
    def copied(self) -> frozenset[tuple[str, ...]]:
        """The paths of the weights that `copies` casts: none if `compute_dtype` is float32 or if weights have adapters,
        else all weights of which each device has its own slice. The other weights' gradients are summed in float32."""
        if self.compute_dtype == jnp.float32 or self._walk.merge is not None:
            return frozenset()
        cuts = {path: cut_of(spec, self.mesh) for path, spec in by_path(self.specs).items()}
        return frozenset(path for path, cut in cuts.items() if self._axes == (cut.axes if cut else ()))

    def copies(self, params: Params) -> Params:
        """The parameters with the `copied` weights (and so their gradients) in `compute_dtype`, cast once for all
        microbatches of a step. Without copies, `loss_and_grad` casts weights twice for each microbatch."""
        weights = by_path(params)
        return unflatten_dict(weights | {path: self._cast(weights[path]) for path in self.copied})

    def loss_and_grad(self, params: Params, batch: PyTree) -> tuple[jax.Array, Tally, Params]:
        """Returns (loss, tally, gradients): sums over all devices, and gradients like the trained weights of `params`,
        in their dtypes and shardings. `params` may be `copies`."""

        def local(params: Params, batch: PyTree) -> tuple[jax.Array, Tally, Params]:
            def objective(trained: Params) -> tuple[jax.Array, Tally]:
                model = nnx.merge(self.graphdef, self.with_trained(params, trained))
                return self.loss(model, batch, self._walk)

            (loss, tally), grads = jax.value_and_grad(objective, has_aux=True)(self.trained(params))
            sums, maxima = self._reduce(jax.lax.psum, tally.sums), self._reduce(jax.lax.pmax, tally.maxima)
            return self._reduce(jax.lax.psum, loss), Tally(sums, maxima), grads

        specs = self.param_specs()
        results = P(), P(), self.trained(specs)
        return self._on_mesh(local, (specs, self._row_specs(batch)), results)(params, batch)

    def logprobs(self, params: Params, inputs: PyTree) -> PyTree:
        """The results of `forward`, rows spread over the devices."""

        def local(params: Params, inputs: PyTree) -> PyTree:
            return self.forward(nnx.merge(self.graphdef, params), inputs, self._walk)

        return self._on_mesh(local, (self.param_specs(), self._row_specs(inputs)), self._rows(0))(params, inputs)

    def _on_mesh(self, local: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
        # `check_vma` raises an error here if an output that is declared equal on all devices is not.
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    def _gather(self, spec: WeightSpec, local: jax.Array) -> jax.Array:
        return self._whole(spec, self._cast(self._varying(spec, local)))

    def _varying(self, spec: WeightSpec, local: jax.Array) -> jax.Array:
        cut = cut_of(spec, self.mesh)
        replicated_over = tuple(axis for axis in self._axes if cut is None or axis not in cut.axes)
        # The transpose of `pcast` sums the gradient over these axes: after the scatter, on the slice.
        return jax.lax.pcast(local, replicated_over, to="varying") if replicated_over else local

    def _cast(self, local: jax.Array) -> jax.Array:
        return local.astype(self.compute_dtype) if jnp.issubdtype(local.dtype, jnp.floating) else local

    def _whole(self, spec: WeightSpec, local: jax.Array) -> jax.Array:
        cut = cut_of(spec, self.mesh)
        return local if cut is None else jax.lax.all_gather(local, cut.axes, axis=cut.dim, tiled=True)

    def _merge(self, weight: Weight, adapter_a: Weight, adapter_b: Weight) -> jax.Array:
        """The complete weight, with the product of its adapters added to the shards before cast and gather. An adapter
        that has the axis along which the weight is cut is cut in the same way (`cut_of`); others are gathered."""
        (spec, local), (spec_a, a), (spec_b, b) = weight, adapter_a, adapter_b
        cut = cut_of(spec, self.mesh)
        a, b = self._varying(spec_a, a), self._varying(spec_b, b)
        if cut is None or cut.dim >= spec.inputs:
            a = self._whole(spec_a, a)
        if cut is None or cut.dim < spec.inputs:
            b = self._whole(spec_b, b)
        return self._whole(spec, self._cast(with_product(spec, self._varying(spec, local), a, b)))

    def _reduce(self, reduction: Callable, tree: PyTree) -> PyTree:
        return reduction(tree, self._axes) if self._axes else tree

    def param_specs(self) -> PyTree:
        """The partition specs of the parameters on the mesh, in their structure."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings)

    def _row_specs(self, batch: PyTree) -> PyTree:
        return jax.tree.map(self._rows, self._row_dims(batch))

    def _rows(self, dim: int) -> P:
        return P(*[None] * dim, self._axes) if self._axes else P()

    def _check(self, dim: int, arrays: PyTree) -> None:
        devices = self.mesh.size if is_abstract(arrays) else self.mesh.local_mesh.size
        for array in jax.tree.leaves(arrays):
            if array.shape[dim] % devices:
                raise ValueError(
                    f"an array of shape {array.shape} can't be divided over {devices} devices along "
                    f"dimension {dim}; compose batches for {devices} shards"
                )


def _put(tree: Batch, shardings: PyTree, local: bool = False) -> Batch:
    """Puts host arrays onto the mesh. With `local`, the arrays are the rows of this process; otherwise all processes
    have the same arrays, and each takes its part. Abstract arrays get their sharding, and nothing is allocated."""
    if is_abstract(tree):
        return with_shardings(tree, shardings)
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(array: Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return jax.device_put(array, sharding)  # already on the mesh
        held = np.asarray(array)
        if local:
            return jax.make_array_from_process_local_data(sharding, held)
        return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])

    return jax.tree.map(put, tree, shardings)


def is_abstract(tree: PyTree) -> bool:
    return isinstance(next(iter(jax.tree.leaves(tree)), None), jax.ShapeDtypeStruct)


def own_rows(array: jax.Array) -> np.ndarray:
    """The rows of `array`, which is cut by rows over the mesh, that lie on this process's devices."""
    if array.is_fully_addressable:
        return np.asarray(array)
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])
