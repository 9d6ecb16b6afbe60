"""The table of chunks by which layers with a state go through packed rows.

A run is all tokens of one segment and branch, in the order of their columns. The path of a token is the token's run up
to the token, in a branch behind the run of the prompt. A layer with a state (`delta`) computes chunks of tokens of one
run. Its state begins anew at each segment, and in every branch as at the end of the prompt. Padding is in no run.
"""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

CHUNK = 64  # tokens, a power of two; on CPUs 32 takes as long in long rows, 128 a third longer
TAIL = 3  # the convolution of a token reads this many earlier tokens


class ChunkStart(enum.IntEnum):
    """The state with which a chunk begins."""

    NEW = 0  # zero
    NEXT = 1  # the state after the previous chunk, or the given state in the first chunk of a row
    FORK = 2  # the state after the previous chunk, which is also kept for the prompt's other branches
    BRANCH = 3  # the state that the last FORK kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRuns:
    """The `N` chunks of `C` cells of each row. A cell has a token or nothing. All arrays are int32.

    `columns_BNC` has the column of each cell's token. `cells_BT` is the inverse, with the cell (`n * C + c`) of each
    token. `start_BN` has the `ChunkStart` of each chunk. `before_BN3` has the columns of the three tokens before a
    chunk on its path, oldest first. `last_B3` has the columns of the last three tokens of the row's last path, oldest
    first. -1 stands for nothing. If a row's state is given, columns `T` to `T + 2` stand for the three tokens before
    the row.
    """

    columns_BNC: Any
    cells_BT: Any
    start_BN: Any
    before_BN3: Any
    last_B3: Any


def chunk_size(longest: int) -> int:
    """Returns the tokens of a chunk for rows of at most `longest` tokens: `CHUNK`, or 8 to 32 if all rows are short.
    Runs of short rows are short too, and would leave most cells of a chunk of 64 empty."""
    return next((size for size in (8, 16, 32) if longest < 32 * size), CHUNK)


def packed_runs(
    segments_BT: np.ndarray, branches_BT: np.ndarray, chunks: int = 0, *, given: bool = False, size: int = CHUNK
) -> PackedRuns:
    """Returns the table of packed rows (`models.inputs.PackedTokens`). A row gets `chunks` chunks (0: as many as the
    fullest row needs) of `size` tokens. With `given`, the first run of each row begins with a state that the caller
    has. Raises ValueError for too few chunks, or a branch that begins before its prompt ends."""
    rows = [_Row(*row, size, given) for row in zip(segments_BT, branches_BT, strict=True)]
    most = max((row.chunks for row in rows), default=0)
    if chunks and most > chunks:
        raise ValueError(f"a row has {most} chunks of {size} tokens, more than the {chunks} of the table")
    count = chunks or max(most, 1)
    arrays = zip(*(row.table(count) for row in rows), strict=True)
    return PackedRuns(*(np.stack(parts).astype(np.int32) for parts in arrays))


class _Row:
    """The tokens of one row in the order of their runs, with prompts before their branches."""

    def __init__(self, segments: np.ndarray, branches: np.ndarray, size: int, given: bool) -> None:
        order = np.lexsort((branches, segments))  # stable, so that columns ascend within a run
        order = order[segments[order] != 0]
        self.order, self.size, self.tokens = order, size, len(segments)
        segment, branch = segments[order], branches[order]
        new = np.diff(segment, prepend=-1) != 0
        starts = np.flatnonzero(new | (np.diff(branch, prepend=-1) != 0))
        lengths = np.diff(starts, append=len(order))
        # The first run of each run's segment, which is the prompt if its branch is 0.
        head = np.maximum.accumulate(np.where(new[starts], np.arange(len(starts)), 0))
        forked = (branch[starts] != 0) & (branch[starts[head]] == 0)
        prompt_end = starts[head] + lengths[head] - 1
        early = np.flatnonzero(forked & (order[starts] < order[prompt_end]))
        if early.size:
            where = starts[early[0]]
            raise ValueError(f"branch {branch[where]} of segment {segment[where]} begins before its prompt ends")
        counts = -(-lengths // size)
        self.first = np.cumsum(counts) - counts  # first chunk of each run
        self.chunks = int(counts.sum())
        within = np.arange(len(order)) - np.repeat(starts, lengths)
        self.cells = np.repeat(self.first, lengths) * size + within
        # Tokens are numbered in `order`; the three given tokens and "nothing" follow them.
        m = len(order)
        self.columns = np.concatenate([order, self.tokens + np.arange(TAIL), [-1]])
        self.previous = np.concatenate([np.arange(-1, m - 1), [m + 3, m, m + 1, m + 3]])
        self.previous[starts] = np.where(forked, prompt_end, m + 3)
        self.start = np.where(
            forked, np.where(np.arange(len(starts)) == head + 1, ChunkStart.FORK, ChunkStart.BRANCH), ChunkStart.NEW
        )
        self.end = m - 1 if m else m + 3
        if given:
            self.previous[:1], self.start[:1] = m + 2, ChunkStart.NEXT
            self.end = m - 1 if m else m + 2

    def table(self, chunks: int) -> tuple[np.ndarray, ...]:
        columns = np.full(chunks * self.size, -1)
        columns[self.cells] = self.order
        cells = np.full(self.tokens, -1)
        cells[self.order] = self.cells
        start = np.full(chunks, ChunkStart.NEXT)
        start[self.first] = self.start
        before = np.full((chunks, TAIL), -1)
        begins = np.flatnonzero(self.cells % self.size == 0)
        before[: self.chunks] = self._path(self.previous[begins])
        return columns.reshape(chunks, self.size), cells, start, before, self._path(np.array([self.end]))[0]

    def _path(self, last: np.ndarray) -> np.ndarray:
        """The columns of each token of `last` and of the two previous tokens on its path, oldest first."""
        path = [last]
        for _ in range(TAIL - 1):
            path.insert(0, self.previous[path[0]])
        return self.columns[np.stack(path, axis=-1)]
