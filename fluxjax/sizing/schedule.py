"""Reads a scheduled HLO module, the text of a compiled program: which collectives run, how large, and behind what.

Every computation of the module lists its instructions in the order in which they start. An asynchronous collective is a
pair of instructions, `all-gather-start` and `all-gather-done`; what is listed between the two runs meanwhile.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8, "c128": 16}  # others by the digits at the end

FASTER = 8  # an H100 writes to its memory about eight times as fast as NVLink brings data (3.35 TB/s, 450 GB/s)

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=(%[^\s,)]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MATRIX_PRODUCT = re.compile(
    r'custom_call_target="[^"]*(gemm|matmul|dot|conv|triton|attention|fmha)|calls=%[^,]*gemm|__triton_nested_gemm',
    re.I,
)
_LOOPS = ("while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class CollectiveTraffic:
    """The collectives of one kind in a run of a program, loops counted as often as they turn."""

    count: float = 0.0
    bytes: float = 0.0  # of the larger side: what a gather returns, what a scatter takes
    exposed: float = 0.0  # of `count`: nothing that takes time runs beside them
    exposed_bytes: float = 0.0

    def __add__(self, other: CollectiveTraffic) -> CollectiveTraffic:
        return CollectiveTraffic(
            *(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )

    def scaled(self, factor: float) -> CollectiveTraffic:
        return CollectiveTraffic(*(factor * value for value in dataclasses.astuple(self)))


def traffic(hlo: str) -> dict[str, CollectiveTraffic]:
    """The collectives of a run of the program, by kind (`KINDS`), as one device sees them.

    The turns of a loop count where XLA knows them, else once; of a conditional, all branches count. A collective is
    exposed unless a matrix product, a loop, or kernels that write `FASTER` times as many bytes run beside it.
    """
    computations = {name: _Computation(lines) for name, lines in _computations(hlo)}
    totals: collections.Counter[str] = collections.Counter()

    def visit(name: str, times: int) -> None:
        if name not in computations:
            return
        totals[name] += times
        for called, turns in computations[name].calls:
            visit(called, times * turns)

    visit(next(name for name, computation in computations.items() if computation.entry), 1)
    found: dict[str, CollectiveTraffic] = {}
    for name, times in totals.items():
        for kind, part in computations[name].traffic().items():
            found[kind] = found.get(kind, CollectiveTraffic()) + part.scaled(float(times))
    return found


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (name, lines) of every computation; the first line is its head."""
    head: list[str] = []
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            head = [line]
        elif line.startswith("}") and head:
            yield head[0].removeprefix("ENTRY ").split(" ", 1)[0], head
            head = []
        elif head:
            head.append(line)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    operation: str
    rest: str  # operands and attributes

    @property
    def bytes(self) -> float:
        return _bytes(self.shape)

    @property
    def kind(self) -> str:
        """The kind of collective; empty for everything else."""
        kind = self.operation.removesuffix("-start").removesuffix("-done")
        return kind if kind in KINDS else ""


class _Computation:
    def __init__(self, lines: list[str]) -> None:
        self.entry = lines[0].startswith("ENTRY")
        parsed = (_INSTRUCTION.match(line) for line in lines[1:])
        self.instructions = [_Instruction(*match.groups()) for match in parsed if match is not None]

    @property
    def calls(self) -> list[tuple[str, int]]:
        """The calls of a run of this computation: (called computation, how often it runs)."""
        found = []
        for instruction in self.instructions:
            if instruction.operation not in (*_LOOPS, "async-start"):
                continue
            trips = _TRIPS.search(instruction.rest)
            names = _CALLED.findall(instruction.rest)
            if branches := _BRANCHES.search(instruction.rest):
                names += branches[1].replace(" ", "").split(",")
            found += [(name, int(trips[1]) if trips else 1) for name in names]
        return found

    def traffic(self) -> Mapping[str, CollectiveTraffic]:
        found: dict[str, CollectiveTraffic] = {}
        started: dict[str, int] = {}
        for place, instruction in enumerate(self.instructions):
            kind = instruction.kind
            if not kind:
                continue
            if instruction.operation.endswith("-start"):
                started[instruction.name] = place
                continue
            start, size = place, instruction.bytes
            if instruction.operation.endswith("-done"):
                start = started[re.match(r"[^%]*(%[^\s,)]+)", instruction.rest)[1]]  # type: ignore[index]
                # A start has operands and results, but for all-reduce, whose two are of one size.
                size = max(size, self.instructions[start].bytes - size)
            beside = self.instructions[start + 1 : place]
            long = any(_takes_long(running) for running in beside)
            written = sum(running.bytes for running in beside if running.operation == "fusion")
            exposed = 0.0 if long or written >= FASTER * size else 1.0
            found[kind] = found.get(kind, CollectiveTraffic()) + CollectiveTraffic(1.0, size, exposed, size * exposed)
        return found


def _takes_long(instruction: _Instruction) -> bool:
    """Says whether the instruction is a loop or a matrix product: what a transfer of any size may hide behind."""
    if instruction.operation in (*_LOOPS, "dot"):
        return True
    return instruction.operation in ("custom-call", "fusion") and bool(_MATRIX_PRODUCT.search(instruction.rest))


def _bytes(shape: str) -> float:
    total = 0.0
    for dtype, dims in _ARRAY.findall(shape):
        width = BYTES.get(dtype) or int(re.findall(r"\d+", dtype)[0]) / 8
        total += width * math.prod(int(dim) for dim in dims.split(",") if dim)
    return total
