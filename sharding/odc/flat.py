"""Parameters as a parameter server holds them: each device has a flat row for each unit, or for each layer of a unit.

A unit is some weights of a stack of layers, fetched layer by layer, or weights outside all stacks, fetched at once. A
row holds FSDP's slices of these weights, one after another. A fetch is therefore one transfer from each owner, and a
push one transfer to each owner.

A weight that FSDP can't cut over all devices has copies. Each device with a copy owns a part of the weight, padded to
equal lengths, so that every element has one owner. With hybrid sharding (ODC paper, section 6.1), the devices of a
group (a host) together hold the rows of all devices. Publishing gathers the rows over the groups. At the end of the
minibatch, gradient rows are summed and scattered over the groups.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..mesh import group_axes
from ..walk import Fsdp, Params
from ..weights import WeightSpec, cut_of


@dataclasses.dataclass(frozen=True)
class RowPiece:
    """A weight in a unit, cut along `dim` into `shards` (1: not cut), each of which is on `copies` devices."""

    leaf: int
    shape: tuple[int, ...]
    dim: int
    shards: int
    copies: int

    @property
    def size(self) -> int:
        """The number of elements that a device owns."""
        return -(-math.prod(self.shape) // self.shards // self.copies)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return tuple(n // self.shards if d == self.dim else n for d, n in enumerate(self.shape))


@dataclasses.dataclass(frozen=True)
class Unit:
    """Weights that lie one after another in a row: one row for each layer, or one outside all stacks (0 layers)."""

    pieces: tuple[RowPiece, ...]
    layers: int

    @property
    def sizes(self) -> list[int]:
        return [piece.size for piece in self.pieces]

    @property
    def size(self) -> int:
        """The number of elements of a row."""
        return sum(self.sizes)


class ParameterRows:
    """Turns a strategy's parameters into rows, in the compute dtype, and gradient rows into gradients. `group`
    neighbouring devices (0: all), a group of the mesh (else MeshError), together hold one copy of all rows."""

    def __init__(self, strategy: Fsdp, group: int = 0) -> None:
        mesh = strategy.mesh
        self.mesh, self.group = mesh, group or mesh.size
        self._dtype = strategy.compute_dtype
        self._axes = mesh.axis_names
        inner = self._axes if self.group == mesh.size else group_axes(self._axes[1:], self.group)
        self._outer = tuple(axis for axis in self._axes if axis not in inner)
        self.outer = mesh.size // self.group
        leaves, self._tree = jax.tree.flatten(strategy.abstract)
        self._shapes = [leaf.shape for leaf in leaves]
        self._dtypes = [leaf.dtype for leaf in leaves]
        declared = jax.tree.leaves(strategy.specs, is_leaf=lambda leaf: isinstance(leaf, WeightSpec))
        self._cuts = [cut_of(spec, mesh) for spec in declared]
        self.units = tuple(self._unit(members, declared) for members in _modules(declared, strategy.abstract))
        lying = strategy.param_specs()
        rows = [[P(self._axes)] * max(unit.layers, 1) for unit in self.units]
        across = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)  # copies of a weight have different rows
        # Parameters -> `[unit][layer]` arrays `[devices * outer * size]`, with one row on each device.
        self.publish = jax.jit(across(self._local_rows, in_specs=(lying,), out_specs=rows))
        # Gradient rows of the same shapes -> gradients laid out like the parameters.
        self.collect = jax.jit(across(self._local_gradients, in_specs=(rows,), out_specs=lying))
        self.sharding = NamedSharding(mesh, P(self._axes))

    def members(self, device: int) -> range:
        """Returns the numbers of the devices that own the rows for `device`."""
        first = device // self.group * self.group
        return range(first, first + self.group)

    def whole(
        self, units: Sequence[int], rows: Sequence[Sequence[jax.Array]], leaves: Sequence[int]
    ) -> list[jax.Array]:
        """Makes the complete weights `leaves` (of one layer) from the rows of `units` of all devices of a group."""
        found: dict[int, jax.Array] = {}
        for unit, unit_rows in zip((self.units[number] for number in units), rows, strict=True):
            # [group, outer, size] -> [devices, size], where device `n` is member `n % group` of group `n // group`
            table = jnp.stack(unit_rows).reshape(self.group, self.outer, -1).swapaxes(0, 1).reshape(-1, unit.size)
            # The gradient of a split joins the parts. The gradient of many slices would sum as many padded rows.
            for piece, part in zip(unit.pieces, jax.lax.split(table, unit.sizes, axis=1), strict=True):
                shards = part.reshape(piece.copies, piece.shards, -1).swapaxes(0, 1).reshape(piece.shards, -1)
                shards = shards[:, : math.prod(piece.shard_shape)].reshape(piece.shards, *piece.shard_shape)
                found[piece.leaf] = jnp.moveaxis(shards, 0, piece.dim).reshape(piece.shape)
        return [found[leaf] for leaf in leaves]

    def _unit(self, members: Sequence[int], declared: Sequence[WeightSpec]) -> Unit:
        pieces: list[RowPiece] = []
        first = members[0]
        layers = self._shapes[first][0] if len(self._shapes[first]) > len(declared[first].shape) else 0
        for i in members:
            cut, shape = self._cuts[i], declared[i].shape
            shards = math.prod(self.mesh.shape[axis] for axis in cut.axes) if cut else 1
            pieces.append(RowPiece(i, shape, cut.dim if cut else 0, shards, self.mesh.size // shards))
        return Unit(tuple(pieces), layers)

    def _local_rows(self, params: Params) -> list[list[jax.Array]]:
        leaves = jax.tree.leaves(params)
        rows = []
        for unit in self.units:
            layers: list[jax.Array] = []
            for layer in range(max(unit.layers, 1)):
                parts = [self._part(p, leaves[p.leaf][layer] if unit.layers else leaves[p.leaf]) for p in unit.pieces]
                row = jnp.concatenate(parts)
                if self._outer:
                    row = jax.lax.all_gather(row, self._outer, tiled=True)
                layers.append(row)
            rows.append(layers)
        return rows

    def _part(self, piece: RowPiece, shard: jax.Array) -> jax.Array:
        flat = shard.reshape(-1).astype(self._dtype)
        if piece.copies == 1:
            return flat
        flat = jnp.pad(flat, (0, piece.copies * piece.size - flat.shape[0]))
        copy = jax.lax.axis_index(self._axes) // piece.shards
        return jax.lax.dynamic_slice_in_dim(flat, copy * piece.size, piece.size)

    def _local_gradients(self, rows: list[list[jax.Array]]) -> Params:
        leaves: dict[int, jax.Array] = {}
        for unit, layers in zip(self.units, rows, strict=True):
            if self._outer:
                layers = [jax.lax.psum_scatter(row, self._outer, tiled=True) for row in layers]
            parts_by_layer = [jax.lax.split(row, unit.sizes) for row in layers]
            for piece, parts in zip(unit.pieces, zip(*parts_by_layer, strict=True), strict=True):
                gradients = [self._gradient(piece, part) for part in parts]
                leaf = jnp.stack(gradients) if unit.layers else gradients[0]
                leaves[piece.leaf] = leaf.astype(self._dtypes[piece.leaf])
        return jax.tree.unflatten(self._tree, [leaves[leaf] for leaf in range(len(leaves))])

    def _gradient(self, piece: RowPiece, part: jax.Array) -> jax.Array:
        if piece.copies > 1:
            # The holders of a shard differ only in the mesh axes along which the weight is not cut.
            cut = self._cuts[piece.leaf]
            holders = tuple(axis for axis in self._axes if cut is None or axis not in cut.axes)
            part = jax.lax.all_gather(part, holders, tiled=True)[: math.prod(piece.shard_shape)]
        return part.reshape(piece.shard_shape)


def _modules(declared: Sequence[WeightSpec], params: Params) -> list[list[int]]:
    """Groups the leaves that are fetched together: those of a largest module whose weights are all stacked or all
    unstacked. A text decoder has four of these modules: embedding, layers, last norm, head."""
    leaves, tree = jax.tree.flatten(params)
    stacked = [len(leaf.shape) - len(spec.shape) for leaf, spec in zip(leaves, declared, strict=True)]
    found: list[list[int]] = []

    def walk(part: PyTree, top: bool) -> None:
        members = jax.tree.leaves(part)
        if not isinstance(part, dict) or (not top and len({stacked[i] for i in members}) == 1):
            found.append(members)
        else:
            for name in sorted(part):
                walk(part[name], False)

    walk(jax.tree.unflatten(tree, range(len(leaves))), True)
    return found
