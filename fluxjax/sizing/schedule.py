"""Reads a scheduled HLO module, the text of a compiled program: its collectives, their sizes, the work that hides them.

Every computation of the module lists its instructions in the order in which they start. An asynchronous collective is a
pair of instructions, such as `all-gather-start` and `all-gather-done`; instructions between the two run meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Sequence

import jax

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8, "c128": 16}  # others: bits in the name / 8

FASTER = 8  # an H100 writes to its memory about eight times as fast as NVLink brings data (3.35 TB/s, 450 GB/s)

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=(%[^\s,)]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MATRIX_PRODUCT = re.compile(
    r'custom_call_target="[^"]*(gemm|matmul|dot|conv|triton|mosaic|attention|fmha)|calls=%[^,]*gemm|__triton_nested_gemm',
    re.I,
)
_LOOPS = ("while", "conditional", "call")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CollectiveTraffic:
    """The collectives of one kind in one execution of a program. Collectives of a loop count for each iteration."""

    count: float = 0.0
    bytes: float = 0.0  # the larger of operands and results; of a synchronous collective, the results
    exposed: float = 0.0  # number of collectives that no work hides (`traffic`)
    exposed_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    operation: str
    rest: str  # operands and attributes


def traffic(hlo: str) -> dict[str, CollectiveTraffic]:
    """Returns the collectives of one execution of the program, by kind (`KINDS`), as one device sees them. A loop
    counts as often as XLA says that it iterates, else once; all branches of a conditional count. A collective is
    exposed unless long work (`_takes_long`), or kernels that write `FASTER` times as many bytes, run beside it."""
    computations, main = _computations(hlo)
    found: dict[str, CollectiveTraffic] = {}

    def visit(name: str, times: int) -> None:
        instructions = computations.get(name, [])
        for place, instruction in enumerate(instructions):
            kind = instruction.operation.removesuffix("-done")
            if kind in KINDS:
                sent = jax.tree.map(lambda value: times * value, _collective(instructions, place))
                found[kind] = jax.tree.map(operator.add, found.get(kind, CollectiveTraffic()), sent)
            if instruction.operation in (*_LOOPS, "async-start"):
                trips = _TRIPS.search(instruction.rest)
                called = _CALLED.findall(instruction.rest)
                if branches := _BRANCHES.search(instruction.rest):
                    called += branches[1].replace(" ", "").split(",")
                for inner in called:
                    visit(inner, times * (int(trips[1]) if trips else 1))

    visit(main, 1)
    return found


def _computations(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Returns the instructions of every computation by its name, and the name of the entry computation."""
    found: dict[str, list[_Instruction]] = {}
    name, main = "", ""
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0]
            main = name if line.startswith("ENTRY ") else main
            found[name] = []
        elif name and (match := _INSTRUCTION.match(line)):
            found[name].append(_Instruction(*match.groups()))
    return found, main


def _collective(instructions: Sequence[_Instruction], place: int) -> CollectiveTraffic:
    """Returns the traffic of the collective that ends with the instruction at `place`."""
    end = instructions[place]
    start, size = place, _bytes(end.shape)
    if end.operation.endswith("-done"):
        begun = re.match(r"[^%]*(%[^\s,)]+)", end.rest)[1]  # type: ignore[index]
        start = next(at for at, instruction in enumerate(instructions) if instruction.name == begun)
        # The shape of a start has operands and results; of all-reduce only results, which are as large as the operands.
        size = max(size, _bytes(instructions[start].shape) - size)
    beside = instructions[start + 1 : place]
    written = sum(_bytes(running.shape) for running in beside if running.operation == "fusion")
    exposed = 0.0 if any(map(_takes_long, beside)) or written >= FASTER * size else 1.0
    return CollectiveTraffic(1.0, size, exposed, size * exposed)


def _takes_long(instruction: _Instruction) -> bool:
    """Says whether this is a matrix product, loop, conditional or call: each may hide a transfer of any size."""
    if instruction.operation in (*_LOOPS, "dot"):
        return True
    return instruction.operation in ("custom-call", "fusion") and bool(_MATRIX_PRODUCT.search(instruction.rest))


def _bytes(shape: str) -> float:
    total = 0.0
    for dtype, dims in _ARRAY.findall(shape):
        width = BYTES.get(dtype) or int(re.findall(r"\d+", dtype)[0]) / 8
        total += width * math.prod(int(dim) for dim in dims.split(",") if dim)
    return total
