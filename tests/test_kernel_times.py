"""The reader of GPU traces, on a made-up one: no other test has a GPU's."""

import gzip
import importlib.util
import json
import pathlib
import sys

FILE = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "gpu" / "kernel_times.py"


def test_summary_of_a_trace(tmp_path: pathlib.Path) -> None:
    spec = importlib.util.spec_from_file_location("kernel_times", FILE)
    assert spec is not None and spec.loader is not None
    kernel_times = sys.modules["kernel_times"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel_times)

    def name(kind: str, pid: int, tid: int, text: str) -> dict:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}

    def ran(tid: int, text: str, began: float, took: float, pid: int = 1) -> dict:
        return {"ph": "X", "name": text, "pid": pid, "tid": tid, "ts": began, "dur": took}

    events = [
        name("process_name", 1, 0, "/device:GPU:0"),
        name("process_name", 7, 0, "/host:CPU"),
        name("thread_name", 1, 13, "Stream #13(Compute)"),
        name("thread_name", 1, 14, "Stream #14(MemcpyD2H)"),
        name("thread_name", 1, 15, "XLA Modules"),
        name("thread_name", 7, 1, "python"),
        ran(13, "nvjet_tst_128x256", 0, 600),
        ran(13, "forward", 610, 200),  # a gap that is too short to count
        ran(13, "loop_multiply_fusion_3", 900, 100),  # behind a gap of 90
        ran(14, "MemcpyD2H", 950, 100),  # beside the kernel before it
        ran(15, "jit_accumulate", 0, 5000),  # no kernel
        ran(1, "host", 0, 9000, pid=7),
        {},
    ]
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    with gzip.open(folder / "host.trace.json.gz", "wt") as stream:
        json.dump({"traceEvents": events}, stream)

    found = kernel_times.summary(kernel_times.read(tmp_path))
    assert found["kernels"] == 4 and found["span_ms"] == 1.05 and found["kernel_ms"] == 1.0
    assert found["shares"] == {"matrix products": 0.6, "attention": 0.2, "element-wise": 0.1, "copies": 0.1}
    assert found["gaps"] == {"count": 1, "ms": 0.09, "longest_us": 90.0}
    assert found["copies_to_host"] == {"count": 1, "ms": 0.1}
    assert [kernel["name"] for kernel in found["largest"][:2]] == ["nvjet_tst_128x256", "forward"]
