"""A placement is a plan in the making. This file has the score, the first blocks, the descent and the exchange.

The descent places sequences from the largest groups of devices down: the cheapest set of sequences stays on all devices
of a group, so that the rest fits into what the group's halves have left of compute and memory. All sequences may always
stay, so that a plan always exists. Few sequences are dealt by trying all ways (left, right, both). Many are dealt by
differencing (Karmarkar-Karp, in two resources at once) down to 11 differences, for which all ways are tried.

Then two groups at a time deal up to `FREE` sequences anew, by trying all ways, so that fewer are sharded.
"""

import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from .plan import Placement, Problem, over_devices

SPARE = 0.03  # share of the memory limit left free, so that the devices of a block can be made even
GOOD = 0.25  # the pressure (see `blocks`) of the fullest block up to which nothing is dealt anew
NEIGHBOURS = 6  # number of emptiest blocks with which the fullest block deals anew
EXACT = 7  # the most sequences that are dealt left/right/both by trying all ways: 3**7
ENTITIES = 11  # the most differences that are dealt left/right by trying all ways: 2**10
TRIES = 8  # the most sets of staying sequences, cheapest first, that are tried before sets of the largest sequences
FREE = 6  # the most sequences of two groups that are dealt anew together: 4**6 ways
HARD = 100.0  # the weight of exceeding memory, against compute
EPS = 1e-9

Score = tuple[float, float]  # excess over the limits of memory and compute (relative to them), then traffic
Pair = tuple[float, float]  # compute and memory, in units of one device's limit
Ways = tuple[list[int], list[int], list[int]]  # sequences on all of a group, on its left half, on its right half


def dealt(problem: Problem, degree: int) -> list[int]:
    """The index of each sequence's block of `degree` devices. Blocks are even in compute, within the memory limit."""
    amounts = np.array([problem.work_I, problem.lengths_I])
    target = np.array([problem.least_compute or 1.0, max(problem.least_memory, (1 - SPARE) * problem.memory_limit)])
    spare = np.maximum([problem.compute_limit or 1.0, problem.memory_limit] / target - 1, 0.002) / [2, 1]
    return blocks(amounts / (target * degree)[:, None], problem.num_devices // degree, spare)


def blocks(amounts: np.ndarray, count: int, room: np.ndarray) -> list[int]:
    """The index of each sequence's block, out of `count` blocks that are as even as possible in compute and memory.

    `amounts`, `[2, sequences]`, are work and tokens in units of a block's target; `room`, `[2]`, is the excess over a
    target that is allowed. The pressure of a block is its excess over 1, divided by `room`; tokens above `room` count
    `HARD` times. The largest sequence goes first, to the least loaded block. Then the block with the most pressure and
    another block deal their sequences anew, until pressure is at most `GOOD` or falls no more.
    """
    if count == 1:
        return [0] * amounts.shape[1]
    loads = np.zeros((count, 2))
    members: list[list[int]] = [[] for _ in range(count)]
    work, tokens = amounts.tolist()
    amounts_I2 = amounts.T

    def pressure_of(loads: np.ndarray) -> np.ndarray:
        over = (loads - 1) / room
        return over.max(1) + HARD * np.maximum(over[:, 1] - 1, 0.0)

    for i in np.argsort(-amounts.max(0), kind="stable").tolist():
        # The larger of a block's two loads counts, and a tenth of their sum.
        after = loads + amounts_I2[i]
        over = HARD * np.maximum(after[:, 1] - (1 + room[1]), 0.0)
        best = int((after.max(1) + 0.1 * loads.sum(1) + over).argmin())
        members[best].append(i)
        loads[best] += amounts_I2[i]
    for _ in range(3 * count):
        pressure = pressure_of(loads)
        fullest = int(pressure.argmax())
        if pressure[fullest] <= GOOD:
            break
        resource = int(((loads[fullest] - 1) / room).argmax())
        for partner in np.argsort(loads[:, resource], kind="stable")[:NEIGHBOURS].tolist():
            if partner == fullest:
                continue
            left = 2 * (1 + room) - loads[fullest] - loads[partner]
            pooled = sorted(members[fullest] + members[partner])
            _, *sides = halves(pooled, work, tokens, *np.maximum(left, room / 4).tolist())
            new = np.array([amounts_I2[side].sum(0) for side in sides])
            if pressure_of(new).max() < max(pressure[fullest], pressure[partner]) - 1e-6:
                for block, load, side in zip((fullest, partner), new, sides, strict=True):
                    members[block], loads[block] = side, load
                break
        else:
            break
    answer = [0] * amounts.shape[1]
    for block, inside in enumerate(members):
        for i in inside:
            answer[i] = block
    return answer


def largest(problem: Problem, placement: Placement) -> tuple[float, float]:
    """The largest compute and the most tokens of a device."""
    degrees, firsts = map(np.array, placement)
    amounts = problem.work_I / degrees, problem.lengths_I / degrees
    compute, memory = (over_devices(share, degrees, firsts, problem.num_devices).max() for share in amounts)
    return float(compute), float(memory)


def score(problem: Problem, placement: Placement) -> Score:
    """A placement's excess over the limits of memory and compute (relative to them), then its traffic."""
    compute, memory = largest(problem, placement)
    over = [
        round(max(load / limit - 1, 0.0), 9) if limit else 0.0
        for load, limit in ((memory, problem.memory_limit), (compute, problem.compute_limit))
    ]
    weights_K = np.array(problem.weights)
    return HARD * over[0] + over[1], float((problem.lengths_I * weights_K[np.log2(placement[0]).astype(int)]).sum())


@functools.cache
def signs(count: int) -> np.ndarray:
    """`[2**(count - 1), count]` of +1 and -1: all ways to put `count` items on two sides, the first item always +1."""
    codes = np.arange(2 ** max(count - 1, 0))[:, None] >> np.arange(count)[None, ::-1]
    return 1.0 - 2.0 * (codes & 1)


@functools.cache
def ternary(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Four arrays `[codes, count]`: three with 1.0 where the item is left, right, or in both, and the code itself (0,
    1, 2). The sides are equal, so that no code has the first item on the right."""
    code = np.array(list(itertools.product((0, 1, 2), repeat=count)), np.int8).reshape(-1, count)
    code = code[code[:, 0] != 1] if count else code
    return (code == 0) * 1.0, (code == 1) * 1.0, (code == 2) * 1.0, code


class Descent:
    """Places sequences on the groups beneath one block of devices: `degrees` and `firsts`, shared by all blocks.
    `amounts` and `weights` are those of `Exchange`."""

    def __init__(self, amounts: np.ndarray, weights: Sequence[float]) -> None:
        self.work, self.tokens = amounts.tolist()
        self.weights, self.size = weights, amounts.max(0).tolist()
        self.degrees, self.firsts = [1] * len(self.work), [0] * len(self.work)

    def place(self, members: list[int], first: int, size: int, have: Pair) -> None:
        """Places `members` on the `size` devices from `first`; each device has compute and memory `have` left."""
        if size == 1:
            return self._stay(members, first, 1)
        rest = list(members)
        while stay := [i for i in rest if not self._fit([i], size // 2, have)]:  # too large for a half
            self._stay(stay, first, size)
            rest = [i for i in rest if self._fit([i], size // 2, have)]
            have = self._less(stay, size, have)
        if not rest:
            return
        rest.sort(key=lambda i: (-self.size[i], i))
        stay, left, right = (self._enumerate if len(rest) <= EXACT else self._difference)(rest, size, have)
        self._stay(stay, first, size)
        have = self._less(stay, size, have)
        self.place(left, first, size // 2, have)
        self.place(right, first + size // 2, size // 2, have)

    def _stay(self, members: Sequence[int], first: int, size: int) -> None:
        for i in members:
            self.degrees[i], self.firsts[i] = size, first

    def _total(self, members: Sequence[int]) -> Pair:
        return sum((self.work[i] for i in members), 0.0), sum((self.tokens[i] for i in members), 0.0)

    def _less(self, stay: Sequence[int], size: int, have: Pair) -> Pair:
        work, tokens = self._total(stay)
        return have[0] - work / size, have[1] - tokens / size

    def _fit(self, members: Sequence[int], half: int, have: Pair) -> bool:
        work, tokens = self.work, self.tokens
        compute, memory = half * have[0] + EPS, half * have[1] + EPS
        return all(work[i] <= compute and tokens[i] <= memory for i in members)

    def _price(self, i: int, size: int, have: Pair) -> float:
        """The traffic of a sequence on `size` devices, less its traffic on the fewest devices that can hold it."""
        degree = 1
        while degree < size and (self.work[i] > degree * have[0] or self.tokens[i] > degree * have[1]):
            degree *= 2
        return self.tokens[i] * (self.weights[size.bit_length() - 1] - self.weights[degree.bit_length() - 1])

    def _cases(self, items: list[int], size: int, have: Pair, dust: Pair) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cost of each way to put `items` left, right or in both (inf if it does not fit), and each way's
        code. Smaller sequences, `dust` together, even out differences."""
        is_left, is_right, stays, code = ternary(len(items))
        amounts = np.array([[self.work[i], self.tokens[i]] for i in items])
        price = np.array([self._price(i, size, have) for i in items])
        room = np.array([have]).T
        total = amounts.sum(0)[:, None]
        spread = np.array([dust]).T
        left, right = amounts.T @ is_left.T, amounts.T @ is_right.T
        fullest = np.maximum(left, right) + (total - left - right) / 2 - room * (size // 2)
        uneven = (np.abs(left - right) - spread) / np.maximum(room * size - total - spread, 1e-3)
        price_all = stays @ price + 1e-3 * np.maximum(np.maximum(uneven[0], uneven[1]), 0.0)
        return np.where(np.maximum(fullest[0], fullest[1]) <= EPS, price_all, np.inf), code

    def _enumerate(self, rest: list[int], size: int, have: Pair) -> Ways:
        cost, codes = self._cases(rest, size, have, (0.0, 0.0))
        best = int(cost.argmin())
        if cost[best] == np.inf:  # only rounding can cause this: all sequences stay
            return rest, [], []
        left, right, stay = ([i for i, way in zip(rest, codes[best], strict=True) if way == side] for side in range(3))
        return stay, left, right

    def _difference(self, rest: list[int], size: int, have: Pair) -> Ways:
        uneven, left, right = self._halves(rest, size, have)
        if uneven <= 1:
            return [], left, right
        top = rest[:EXACT]
        cost, codes = self._cases(top, size, have, self._total(rest[EXACT:]))
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
            leave = [i for i in rest if i not in stay]
            less = self._less(stay, size, have)
            if self._fit(leave, size // 2, less):
                uneven, left, right = self._halves(leave, size, less)
                if uneven <= 1:
                    return stay, left, right
        return rest, [], []

    def _halves(self, members: list[int], size: int, have: Pair) -> tuple[float, list[int], list[int]]:
        """As `halves`; if the unevenness is above 1, a half exceeds `have`."""
        work, tokens = self._total(members)
        spare = max(size * have[0] - work, EPS), max(size * have[1] - tokens, EPS)
        return halves(members, self.work, self.tokens, *spare)


def halves(
    members: Sequence[int], work: Sequence[float], tokens: Sequence[float], spare_work: float, spare_tokens: float
) -> tuple[float, list[int], list[int]]:
    """Deals `members` to two sides, by Karmarkar-Karp differencing down to `ENTITIES` entries, then by trying all ways.
    Returns (unevenness, left, right). The unevenness is the larger of the differences in work and tokens, each divided
    by its spare amount. A difference in tokens above `spare_tokens` counts `HARD` times."""
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
    # If not both limits can be met, the limit on tokens is the harder limit.
    uneven = np.maximum(uneven[0], uneven[1]) + HARD * np.maximum(uneven[1] - 1, 0.0)
    best = int(uneven.argmin())
    left: list[int] = []
    right: list[int] = []
    for sign, entry in zip(table[best].tolist(), heap, strict=True):
        left += entry[4] if sign > 0 else entry[5]
        right += entry[5] if sign > 0 else entry[4]
    return float(uneven[best]), left, right


@functools.cache
def subsets(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (starts, codes, left, right, in_both): each of `count` items is outside a group (0), in its left half
    (1), its right half (2) or both halves (3). Codes are ordered by the set of items that are in the group: the codes
    of set `m` (bit `i`: item `i` is in it) are `[starts[m], starts[m + 1])`. `left` and `right` hold the share of an
    item that each half computes, `in_both` is 1.0 where an item stays in both."""
    code = np.array(list(itertools.product(range(4), repeat=count)), np.int8).reshape(-1, count)
    here = ((code > 0) << np.arange(count)).sum(1)
    order = np.argsort(here, kind="stable")
    code, here = code[order], here[order]
    in_both = (code == 3) * 1.0
    starts = np.searchsorted(here, np.arange(2**count + 1))
    return starts, code, (code == 1) + in_both / 2, (code == 2) + in_both / 2, in_both


class Exchange:
    """Improves `degrees` and `firsts` in place; no device's load exceeds 1, or its former load if that is more.
    `amounts`, `[2, sequences]`, are work and tokens in units of one device's limit; `weights[log2(p)]` is a token's
    traffic at degree `p`."""

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
        """Deals the sequences of two groups of `2 * half` devices anew. Returns whether traffic falls; None if no deal
        was tried, because no deal could lower traffic."""
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
        # A deal is useless unless some half of a group has room for a sequence that now stays on all of a group.
        most = np.max(room, axis=0) * half
        if not (self.amounts[[i for i in free if i in whole]] <= most).all(1).any():
            for placed in before:
                self._put(*placed)
            return None
        bounds, codes, in_left, in_right, in_both = subsets(len(free))
        amounts = self.amounts[free]
        shares = (amounts / half).T
        # Each resource is a row, since columns would take twice as long.
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
