"""What benchmarks/gpu/machine_code.py reads from machine code, in made-up kernels; the benchmark that uses it."""

import json
import pathlib
import random
import subprocess
import sys

import pytest
from cuda_ahead import cuda_environment

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # not a package

from gpu.machine_code import LEAST_WORK, summary  # noqa: E402

WAIT, LAST_WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WORK = ["FMUL R1, R2, R3"] * LEAST_WORK
SCORES = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24, gsb0"]
VALUES = ["HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR16].tnspB, R88, gsb0"]


def kernel(*body: str, before: tuple[str, ...] = ()) -> str:
    """A kernel with one loop. Each turn waits for data in a loop of its own, which stands behind the kernel's end and
    branches back into the turn."""
    lines = [*before, ".L_turn:", "@!P1 BRA `(.L_wait)", ".L_there:", *body, "@P0 BRA `(.L_turn)", "EXIT"]
    lines += [".L_wait:", "SYNCS.PHASECHK.TRANS64 P1, [R1]", "@!P1 BRA `(.L_wait)", "BRA `(.L_there)"]
    text, address = [".text.kernel:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/               {line} ;")
            address += 16
    return "\n".join(text)


@pytest.mark.parametrize(
    ("body", "together", "overlapping", "hidden"),
    [
        ([*SCORES, LAST_WAIT, *WORK, *VALUES, LAST_WAIT], 0, 0, 0),
        ([*SCORES, *VALUES, LAST_WAIT, *WORK], 1, 0, 0),
        ([*SCORES, *VALUES, WAIT, *WORK, LAST_WAIT], 1, 1 / 3, 1),
        ([*SCORES, LAST_WAIT, *WORK, *VALUES, *WORK, LAST_WAIT], 0, 1 / 3, 1 / 2),
        ([*SCORES, LAST_WAIT, *WORK, *VALUES], 1, 0, 0),  # the values of a turn run beside the next turn's scores
        ([*WORK[1:], *SCORES, *WORK[1:], LAST_WAIT], 0, 0, 1 / 2),
    ],
)
def test_products_of_a_loop_overlap_by_what_is_issued_before_their_wait(body, together, overlapping, hidden):
    found = summary(kernel(*body, before=(*SCORES, *WORK, LAST_WAIT)))
    inside = sum("HGMMA" in line for line in body)
    assert (found["hgmma"], found["hmma"], found["in_loops"]) == (inside + 2, 0, inside)
    shares = found["together"], found["overlapping"], found["hidden"]
    assert shares == pytest.approx((together, overlapping, hidden), abs=1e-3)


def test_kernels_without_a_loop_or_without_such_products_have_no_shares():
    old = summary(kernel("HMMA.16816.F32.BF16 R4, R8, R12, R4", *WORK))
    assert (old["hmma"], old["in_loops"], old["overlapping"], old["hidden"]) == (1, 1, None, None)
    straight = "\n".join(f"  /*{16 * i:04x}*/  {line} ;" for i, line in enumerate([*SCORES, LAST_WAIT, "EXIT"]))
    assert summary(straight) == dict.fromkeys(("together", "overlapping", "hidden")) | {
        "hgmma": 2, "hmma": 0, "in_loops": 0}  # fmt: skip


def test_only_innermost_loops_and_the_first_function_count():
    draw = random.Random(0)
    inner = kernel(*SCORES, *VALUES, WAIT, *WORK, LAST_WAIT).replace("EXIT", "@P2 BRA `(.L_outer)")
    outer = ".L_outer:\n" + inner + "\n" + kernel(*SCORES, LAST_WAIT)
    found = summary(outer)
    assert found["in_loops"] == found["hgmma"] == 3 and found["hidden"] == 1
    noise = "\n".join(draw.sample(["// a comment", "", "\t.align 128"], 3))
    assert summary(noise + "\n" + outer) == found


@pytest.mark.slow
def test_the_benchmark_prints_figures_of_kernels_by_name():
    command = [sys.executable, str(BENCHMARKS / "sass.py"), "--only"]
    environment = cuda_environment("pjrt", "jax-triton", "triton")
    done = subprocess.run([*command, "paged 256"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout)["kernels"]
    figures = kernels["paged 256: attend"]
    assert list(kernels) == ["paged 256: attend"] and figures["spilled"] == 0 < figures["in_loops"] <= figures["hmma"]
    assert figures["registers"] * figures["threads"] * figures["programs"] <= 65536
    done = subprocess.run([*command, "none such"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "none such" in done.stderr.splitlines()[-1]
