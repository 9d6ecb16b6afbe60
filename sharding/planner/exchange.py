"""Local search: two groups at a time deal their sequences anew, exactly, so that fewer are sharded."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

FREE = 6  # up to so many sequences of two groups are dealt anew together: 4**6 ways
EPS = 1e-9


@functools.cache
def subsets(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (starts, codes, left, right, in_both): each of `count` items is elsewhere (0), left (1), right (2) or in
    both halves (3) of a group.

    Codes are ordered by the set of items that are in the group: the codes of set `m` (bit `i`: item `i` is in it) are
    `[starts[m], starts[m + 1])`. `left` and `right` hold the share of an item that each half computes, `in_both` is
    1.0 where an item stays in both.
    """
    code = np.array(list(itertools.product(range(4), repeat=count)), np.int8).reshape(-1, count)
    here = ((code > 0) << np.arange(count)).sum(1)
    order = np.argsort(here, kind="stable")
    code, here = code[order], here[order]
    in_both = (code == 3) * 1.0
    starts = np.searchsorted(here, np.arange(2**count + 1))
    return starts, code, (code == 1) + in_both / 2, (code == 2) + in_both / 2, in_both


class Exchange:
    """Improves `degrees` and `firsts` in place; no device's load exceeds 1, or its former load if that is more.

    `amounts`, `[2, sequences]`, are work and tokens over a device's limit; `weights[log2(p)]` is a token's traffic at
    degree `p`.
    """

    def __init__(
        self, amounts: np.ndarray, weights: Sequence[float], degrees: list[int], firsts: list[int], num_devices: int
    ) -> None:
        self.amounts = amounts.T
        self.size = self.amounts.max(1).tolist()
        self.weights, self.degrees, self.firsts, self.num_devices = weights, degrees, firsts, num_devices
        self.loads = np.zeros((num_devices, 2))
        self.members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for i in range(len(degrees)):
            self._put(i, degrees[i], firsts[i])

    def run(self, max_degree: int, trials: int) -> None:
        """Tries at most `trials` pairs of groups: a bound on work, not on time, so that plans are repeatable."""
        left, idle = trials, 0
        for offset in range(1, self.num_devices):
            for half in [2**k for k in range(max_degree.bit_length() - 1)]:
                for first, second in self._pairs(2 * half, offset):
                    tried = self._deal(half, first, second)
                    left -= tried is not None
                    idle = 0 if tried else idle + 1
                    if left <= 0:
                        return
            if idle > 4 * self.num_devices:
                return

    def _pairs(self, size: int, offset: int) -> Iterator[tuple[int, int]]:
        groups = self.num_devices // size
        for first in range(groups if offset < 1 << (groups - 1).bit_length() else 0):
            second = first ^ offset
            if first < second < groups and (self.members[size, first * size] or self.members[size, second * size]):
                yield first, second

    def _put(self, i: int, degree: int, first: int) -> None:
        self.degrees[i], self.firsts[i] = degree, first
        self.members[degree, first].append(i)
        self.loads[first : first + degree] += self.amounts[i] / degree

    def _take(self, i: int) -> None:
        degree, first = self.degrees[i], self.firsts[i]
        self.members[degree, first].remove(i)
        self.loads[first : first + degree] -= self.amounts[i] / degree

    def _deal(self, half: int, group: int, partner: int) -> bool | None:
        """Deals the sequences of two groups of `2 * half` devices anew. Returns whether traffic falls; None: it
        can't."""
        size = 2 * half
        firsts = (group * size, partner * size)
        whole = [i for first in firsts for i in self.members[size, first]]
        halved = [i for first in firsts for f in (first, first + half) for i in self.members[half, f]]
        key = lambda i: (-self.size[i], i)  # noqa: E731
        free = (sorted(whole, key=key) + sorted(halved, key=key))[:FREE]
        before = [(i, self.degrees[i], self.firsts[i]) for i in free]
        for i in free:
            self._take(i)
        starts = [first + part * half for first in firsts for part in (0, 1)]
        room = [1 + EPS - self.loads[f : f + half].max(0) for f in starts]
        # Useless unless some half of a group has room for a sequence of some complete group.
        most = np.max(room, axis=0) * half
        if not (self.amounts[[i for i in free if i in whole]] <= most).all(1).any():
            for placed in before:
                self._put(*placed)
            return None
        bounds, codes, in_left, in_right, in_both = subsets(len(free))
        amounts = self.amounts[free]
        shares = (amounts / half).T
        # Each resource is a row, since columns take twice as long.
        left, right = shares @ in_left.T, shares @ in_right.T
        saved = self.weights[size.bit_length() - 1] - self.weights[half.bit_length() - 1]
        price = in_both @ (amounts[:, 1] * saved)
        costs = []
        for k in (0, 2):
            fits = (left[0] <= room[k][0]) & (left[1] <= room[k][1])
            fits &= (right[0] <= room[k + 1][0]) & (right[1] <= room[k + 1][1])
            costs.append(np.where(fits, price, np.inf))
        least = [np.minimum.reduceat(cost, bounds[:-1]) for cost in costs]
        total = least[0] + least[1][::-1]
        here = int(total.argmin())
        was = sum(float(self.amounts[i, 1]) * saved for i, degree, _ in before if degree == size)
        if not total[here] < was - EPS:
            for placed in before:
                self._put(*placed)
            return False
        for first, cost, which in zip(firsts, costs, (here, len(total) - 1 - here), strict=True):
            begin, end = bounds[which], bounds[which + 1]
            code = codes[begin + int(cost[begin:end].argmin())].tolist()
            for i, way in zip(free, code, strict=True):
                if way:
                    self._put(i, size if way == 3 else half, first + (half if way == 2 else 0))
        return True
