"""Lays into buffers a microbatch whose sequences are shared by several devices.

Every device has one dense row of `T` tokens: its chunk of its group's stream (`planner.plan.Round`) in each round, one
round after another. A round sees its part of the row as a view: `budget` columns (a static size) from a column that may
differ on each device. So MLPs compute no padding except the end of the row, whatever the sum of the rounds' budgets.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..kernels.runs import CHUNK, PackedRuns, packed_runs
from ..mesh import binary_axes, group_axes
from ..planner.plan import PlanError, ShardPlan
from .shapes import Sizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spread:
    """The part of a shard plan that the devices need. Arrays have one row for each device, like the token buffer.

    `starts_BJ` and `counts_BJ`: round `j` has the columns `[start, start + count)`; 0 tokens if a device has no part in
    the round. Since `start + budget` may exceed T, a view begins at `min(start, T - budget)`; the round's columns may
    begin later in the view. `exports_BX`: the columns whose hidden states predict tokens on other devices (the last
    token of a chunk, or of a prompt before its responses).

    `rounds` are (degree, budget) in the order of execution: degrees never increase. `axes` are the mesh's axes of size
    two, outermost first; a group of degree `p` is the product of the last `log2(p)` axes.

    `runs` are the tables of each round's streams, if the model has layers with a state; a device has its group's table.
    """

    starts_BJ: Any  # i32
    counts_BJ: Any  # i32
    exports_BX: Any  # i32
    rounds: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    runs: tuple[PackedRuns, ...] = ()

    def with_exports(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B S D"]:
        """The device's hidden states, followed by the exports of its group of the highest degree."""
        if not self.exports_BX.shape[1]:
            return hidden_BTD
        exported = jnp.take_along_axis(hidden_BTD, jnp.asarray(self.exports_BX)[:, :, None], axis=1)
        axes = group_axes(self.axes, self.rounds[0][0])
        return jnp.concatenate([hidden_BTD, jax.lax.all_gather(exported, axes, axis=1, tiled=True)], axis=1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The device and column of every token of a shard plan. `starts` and `counts` are those of `Spread`,
    `[devices, rounds of the plan]`. A layout has no sizes of buffers yet; see `needs`."""

    plan: ShardPlan
    starts: np.ndarray
    counts: np.ndarray

    def needs(self) -> Sizes:
        """The least size of each buffer: `columns` of a row, and the budget of each round, `round/<degree>/<k>`."""
        sizes = {"columns": int(self.counts.sum(axis=1).max(initial=1))}
        return sizes | {name: int(self.counts[:, j].max(initial=1)) for j, name in enumerate(self.names())}

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """(device, column) of every token, sequence after sequence; not kept, since few layouts of a step need them."""
        first_token = np.cumsum([0, *self.plan.lengths])
        device, column = np.zeros((2, first_token[-1]), np.int64)
        for j, round in enumerate(self.plan.rounds):
            for group, members in enumerate(round.groups):
                if not members:
                    continue
                stream = np.concatenate([np.arange(first_token[i], first_token[i + 1]) for i in members])
                devices = np.arange(group * round.degree, (group + 1) * round.degree)
                chunks = self.counts[devices, j]
                device[stream] = np.repeat(devices, chunks)
                begins = self.starts[devices, j] - (np.cumsum(chunks) - chunks)
                column[stream] = np.repeat(begins, chunks) + np.arange(len(stream))
        return device, column

    def names(self) -> list[str]:
        """The name of each round's buffer, in the order of execution."""
        degrees = [round.degree for round in self.plan.rounds]
        return [f"round/{degree}/{degrees[:j].count(degree)}" for j, degree in enumerate(degrees)]


class SizedLayout:
    """A layout in buffers of given sizes, at least `Layout.needs`: `columns` tokens on each device, `rounds` as in
    `Spread`, and `cells`, `device * columns + column` of every token."""

    def __init__(self, layout: Layout, sizes: Sizes) -> None:
        self.plan = layout.plan
        self.columns = sizes["columns"]
        self._exports, self._runs = sizes.get("exports", 0), sizes.get("runs", 0)
        device, column = layout.places()
        self.cells = device * self.columns + column
        planned = {name: j for j, name in enumerate(layout.names())}
        names = sorted((name for name in sizes if name.startswith("round/")), key=_round_order)
        self.rounds = tuple((-_round_order(name)[0], min(sizes[name], self.columns)) for name in names)
        self.starts, self.counts = np.zeros((2, self.plan.num_devices, len(names)), np.int32)
        for j, name in enumerate(names):
            if name in planned:
                self.starts[:, j] = layout.starts[:, planned[name]]
                self.counts[:, j] = layout.counts[:, planned[name]]

    @property
    def device(self) -> np.ndarray:
        """The device of every token."""
        return self.cells // self.columns

    def spread(self, predecessors: np.ndarray) -> tuple[np.ndarray, Spread]:
        """(`predecessors` as in `PackedTokens`, the `Spread`). The index of a predecessor in the token's own row is its
        column. Indices from `columns` on count the exports of the group of the highest degree, device by device."""
        column = self.cells[predecessors] % self.columns
        foreign = np.flatnonzero(self.device[predecessors] != self.device)
        exported, which = np.unique(self.cells[predecessors[foreign]], return_inverse=True)  # device by device
        source, exported_column = np.divmod(exported, self.columns)
        slot = np.arange(len(exported)) - np.searchsorted(source, source)
        exports = np.zeros((self.plan.num_devices, self._exports), np.int32)
        exports[source, slot] = exported_column
        column[foreign] = self.columns + (source % self.rounds[0][0] * self._exports + slot)[which]
        spread = Spread(self.starts, self.counts, exports, self.rounds, binary_axes(self.plan.num_devices))
        return column.astype(np.int32), spread

    def runs(self, segments: np.ndarray, branches: np.ndarray) -> tuple[PackedRuns, ...]:
        """The tables of all rounds (`Spread.runs`), from the segment and branch of every token. A stream has room for
        `sizes["runs"]` runs for each of its devices; without this size there are no tables."""
        devices, tables = self.plan.num_devices, []
        marks = np.zeros((2, devices * self.columns), np.int32)
        marks[:, self.cells] = segments, branches
        for j, (degree, budget) in enumerate(self.rounds if self._runs else ()):
            first, count = self.starts[:, j, None], self.counts[:, j, None]
            column = np.minimum(first, self.columns - budget) + np.arange(budget)  # as `View` reads a row
            read = np.take_along_axis(marks.reshape(2, devices, -1), column[None], axis=2)
            streams = np.where((column >= first) & (column < first + count), read, 0).reshape(2, -1, degree * budget)
            chunks = degree * budget // CHUNK + degree * self._runs
            table = packed_runs(streams[0], streams[1], chunks)
            tables.append(jax.tree.map(functools.partial(np.repeat, repeats=degree, axis=0), table))
        return tuple(tables)

    def padding(self) -> dict[str, float]:
        """The shares of padding: `mlp` in columns of rows, `all_to_all` in sharded rounds on their fullest device."""
        sharded = [j for j, (degree, _) in enumerate(self.rounds) if degree > 1]
        sent = sum(self.rounds[j][1] for j in sharded)
        used = int(self.counts[:, sharded].sum(axis=1).max()) if sharded else 0
        return {
            "mlp": 1 - len(self.cells) / (self.plan.num_devices * self.columns),
            "all_to_all": 1 - used / sent if sent else 0.0,
        }


def _round_order(name: str) -> tuple[int, int]:
    _, degree, k = name.split("/")
    return -int(degree), int(k)


def size_weight(name: str) -> float:
    """The cost of a unit of a buffer's size. A column of the row passes all of the decoder and costs 1."""
    if name.startswith("round/"):
        return 0.25 if _round_order(name)[0] < -1 else 0.05
    if name in ("patches", "frame") or name.startswith("send/"):
        return 0.25
    return {"columns": 1.0, "exports": 0.1, "runs": 1.0}[name]


def size_cost(sizes: Mapping[str, int]) -> float:
    """The cost of buffers of these sizes, in columns."""
    return sum(size * size_weight(name) for name, size in sizes.items())


def lay(plan: ShardPlan, cap: int = 0) -> Layout:
    """The layout of the tokens of `plan`. Raises PlanError if a device has more than `cap` tokens (0: no bound)."""
    num_devices, degrees = plan.num_devices, [round.degree for round in plan.rounds]
    starts, counts = np.zeros((2, num_devices, len(degrees)), np.int64)
    used = np.zeros(num_devices, np.int64)
    for j, round in enumerate(plan.rounds):
        starts[:, j] = used
        for group, members in enumerate(round.groups):
            share, longer = divmod(sum(plan.lengths[i] for i in members), round.degree)
            first = group * round.degree
            counts[first : first + round.degree, j] = share
            counts[first : first + longer, j] += 1
        used += counts[:, j]
    if cap and used.max(initial=0) > cap:
        raise PlanError(f"device {int(used.argmax())} has {used.max()} tokens, more than the {cap} of its buffer")
    return Layout(plan, starts, counts)
