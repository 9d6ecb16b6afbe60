"""How a microbatch whose sequences are spread over devices lies in its buffers.

Every device has one dense row of `T` tokens: its chunks of all sequence groups that it takes part in, one round after
the other. A round's part of the row is a view of it: at most `budget` tokens (a static size) from a column that may
differ on each device. So MLPs see no padding but the end of the row, whatever the budgets of the rounds add up to.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spread:
    """What the devices need to know of a shard plan. Arrays have one row a device, like the token buffer.

    `starts_BJ` and `counts_BJ`: the columns `[start, start + count)` of round `j`; 0 tokens where a device has no part
    in it. Always `start + budget <= T`, so that a view never reaches beyond the row. `exports_BX`: the columns whose
    hidden states predict tokens on other devices (the last token of a chunk; of a prompt before its responses).

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
