"""How a microbatch whose sequences are spread over devices lies in its buffers.

Every device has one dense row of `T` tokens: its chunks of all sequence groups that it takes part in, one round after
the other. A round's part of the row is a view of it: at most `budget` tokens (a static size) from a column that may
differ on each device. So MLPs see no padding but the end of the row, whatever the budgets of the rounds add up to.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .mesh import binary_axes
from .plan import PlanError, ShardPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spread:
    """What the devices need to know of a shard plan. Arrays have one row a device, like the token buffer.

    `starts_BJ` and `counts_BJ`: the columns `[start, start + count)` of round `j`; 0 tokens where a device has no part
    in it. Since `start + budget` may exceed T, a view begins at `min(start, T - budget)` and its own columns later.
    `exports_BX`: the columns whose hidden states predict tokens on other devices (the last token of a chunk; of a prompt
    before its responses).

    `rounds` are (degree, budget) in the order of execution: degrees never increase. `axes` are the mesh's axes of size
    two, outermost first; a group of degree `p` is the product of the last `log2(p)` of them.
    """

    starts_BJ: Any  # i32
    counts_BJ: Any  # i32
    exports_BX: Any  # i32
    rounds: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def group(self, degree: int) -> tuple[str, ...]:
        """The mesh axes of a group of `degree` devices; none for 1."""
        twos = degree.bit_length() - 1
        return self.axes[len(self.axes) - twos :]

    def with_exports(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B S D"]:
        """The device's hidden states, and behind them those that its group of the highest degree exports."""
        if not self.exports_BX.shape[1]:
            return hidden_BTD
        own = jnp.take_along_axis(hidden_BTD, jnp.asarray(self.exports_BX)[:, :, None], axis=1)
        axes = self.group(self.rounds[0][0])
        return jnp.concatenate([hidden_BTD, jax.lax.all_gather(own, axes, axis=1, tiled=True)], axis=1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything of a shard plan lies: `devices` rows of `columns` tokens.

    `cells` has one entry a token, sequence after sequence: `device * columns + column`. `starts` and `counts` are
    those of `Spread`, `[devices, rounds]`; `budgets` has one entry a round.
    """

    plan: ShardPlan
    columns: int
    budgets: tuple[int, ...]
    starts: np.ndarray
    counts: np.ndarray
    cells: np.ndarray

    def find(self, predecessors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(`predecessors` as `PackedTokens` has them, `exports` `[devices, X]`).

        `predecessors[i]` is the token (an index into `cells`) whose hidden state predicts token `i`. In the answer, it
        is a column of the token's own row, or, from `columns` on, an entry of what the group of the highest degree
        exports: device by device, `X` each. X is a power of two from 8 on, or 0 if nothing crosses devices.
        """
        own, column = np.divmod(self.cells[predecessors], self.columns)
        foreign = np.flatnonzero(own != self.cells // self.columns)
        wanted, slot_of = np.unique(self.cells[predecessors[foreign]], return_inverse=True)
        source = wanted // self.columns
        slot = np.arange(len(wanted)) - np.searchsorted(source, source)
        width = max(1 << int(slot.max()).bit_length(), 8) if len(wanted) else 0
        exports = np.zeros((self.plan.num_devices, width), np.int32)
        exports[source, slot] = wanted % self.columns
        group = self.plan.rounds[0].degree if self.plan.rounds else 1
        column[foreign] = self.columns + (source % group * width + slot)[slot_of]
        return column.astype(np.int32), exports

    def spread(self, exports: np.ndarray) -> Spread:
        rounds = tuple((one.degree, budget) for one, budget in zip(self.plan.rounds, self.budgets, strict=True))
        starts, counts = self.starts.astype(np.int32), self.counts.astype(np.int32)
        return Spread(starts, counts, exports, rounds, binary_axes(self.plan.num_devices))

    def padding(self) -> dict[str, float]:
        """Share of the slots without a token: of the rows (`mlp`), and of what the all-to-alls send (`all_to_all`)."""
        sharded = [j for j, one in enumerate(self.plan.rounds) if one.degree > 1]
        sent = sum(self.budgets[j] for j in sharded) * self.plan.num_devices
        used = float(self.counts[:, sharded].sum())
        return {
            "mlp": 1 - len(self.cells) / (self.plan.num_devices * self.columns),
            "all_to_all": 1 - used / sent if sent else 0.0,
        }


def sizes(cap: int, multiple: int = 8) -> tuple[int, ...]:
    """The few sizes, ascending, that a buffer of at most `cap` tokens may take: `cap` times 1, 3/4, 1/2, 3/8, 1/4, ...
    down to 1/16, rounded up to multiples of `multiple`. Each size is compiled once; a buffer is at least 2/3 full."""
    steps = [(num, 1 << k) for k in range(5) for num in (1, 0.75)][:-1]
    return tuple(sorted({min(-(-int(cap * num / den) // multiple) * multiple, cap) for num, den in steps}))


def lay(plan: ShardPlan, cap: int) -> Layout:
    """Gives every token of `plan` its place. `cap` is the most tokens of a device; sizes are those of `sizes(cap)`.

    Raises PlanError if a device has more tokens than that.
    """
    num_devices, degrees = plan.num_devices, [one.degree for one in plan.rounds]
    first_token = np.cumsum([0, *plan.lengths])
    starts = np.zeros((num_devices, len(degrees)), np.int64)
    counts = np.zeros((num_devices, len(degrees)), np.int64)
    used = np.zeros(num_devices, np.int64)
    device = np.zeros(first_token[-1], np.int64)
    column = np.zeros(first_token[-1], np.int64)
    for j, one in enumerate(plan.rounds):
        starts[:, j] = used
        for group, members in enumerate(one.groups):
            if not members:
                continue
            stream = np.concatenate([np.arange(first_token[i], first_token[i + 1]) for i in members])
            share, longer = divmod(len(stream), one.degree)
            chunks = np.full(one.degree, share)
            chunks[:longer] += 1
            part = np.repeat(np.arange(one.degree), chunks)
            device[stream] = group * one.degree + part
            column[stream] = starts[device[stream], j] + np.arange(len(stream)) - (np.cumsum(chunks) - chunks)[part]
            counts[group * one.degree : (group + 1) * one.degree, j] = chunks
        used += counts[:, j]
    fullest = int(used.max(initial=1))
    if fullest > cap:
        raise PlanError(f"device {int(used.argmax())} has {fullest} tokens, more than the {cap} of its buffer")
    grid = sizes(cap)
    columns = next(size for size in grid if size >= fullest)
    needs = counts.max(axis=0, initial=1) if degrees else []
    budgets = tuple(min(next(size for size in grid if size >= need), columns) for need in needs)
    return Layout(plan, columns, budgets, starts, counts, device * columns + column)
