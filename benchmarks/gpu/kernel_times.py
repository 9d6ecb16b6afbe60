"""Reads a trace of `jax.profiler`: the largest kernels of a GPU, its gaps, and its copies to the host."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

GAP_US = 20.0  # any two kernels have shorter gaps between them
LARGEST = 25
KINDS = {  # by parts of a kernel's name, in small letters; the first that fits counts
    "copies": ("memcpy", "memset"),
    "attention": ("hopper_", "flash_kernels", "paged_kernels", "key_gradients", "query_gradients", "fmha", "flash"),
    "head": ("head_kernels", "softmax_sums", "logit_gradients"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "dot_", "splitk", "gemv"),
    "element-wise": ("fusion", "loop", "input_", "reduce", "transpose", "copy", "concatenate", "scatter", "gather",
                     "select", "broadcast", "wrapped", "convert", "softmax", "rng", "sort", "slice"),
}  # fmt: skip
EXACT = {"forward": "attention", "attend": "attention"}  # jax-triton names some kernels by their function alone


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel or copy that ran on the GPU; times in microseconds."""

    name: str
    began: float
    took: float


def read(folder: pathlib.Path) -> list[Kernel]:
    """The kernels and copies of the first GPU in the newest trace below a folder; without a GPU, what the threads of
    the CPU computed."""
    file = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    gpus = sorted((name, pid) for pid, name in processes.items() if "/device:GPU" in name)
    # Other threads of a GPU's process repeat the kernels by module and by operation.
    lines = {key for key, name in threads.items() if gpus and key[0] == gpus[0][1] and name.startswith("Stream")}
    if not gpus:
        lines = {key for key, name in threads.items() if "XLA" in name or "Eigen" in name}
    timed = (e for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in lines)
    return sorted((Kernel(e["name"], e["ts"], e.get("dur", 0.0)) for e in timed), key=lambda kernel: kernel.began)


def kind(name: str) -> str:
    small = name.lower()
    if small in EXACT:
        return EXACT[small]
    return next((kind for kind, parts in KINDS.items() if any(part in small for part in parts)), "others")


def summary(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """The figures of a trace: times in milliseconds, shares of the time that kernels took."""
    if not kernels:
        return {"kernels": 0}
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    by_kind: collections.Counter[str] = collections.Counter()
    for kernel in kernels:
        by_name[kernel.name].append(kernel.took)
        by_kind[kind(kernel.name)] += kernel.took
    total = sum(by_kind.values()) or 1.0
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    copies = [kernel.took for kernel in kernels if "memcpy" in kernel.name.lower() and "d2h" in kernel.name.lower()]
    gaps = list(_gaps(kernels))
    end = max(kernel.began + kernel.took for kernel in kernels)
    return {
        "kernels": len(kernels),
        "span_ms": round((end - kernels[0].began) / 1e3, 3),
        "kernel_ms": round(total / 1e3, 3),
        "shares": {name: round(took / total, 4) for name, took in by_kind.most_common()},
        "gaps": {"count": len(gaps), "ms": round(sum(gaps) / 1e3, 3), "longest_us": round(max(gaps, default=0.0), 1)},
        "copies_to_host": {"count": len(copies), "ms": round(sum(copies) / 1e3, 3)},
        "largest": [
            {"name": name[:100], "kind": kind(name), "ms": round(sum(took) / 1e3, 3), "count": len(took)}
            for name, took in largest
        ],
    }


def _gaps(kernels: Iterable[Kernel]) -> Iterable[float]:
    """The times of more than `GAP_US` in which the GPU was idle."""
    busy_until: float | None = None
    for kernel in kernels:
        if busy_until is not None and kernel.began - busy_until > GAP_US:
            yield kernel.began - busy_until
        busy_until = max(busy_until or 0.0, kernel.began + kernel.took)
