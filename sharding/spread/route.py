"""Routes features of the vision tower from the devices that computed them to the devices that hold their tokens.

The tower's work is spread evenly, wherever the tokens are, so that features must move. They move as on a hypercube: in
at most one exchange across each mesh axis of size two, every device sends its partner across the axis the features
whose destination is on the partner's side. All devices run the same program, also devices without features.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..mesh import binary_axes, replica_size
from .shapes import Sizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangeRoute:
    """The plan of all exchanges: `sends[k][device]` are the rows of the device's buffer that cross axis `axes[k]` in
    exchange `k` (row 0 in unused entries). Received rows are appended to the buffer, behind the device's features."""

    sends: tuple[Any, ...]  # i32 [devices, count] each
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __call__(self, features_MX: Float[Array, "M X"]) -> Float[Array, "R X"]:
        """The device's own features, followed by all features that it received. Runs inside a `shard_map`."""
        buffer = features_MX
        for axis, rows in zip(self.axes, self.sends, strict=True):
            moving = buffer[jnp.asarray(rows)[0]]
            buffer = jnp.concatenate([buffer, jax.lax.ppermute(moving, axis, [(0, 1), (1, 0)])])
        return buffer


def crossings(wanted_DD: np.ndarray) -> Sizes:
    """The most features that one device sends across each axis, as `send/<axis>`, if device `i` has `wanted_DD[i, j]`
    features for device `j`. A feature that several devices need is counted several times."""
    num_devices = len(wanted_DD)
    block, device = replica_size(num_devices), np.arange(num_devices)
    at_DD, needs = wanted_DD.astype(np.int64), {}
    for k, axis in enumerate(binary_axes(num_devices)):
        bit = block >> (k + 1)
        moving = np.where((device[:, None] ^ device[None, :]) & bit, at_DD, 0)
        if count := int(moving.sum(axis=1).max()):
            needs[f"send/{axis}"] = count
        at_DD = at_DD - moving + moving[device ^ bit]
    return needs


def route(
    source: np.ndarray, row: np.ndarray, target: np.ndarray, num_devices: int, rows: int, counts: Mapping[str, int]
) -> tuple[ExchangeRoute, np.ndarray]:
    """Returns (the route, the row of each requested feature in the final buffer of its `target`). Requested feature `i`
    is row `row[i]` of the `rows` features of device `source[i]`, for device `target[i]`; a feature may be requested
    several times. `counts` are the sizes of each axis's transfer: those of `crossings`, or larger. Raises ValueError if
    a feature would have to leave its replica; sequence groups stay within a replica."""
    axes = binary_axes(num_devices)
    block = replica_size(num_devices)
    if np.any(source // block != target // block):
        raise ValueError(f"features can't leave their replica of {block} devices")
    at, place, length = source.astype(np.int64), row.astype(np.int64), rows
    sends: list[np.ndarray] = []
    crossed: list[str] = []
    for k, axis in enumerate(axes):
        bit = block >> (k + 1)
        moving = np.flatnonzero((at ^ target) & bit)
        keys, which = np.unique(at[moving] * length + place[moving], return_inverse=True)
        device = keys // length
        slot = np.arange(len(keys)) - np.searchsorted(device, device)
        count = counts.get(f"send/{axis}", 0)
        if not count:
            continue
        send = np.zeros((num_devices, count), np.int32)
        send[device, slot] = keys % length
        at[moving] ^= bit
        place[moving] = length + slot[which]
        length += count
        sends.append(send)
        crossed.append(axis)
    return ExchangeRoute(tuple(sends), tuple(crossed)), place
