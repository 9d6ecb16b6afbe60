"""Reads the machine code of a GPU kernel (SASS, as nvdisasm prints it): its loops, and what its products overlap with.

On Hopper a warpgroup issues products (HGMMA) that run on their own. A group of products ends with the instruction that
names the scoreboard `gsb0`; `WARPGROUP.DEPBAR.LE gsb0, n` waits until at most the n newest groups run. Between a
group's last instruction and the wait that covers the group, the warp may issue other instructions:

- `together` is the share of products during which products of another group are issued. The tensor cores then have no
  gap between the two groups.
- `overlapping` is the share of products during which at least `LEAST_WORK` instructions of arithmetic are issued: a
  softmax, which would otherwise leave the tensor cores idle.
- `hidden` is the share of all arithmetic that is issued while a product runs.

Only innermost loops with products are looked at. The instructions of a loop are read twice in the order of their
addresses, and the second reading counts, so that groups may run on across the loop's end. What another warpgroup
computes meanwhile is not in the shares.

Products of older instructions (HMMA) end in the order of issue, and their warp waits where it reads a result: only
their number is counted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

LEAST_WORK = 32  # instructions; a group of eight products of 64 x 128 x 16 takes 512 cycles
PRODUCTS = ("HGMMA", "HMMA")
ARITHMETIC = ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP", "MUFU", "F2FP", "FCHK")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;/]*)")
_LABEL = re.compile(r"^\s*(\.L\w+):")
_ENDS = ("EXIT", "BRA", "RET", "KILL")


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    predicated: bool
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def waits_for(self) -> int | None:
        """The number of groups of products that may still run behind this instruction; None if it waits for none."""
        waits = re.fullmatch(r"gsb0, (0x[0-9a-f]+)\s*", self.operands) if "DEPBAR" in self.opcode else None
        return int(waits[1], 16) if waits else None


@dataclasses.dataclass
class _Group:
    """Products that are waited for together."""

    products: int = 0
    with_others: bool = False
    work: int = 0


@dataclasses.dataclass
class _Turn:
    """A turn of a loop that is in full swing."""

    waited: list[_Group] = dataclasses.field(default_factory=list)  # the groups that the turn waits for
    arithmetic: int = 0
    hidden: int = 0  # arithmetic beside a product


def summary(sass: str) -> dict[str, float | None]:
    """The products of a kernel, and those in innermost loops; the shares `together`, `overlapping` and `hidden`, which
    are None without HGMMA in a loop."""
    blocks = _blocks(sass)
    code = [instruction for block in blocks for instruction in block.code]
    counts = {name.lower(): sum(x.name == name for x in code) for name in PRODUCTS}
    inner = [[x for number in loop for x in blocks[number].code] for loop in _innermost(blocks)]
    turns = [_turn(loop) for loop in inner if any(x.name == "HGMMA" for x in loop)]
    groups = [group for turn in turns for group in turn.waited]
    products = sum(group.products for group in groups)
    arithmetic = sum(turn.arithmetic for turn in turns)
    return {
        **counts,
        "in_loops": sum(x.name in PRODUCTS for loop in inner for x in loop),
        "together": _share(sum(group.products for group in groups if group.with_others), products),
        "overlapping": _share(sum(group.products for group in groups if group.work >= LEAST_WORK), products),
        "hidden": _share(sum(turn.hidden for turn in turns), arithmetic),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def _turn(loop: Sequence[Instruction]) -> _Turn:
    running: list[_Group] = []
    issued = _Group()
    found = _Turn()
    for turn in (_Turn(), found):
        for x in loop:
            if x.name == "HGMMA":
                for group in running:
                    group.with_others = True
                issued.with_others |= bool(running)
                issued.products += 1
                if "gsb0" in x.operands:
                    running.append(issued)
                    issued = _Group()
            elif (rest := x.waits_for) is not None:
                ended = max(len(running) - rest, 0)
                turn.waited += running[:ended]
                running = running[ended:]
            elif x.name in ARITHMETIC:
                turn.arithmetic += 1
                turn.hidden += bool(running)
                for group in running:
                    group.work += 1
    return found


@dataclasses.dataclass(frozen=True)
class _Block:
    """Instructions without a branch between them, and the numbers of the blocks that may follow."""

    code: list[Instruction]
    following: set[int]


def _blocks(sass: str) -> list[_Block]:
    """The blocks of the first function, in the order of their addresses."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}  # the index of the instruction behind each label
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.search(line):
            address, predicate, opcode, operands = found.groups()
            if code and int(address, 16) <= code[-1].address:
                break  # another function
            code.append(Instruction(int(address, 16), bool(predicate), opcode, operands.strip()))
    branches = {i: _targets(x, labels) for i, x in enumerate(code) if x.name in _ENDS}
    starts = sorted({0, *(i + 1 for i in branches), *(i for found in branches.values() for i in found)} - {len(code)})
    number = {start: i for i, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        last = end - 1
        following = {number[i] for i in branches.get(last, ()) if i in number}
        if (last not in branches or code[last].predicated) and end in number:
            following.add(number[end])
        blocks.append(_Block(code[start:end], following))
    return blocks


def _targets(branch: Instruction, labels: dict[str, int]) -> list[int]:
    return [labels[name] for name in re.findall(r"\.L\w+", branch.operands) if name in labels]


def _innermost(blocks: Sequence[_Block]) -> list[list[int]]:
    """The natural loops with products that hold no smaller one, as sorted numbers of blocks."""
    above = _dominators(blocks)
    loops: dict[int, set[int]] = {}
    for tail, block in enumerate(blocks):
        for head in block.following & above[tail]:
            loops.setdefault(head, {head}).update(_between(blocks, head, tail))
    with_products = [loop for loop in loops.values() if any(x.name in PRODUCTS for i in loop for x in blocks[i].code)]
    return [sorted(loop) for loop in with_products if not any(smaller < loop for smaller in with_products)]


def _between(blocks: Sequence[_Block], head: int, tail: int) -> set[int]:
    """The blocks from which `tail` is reached without passing `head`, and `tail`."""
    found, todo = {head, tail}, [tail]
    while todo:
        end = todo.pop()
        before = {i for i, block in enumerate(blocks) if end in block.following} if end != head else set()
        todo += before - found
        found |= before
    return found


def _dominators(blocks: Sequence[_Block]) -> list[set[int]]:
    """The blocks through which every way to a block leads, itself included; all blocks for one that nothing reaches."""
    everything = set(range(len(blocks)))
    above = [{0} if i == 0 else set(everything) for i in everything]
    changed = True
    while changed:
        changed = False
        for i in range(1, len(blocks)):
            ways: Iterable[set[int]] = [above[j] for j, block in enumerate(blocks) if i in block.following]
            new = {i} | set.intersection(*ways) if ways else above[i]
            changed |= new != above[i]
            above[i] = new
    return above
