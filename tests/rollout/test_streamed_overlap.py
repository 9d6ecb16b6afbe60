"""On GPUs, parts of the next layer travel while one computes: asserted on the schedule that XLA compiles for an H100.

No GPU is needed: see `tests/sharding/test_overlap.py`.
"""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import streamed_program
from cuda_ahead import cuda_environment

from rollout.streamed import DeviceSpeed, layer_weights, pass_bytes, resident_layers, streamed_places, travel

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE.parents[1] / "fluxjax" / "sizing" / "targets" / "h100.txtpb"
# Products with weights and attention: matrix products of Triton or cuBLAS, loops and calls of attention's kernel.
COMPUTE = re.compile(r" = .* (fusion|custom-call|while|dot)\(.*op_name=\"[^\"]*(dot_general|triton_kernel_call|while)")
COPY = re.compile(r"%(\S+) = .* copy-(start|done)\(%([^\s,)]+)")


def schedule(hlo):
    """The operations in the order of the schedule: "compute", ("start", name), ("done", name of its start)."""
    events = []
    for line in hlo[hlo.index("\nENTRY ") :].splitlines():
        if copy := COPY.search(line):
            name, kind, operand = copy.groups()
            if "S(5)" in line or kind == "done":
                events.append((kind, name if kind == "start" else operand))
        elif COMPUTE.search(line):
            events.append("compute")
    return events


def exposed(events):
    """The transfers that nothing hides: those with no computation between start and end."""
    starts = [name for kind, name in (event for event in events if event != "compute") if kind == "start"]
    return [
        name for name in starts if "compute" not in events[events.index(("start", name)) : events.index(("done", name))]
    ]


def planned(tokens):
    """The most parts that travel during one layer's computation, as planned for an H100."""
    text, pace = streamed_program.CONFIG, DeviceSpeed()
    size = 2 * layer_weights(text)
    compute = pace.compute_seconds(text, 1, tokens, 0, size)
    resident = resident_layers(text.num_layers, size, compute, pace.transfer_seconds(size), float("inf"))
    return max(len(parts) for _, parts in travel(text.num_layers, streamed_places(text.num_layers, resident)))


@pytest.mark.long
def test_transfers_run_behind_the_layers_computation(tmp_path):
    cases = {tokens: planned(tokens) for tokens in (4096, 8192, 16384)}
    assert list(cases.values()) == [2, 2, 4]
    words = [f"{tokens}:{parts}" for tokens, parts in cases.items()]
    command = [sys.executable, HERE / "streamed_program.py", TARGET, tmp_path, *words]
    done = subprocess.run(command, env=cuda_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    temporaries = json.loads(done.stdout)
    for tokens, parts in cases.items():
        events = schedule((tmp_path / f"{tokens}-{parts}.hlo").read_text())
        assert events.count("compute") >= 6, events  # q, k, v, attention, o, gate, up, down; some may be one
        assert len(events) - events.count("compute") == 2 * parts
        assert exposed(events) == [], (tokens, parts, events)
        assert events[0][0] == "start" and events[-1][0] == "done", events
        assert temporaries[f"{tokens}:{parts}"] < pass_bytes(streamed_program.CONFIG, 1, tokens, 0, 2)


def test_a_schedule_that_waits_is_found_out():
    def lines(*names):
        known = {
            "start": "  %copy-start.1 = (bf16[8]{0}, bf16[8]{0:S(5)}, u32[]) copy-start(%upcoming.1)",
            "done": "  %copy-done.1 = bf16[8]{0} copy-done(%copy-start.1)",
            "dot": '  %g.1 = bf16[8]{0} fusion(%x), metadata={op_name="jit(_prefill)/dot_general"}',
        }
        return schedule("\n".join(["", "ENTRY %main () -> bf16[8] {", *(known[name] for name in names), "}"]))

    assert exposed(lines("start", "dot", "done")) == []
    assert exposed(lines("dot", "start", "done")) == ["copy-start.1"] == exposed(lines("start", "done", "dot"))
