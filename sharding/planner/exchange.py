"""Local search: two groups at a time give their sequences out anew, exactly, so that less is sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from .enumeration import subsets

FREE = 6  # so many sequences of two groups are placed anew together: 4**6 cases
EPS = 1e-9


class Exchange:
    """Improves `degrees` and `firsts` in place; no device exceeds its load of 1, or what it has if that is more.

    `work` and `tokens` are in units of what one device may take, `weights[log2(p)]` is the traffic of a token at `p`.
    """

    def __init__(
        self,
        work: Sequence[float],
        tokens: Sequence[float],
        weights: Sequence[float],
        degrees: list[int],
        firsts: list[int],
        num_devices: int,
    ) -> None:
        self.amounts = np.array([work, tokens]).T.reshape(-1, 2)
        self.size = self.amounts.max(1, initial=0.0).tolist()
        self.weights, self.degrees, self.firsts, self.num_devices = weights, degrees, firsts, num_devices
        self.loads = np.zeros((num_devices, 2))
        self.members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for i in range(len(work)):
            self._put(i, degrees[i], firsts[i])

    def run(self, max_degree: int, trials: int) -> None:
        """Looks at no more than so many pairs of groups: a bound on work, not on time, so that plans are repeatable."""
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
        """Deals anew what two groups of `2 * half` devices have. True if that helped, None if it could not."""
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
        # No use unless some half of a group has room for some whole one.
        most = np.max(room, axis=0) * half
        if not (self.amounts[[i for i in free if i in whole]] <= most).all(1).any():
            for placed in before:
                self._put(*placed)
            return None
        table = subsets(len(free))
        amounts = self.amounts[free]
        shares = (amounts / half).T
        left, right = (
            shares @ table.left.T,
            shares @ table.right.T,
        )  # each resource a row: columns would cost twice as much
        saved = self.weights[size.bit_length() - 1] - self.weights[half.bit_length() - 1]
        price = table.both @ (amounts[:, 1] * saved)
        costs = []
        for k in (0, 2):
            fits = (left[0] <= room[k][0]) & (left[1] <= room[k][1])
            fits &= (right[0] <= room[k + 1][0]) & (right[1] <= room[k + 1][1])
            costs.append(np.where(fits, price, np.inf))
        least = [np.minimum.reduceat(cost, table.starts[:-1]) for cost in costs]
        total = least[0] + least[1][::-1]
        here = int(total.argmin())
        was = sum(float(self.amounts[i, 1]) * saved for i, degree, _ in before if degree == size)
        if not total[here] < was - EPS:
            for placed in before:
                self._put(*placed)
            return False
        for first, cost, which in zip(firsts, costs, (here, len(total) - 1 - here), strict=True):
            begin, end = table.starts[which], table.starts[which + 1]
            code = table.code[begin + int(cost[begin:end].argmin())].tolist()
            for i, way in zip(free, code, strict=True):
                if way:
                    self._put(i, size if way == 3 else half, first + (half if way == 2 else 0))
        return True
