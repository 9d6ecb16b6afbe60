"""From the largest groups down: which sequences stay on a whole group, and how its halves share the others.

At a group of `s` devices with some compute and memory left on each, a cheapest set of sequences stays on all `s`, such
that the others can be dealt to the two halves with neither exceeding what its devices have left. That all stay is
always possible, so a plan always exists. Few sequences are dealt by enumeration of all left/right/both; many by
differencing (Karmarkar-Karp, in two resources at once) down to a dozen entities and enumeration of those.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from .enumeration import signs, ternary

EXACT = 7  # so many sequences are dealt left/right/both by enumeration: 3**7 cases
ENTITIES = 11  # and so many differences left/right: 2**10
TRIES = 8  # sets of staying sequences that are tried before ever more of the largest stay
HARD = 100.0  # what exceeding memory counts, against compute
EPS = 1e-9


class Descent:
    """Places sequences on the groups beneath one block of devices.

    `work` and `tokens` are in units of what one device may take; `weights[log2(p)]` is the traffic of a token at degree
    `p`. The answer is in `degrees` and `firsts`, shared by all blocks.
    """

    def __init__(self, work: list[float], tokens: list[float], weights: Sequence[float]) -> None:
        self.work, self.tokens, self.weights = work, tokens, weights
        self.size = [max(pair) for pair in zip(work, tokens, strict=True)]
        self.degrees, self.firsts = [1] * len(work), [0] * len(work)

    def place(self, members: list[int], first: int, size: int, compute: float, memory: float) -> None:
        """Places `members` on the `size` devices from `first`, each of which has so much compute and memory left."""
        if not members:
            return
        if size == 1:
            return self._stay(members, first, 1)
        rest, compute, memory = self._forced(members, first, size, compute, memory)
        if not rest:
            return
        rest.sort(key=lambda i: (-self.size[i], i))
        stay, left, right = (self._enumerate if len(rest) <= EXACT else self._difference)(rest, size, compute, memory)
        self._stay(stay, first, size)
        compute, memory = self._less(stay, size, compute, memory)
        self.place(left, first, size // 2, compute, memory)
        self.place(right, first + size // 2, size // 2, compute, memory)

    def _stay(self, members: Sequence[int], first: int, size: int) -> None:
        for i in members:
            self.degrees[i], self.firsts[i] = size, first

    def _less(self, stay: Sequence[int], size: int, compute: float, memory: float) -> tuple[float, float]:
        return compute - sum(self.work[i] for i in stay) / size, memory - sum(self.tokens[i] for i in stay) / size

    def _fits(self, members: Sequence[int], half: int, compute: float, memory: float) -> bool:
        work, tokens, compute, memory = self.work, self.tokens, half * compute + EPS, half * memory + EPS
        return all(work[i] <= compute and tokens[i] <= memory for i in members)

    def _forced(
        self, members: list[int], first: int, size: int, compute: float, memory: float
    ) -> tuple[list[int], float, float]:
        """Without those that no half can take, and what is left then."""
        rest = list(members)
        while True:
            stay = [i for i in rest if not self._fits((i,), size // 2, compute, memory)]
            if not stay:
                return rest, compute, memory
            self._stay(stay, first, size)
            compute, memory = self._less(stay, size, compute, memory)
            held = set(stay)
            rest = [i for i in rest if i not in held]

    def _price(self, i: int, size: int, compute: float, memory: float) -> float:
        """Traffic that staying here adds to what the sequence needs anyway."""
        degree = 1
        while degree < size and (self.work[i] > degree * compute or self.tokens[i] > degree * memory):
            degree *= 2
        return self.tokens[i] * (self.weights[size.bit_length() - 1] - self.weights[degree.bit_length() - 1])

    def _cases(
        self, items: list[int], size: int, compute: float, memory: float, dust: tuple[float, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """`[codes]`: cost of each left/right/both of `items` (inf where it does not fit), and the codes. Smaller ones
        of `dust` (compute, memory) in all are taken for a fluid that evens out what it can."""
        table = ternary(len(items))
        amounts = np.array([[self.work[i], self.tokens[i]] for i in items])
        price = np.array([self._price(i, size, compute, memory) for i in items])
        have = np.array([[compute], [memory]])
        total = amounts.sum(0)[:, None]
        spread = np.array([dust]).T
        left, right = amounts.T @ table.left.T, amounts.T @ table.right.T
        fullest = np.maximum(left, right) + (total - left - right) / 2 - have * (size // 2)
        uneven = (np.abs(left - right) - spread) / np.maximum(have * size - total - spread, 1e-3)
        price_all = table.stay @ price + 1e-3 * np.maximum(np.maximum(uneven[0], uneven[1]), 0.0)
        return np.where(np.maximum(fullest[0], fullest[1]) <= EPS, price_all, np.inf), table.code

    def _enumerate(
        self, rest: list[int], size: int, compute: float, memory: float
    ) -> tuple[list[int], list[int], list[int]]:
        cost, codes = self._cases(rest, size, compute, memory, (0.0, 0.0))
        best = int(cost.argmin())
        if cost[best] == np.inf:  # only rounding could make it so: all of them stay
            return rest, [], []
        ways: tuple[list[int], list[int], list[int]] = ([], [], [])
        for i, way in zip(rest, codes[best].tolist(), strict=True):
            ways[way].append(i)
        return ways[2], ways[0], ways[1]

    def _difference(
        self, rest: list[int], size: int, compute: float, memory: float
    ) -> tuple[list[int], list[int], list[int]]:
        uneven, left, right = self._halves(rest, size, compute, memory)
        if uneven <= 1:
            return [], left, right
        top = rest[:EXACT]
        dust = (sum(self.work[i] for i in rest[EXACT:]), sum(self.tokens[i] for i in rest[EXACT:]))
        cost, codes = self._cases(top, size, compute, memory, dust)
        order = np.argsort(cost, kind="stable")[:64]
        sets = [
            [i for i, way in zip(top, codes[k].tolist(), strict=True) if way == 2] for k in order[cost[order] < np.inf]
        ]
        tried: list[list[int]] = [[]]
        grow = [rest[:count] for count in range(1, len(rest))]
        for number, stay in enumerate([*sets, *grow]):
            if stay in tried or (number < len(sets) and len(tried) > TRIES):
                continue
            tried.append(stay)
            others = [i for i in rest if i not in stay]
            less = self._less(stay, size, compute, memory)
            if self._fits(others, size // 2, *less):
                uneven, left, right = self._halves(others, size, *less)
                if uneven <= 1:
                    return stay, left, right
        return rest, [], []

    def _halves(
        self, members: list[int], size: int, compute: float, memory: float
    ) -> tuple[float, list[int], list[int]]:
        """The most even two halves found, and how uneven: above 1, a half exceeds what it has."""
        spare_work = size * compute - sum(self.work[i] for i in members)
        spare_tokens = size * memory - sum(self.tokens[i] for i in members)
        return halves(members, self.work, self.tokens, max(spare_work, EPS), max(spare_tokens, EPS))


def halves(
    members: Sequence[int], work: Sequence[float], tokens: Sequence[float], spare_work: float, spare_tokens: float
) -> tuple[float, list[int], list[int]]:
    """Deals `members` to two sides. Returns the larger of their differences in work and in tokens over what is spare of
    each, and the sides. Karmarkar-Karp differencing, then enumeration of what is left."""
    by_work, by_tokens = 1 / spare_work, 1 / spare_tokens
    heap: list[tuple[float, int, float, float, list[int], list[int]]] = []
    for k, i in enumerate(members):
        x, y = work[i] * by_work, tokens[i] * by_tokens
        heap.append((-max(x, y), k, x, y, [i], []))
    heapq.heapify(heap)
    k = len(heap)
    while len(heap) > ENTITIES:
        _, _, x, y, plus, minus = heapq.heappop(heap)
        _, _, u, v, more, less = heapq.heappop(heap)
        if max(abs(x + u), abs(y + v)) < max(abs(x - u), abs(y - v)):
            x, y, plus, minus = x + u, y + v, plus + more, minus + less
        else:
            x, y, plus, minus = x - u, y - v, plus + less, minus + more
        heapq.heappush(heap, (-max(abs(x), abs(y)), k, x, y, plus, minus))
        k += 1
    table = signs(len(heap))
    uneven = np.abs(np.array([entry[2:4] for entry in heap]).T @ table.T)
    # Where both cannot be had, tokens are the harder limit.
    uneven = np.maximum(uneven[0], uneven[1]) + HARD * np.maximum(uneven[1] - 1, 0.0)
    best = int(uneven.argmin())
    left: list[int] = []
    right: list[int] = []
    for sign, entry in zip(table[best].tolist(), heap, strict=True):
        left += entry[4] if sign > 0 else entry[5]
        right += entry[5] if sign > 0 else entry[4]
    return float(uneven[best]), left, right
