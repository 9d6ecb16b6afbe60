"""On GPUs, all-to-alls run while attention is computed: asserted on the schedule that XLA compiles for 8 H100.

No GPU is needed, but the CUDA plugin of the installed JAX, in this environment or in a folder that `FLUXJAX_AOT` names:
`bash scripts/test.sh aot` makes one.
"""

import collections
import itertools
import pathlib
import re
import subprocess
import sys

import pytest
from cuda_ahead import cuda_environment
from turns import by_turns

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE.parents[1] / "fluxjax" / "sizing" / "targets" / "h100.txtpb"
# Attention is the portable kernel's loop, or the calls of the Triton kernels: two in a backward pass.
EVENT = re.compile(
    r"%\S+ = .* (all-to-all-start|all-to-all-done|while|custom-call)\(.*?/(\w+ward)_round(\d)_"
    r"(?:(send|return)/|(attend)/(?:while|\w+/triton_kernel_call)\")"
)
SHARDED, ALONE = (0, 1, 2), 3  # the rounds of overlap_program.py


def passes(hlo: str) -> list[tuple[str, dict[str, int]]]:
    """Every attention, forward or backward, as {operation: its place in the schedule}, of a scheduled HLO module."""
    found = []
    for computation in re.split(r"\n(?=\S)", hlo):
        places = collections.defaultdict(list)
        for place, line in enumerate(computation.splitlines()):
            if event := EVENT.search(line):
                operation, phase, j, travel, attend = event.groups()
                kind = {"all-to-all-start": "start ", "all-to-all-done": "done "}.get(operation, "")
                places[phase, f"{kind}{travel or attend} {j}"].append(place)
        for phase in ("forward", "backward"):
            mine = {name: where for (of, name), where in places.items() if of == phase}
            layers = min(map(len, mine.values()), default=0)
            # An attention begins with the first of its calls.
            mine = {name: where[:: len(where) // layers] for name, where in mine.items()}
            for layer in range(layers):
                found.append((phase, {name: where[layer] for name, where in mine.items()}))
    return found


def exposed(at: dict[str, int]) -> list[str]:
    """The transfers that nothing hides. A round's must start before the computation ahead of it and end after it began;
    its results must not be waited for before the next round's computation has begun."""
    hidden_by = dict(zip(SHARDED, (ALONE, *SHARDED), strict=False))
    wrong = [
        f"send {j}"
        for j, computed in hidden_by.items()
        if not at[f"start send {j}"] < at[f"attend {computed}"] < at[f"done send {j}"] < at[f"attend {j}"]
    ]
    following = itertools.pairwise(SHARDED)
    return wrong + [f"return {j}" for j, after in following if not at[f"attend {after}"] < at[f"done return {j}"]]


@pytest.mark.slow
@pytest.mark.parametrize("residuals", by_turns(["remat", "keep"], first=2))
def test_every_transfer_runs_behind_attention_forward_and_backward(residuals, tmp_path):
    hlo = tmp_path / "step.hlo"
    command = [sys.executable, HERE / "overlap_program.py", TARGET, hlo, residuals]
    done = subprocess.run(command, env=cuda_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    attentions = passes(hlo.read_text())
    phases = collections.Counter(phase for phase, _ in attentions)
    # XLA may write out layers of a scan, so that there are more in the program than are executed, or fewer.
    assert min(phases["forward"], phases["backward"]) >= 1
    assert [(phase, wrong) for phase, at in attentions if (wrong := exposed(at))] == []
    for _, at in attentions:  # highest degree first, in both directions, and in the attention itself
        for name in ("start send {}", "attend {}", "start return {}"):
            order = [at[name.format(j)] for j in SHARDED]
            assert order == sorted(order)


def test_a_schedule_that_waits_is_found_out():
    def schedule(*names):
        operations = {"start": "all-to-all-start", "done": "all-to-all-done"}
        lines = ["ENTRY %main () -> f32[] {"]
        for name in names:
            *kind, part, j = name.split()
            operation = operations[kind[0]] if kind else "while"
            metadata = f'metadata={{op_name="a/backward_round{j}_{part}/while"}}'
            lines.append(f"  %x = f32[8] {operation}(%y), {metadata}")
        return "\n".join([*lines, "}"])

    good = ["start send 0", "attend 3", "done send 0"]
    for j in (0, 1):
        good += [f"start send {j + 1}", f"attend {j}", f"done send {j + 1}", f"start return {j}"]
    good += ["attend 2", "start return 2", "done return 0", "done return 1", "done return 2"]
    ((phase, at),) = passes(schedule(*good))
    assert phase == "backward" and exposed(at) == []

    def swapped(first, second):
        names = list(good)
        i, j = names.index(first), names.index(second)
        names[i], names[j] = names[j], names[i]
        return exposed(passes(schedule(*names))[0][1])

    assert swapped("start send 1", "attend 0") == ["send 1"]
    assert swapped("attend 3", "done send 0") == ["send 0"]
    assert swapped("attend 2", "done return 1") == ["return 1"]
