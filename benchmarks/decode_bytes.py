"""Counts the bytes that a decoded token reads from a GPU's memory, in the engine's program compiled for an H100.

    python benchmarks/decode_bytes.py                       Qwen2.5-7B's sizes, two layers
    python benchmarks/decode_bytes.py --layers 1 --portable     another depth, and attention without our kernel

No GPU is needed: the compiler is found as `scripts/test.sh aot` does, or installed by `scripts/install_aot.sh`. Prints
one JSON line. `over_floor` is the largest of the cases' ratios; the floor is the weights, without the embedding table,
plus the keys and values of all samples, each read once. Nothing is timed. How bytes are counted: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from gpu_compiler import find_compiler

from fluxjax.base.errors import ConfigError
from fluxjax.sizing.topology import Topology

SHAPE = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
         "num_key_value_heads": 4}  # fmt: skip
CASES = {"64 x 4096": [4096] * 64, "63 x 1024 + 1 x 32768": [1024] * 63 + [32768]}
STEPS = 4  # tokens of a round
BLOCK = 64  # entries of a turn of the portable form's loop
WIDTHS = {"pred": 1, "bf16": 2, "f16": 2}  # bytes of a number; others have their bits in their names
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "after-all", "partition-id"}
LOOKS_UP = {"gather", "dynamic-slice", "slice"}  # read as much as they return
KERNEL = "paged_kernels_attend"
_INSTRUCTION = re.compile(r"\s+(ROOT )?(%?[\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)")
_CALLED = re.compile(r"(body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]+\d+\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def bytes(self) -> int:
        """The bytes of its result."""
        total = 0
        for dtype, dims in _ARRAY.findall(self.shape):
            width = WIDTHS.get(dtype) or max(int(re.findall(r"\d+", dtype)[0]) // 8, 1)
            total += width * math.prod(int(dim) for dim in dims.split(",") if dim)
        return total

    @property
    def called(self) -> list[str]:
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        named = [name for _, name in _CALLED.findall(self.rest)]
        return named + ([name.strip(" %") for name in branches[1].split(",")] if branches else [])


class Program:
    """A compiled program. `kernel_bytes` are what a call of the kernel of `sharding/kernels/paged.py` reads; `turns`
    is how often the portable form's loop runs."""

    def __init__(self, hlo: str, kernel_bytes: int, turns: int) -> None:
        self.kernel_bytes, self.turns, self.kernels = kernel_bytes, turns, 0
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.main = name = ""
        for line in hlo.splitlines():
            if line.endswith("{") and not line.startswith(" "):
                name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
                self.main = name if line.startswith("ENTRY ") else self.main
                self.computations[name] = {}
            elif name and (found := _INSTRUCTION.match(line)):
                root, label, shape, kind, rest = found.groups()
                operands = tuple(x.lstrip("%") for x in re.findall(r"%[\w.-]+", rest.split("), ", 1)[0]))
                self.computations[name][label.lstrip("%")] = Instruction(
                    label.lstrip("%"), shape, kind, operands, rest, bool(root)
                )

    def round(self) -> tuple[int, int]:
        """The bytes that a round reads outside its loop over tokens, and in a turn of the loop."""
        (body,) = (dict(_CALLED.findall(x.rest))["body"] for x in self._main if x.kind == "while")
        return sum(self._read(x, self.main) for x in self._main if x.kind != "while"), self.read(body)

    @property
    def _main(self) -> list[Instruction]:
        return list(self.computations[self.main].values())

    def read(self, name: str) -> int:
        """The bytes that a computation inside the loop over tokens reads."""
        return sum(self._read(x, name) for x in self.computations[name].values())

    def _read(self, x: Instruction, around: str) -> int:
        """The bytes that an instruction reads. A conditional counts as its branch that reads least, since no sample of
        these rounds limits its candidates. A loop whose number of turns XLA does not know is the portable form's."""
        if x.kind == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', x.rest)
            return self.read(dict(_CALLED.findall(x.rest))["body"]) * (int(trips[1]) if trips else self.turns)
        if x.kind == "conditional":
            return min(map(self.read, x.called))
        if x.kind in ("call", "async-start"):
            return sum(map(self.read, x.called))
        if x.kind == "custom-call" and KERNEL in x.rest:
            self.kernels += 1
            return self.kernel_bytes
        if x.kind in FREE or x.kind.endswith("-done"):
            return 0
        return self._operands(x, self.computations[around])

    def _operands(self, x: Instruction, around: dict[str, Instruction]) -> int:
        """The bytes of an instruction's operands, of which it may read a part, or replace a part in place."""
        if x.kind != "fusion":
            return self._used(x, [around[name] for name in x.operands])
        inner = self.computations[x.called[0]]
        total = 0
        for parameter in (y for y in inner.values() if y.kind == "parameter"):
            whole, parts = parameter.bytes, 0
            for reader, operand in self._readers(inner, parameter.name):
                if reader.kind in LOOKS_UP and reader.operands[0] == operand:
                    parts += reader.bytes
                elif reader.kind in ("scatter", "dynamic-update-slice") and reader.operands[0] == operand:
                    continue
                else:
                    parts = whole
                    break
            total += min(parts, whole)
        return total

    def _readers(self, inner: dict[str, Instruction], name: str) -> list[tuple[Instruction, str]]:
        """The instructions that read a parameter, also through reshapes, with the operand that they read."""
        found: list[tuple[Instruction, str]] = []
        for x in inner.values():
            if name in x.operands:
                through = x.kind in ("bitcast", "reshape") and not x.root
                found += self._readers(inner, x.name) if through else [(x, name)]
        return found

    @staticmethod
    def _used(x: Instruction, operands: list[Instruction]) -> int:
        if x.kind in LOOKS_UP:
            return x.bytes + sum(y.bytes for y in operands[1:])
        if x.kind in ("scatter", "dynamic-update-slice"):
            return sum(y.bytes for y in operands[1:])
        return sum(y.bytes for y in operands)


def measure(layers: int, portable: bool) -> dict[str, Any]:
    """Compiles a round of each case. Raises ConfigError if there is no compiler for GPUs."""
    import jax

    import models
    from models.registry import read_config
    from rollout.lowered import EngineArrays
    from rollout.requests import EngineLimits
    from rollout.slots import PAGE_TOKENS, pages_for
    from sharding.mesh import Target, compiling_for

    device = Topology.parse("1x1xh100").devices()[0]
    config = read_config({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
                          "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                          "max_position_embeddings": 131072, "num_hidden_layers": layers, **SHAPE})  # fmt: skip
    model, found = models.abstract(config), {}
    text = config.text
    for name, lengths in CASES.items():
        began = time.perf_counter()
        longest = max(lengths) + STEPS
        pages = sum(pages_for(length + STEPS) for length in lengths)
        limits = EngineLimits.of(config, len(lengths), longest, steps_per_sync=STEPS, kv_tokens=pages * PAGE_TOKENS)
        arrays = EngineArrays(model, limits, "bfloat16", [device])
        with compiling_for(Target.of(device) if not portable else Target("gpu")):
            lowered = arrays.decode()
        hlo = lowered.compile().as_text() or ""
        entry = 2 * 2 * text.num_kv_heads * text.head_dim  # bytes of a token's keys and values in a layer
        table = 4 * sum(map(pages_for, lengths)) * text.num_kv_heads
        queries = 2 * len(lengths) * text.num_heads * text.head_dim
        program = Program(hlo, sum(lengths) * entry + table + queries, -(-max(lengths) // BLOCK))
        outside, inside = program.round()
        if not portable and not program.kernels:
            raise ConfigError("the program for an H100 does not call the kernel of sharding/kernels/paged.py")
        weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays.params))
        weights -= 2 * text.vocab_size * text.hidden_size  # few rows of the embedding table are read
        floor = weights + layers * sum(lengths) * entry
        read = inside + outside // STEPS
        found[name] = {"gb": round(read / 1e9, 3), "outside_the_loop_gb": round(outside / STEPS / 1e9, 3),
                       "floor_gb": round(floor / 1e9, 3), "over_floor": round(read / floor, 3),
                       "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip
    return {
        "benchmark": "decode_bytes",
        "over_floor": max(case["over_floor"] for case in found.values()),
        "layers": layers,
        "form": "portable" if portable else "kernel",
        "cases": found,
        "jax": jax.__version__,
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--portable", action="store_true", help="attention as on GPUs that our kernels do not know")
    options = parser.parse_args(argv)
    find_compiler()
    try:
        print(json.dumps(measure(options.layers, options.portable)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
