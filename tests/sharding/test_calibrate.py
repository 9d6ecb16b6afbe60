"""`python benchmarks/calibrate.py`: help at once, clear refusals, and a file that can be planned with."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from benchmarks.cost_fit import QWEN2_5_VL_7B
from sharding.cost import CostModel
from sharding.planner.plan import ShardPlan, rounds


def run(*arguments: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    env = dict(os.environ) | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "COLUMNS": "120"}
    command = [sys.executable, "benchmarks/calibrate.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_help_loads_nothing_heavy():
    code = (
        "import sys, benchmarks.calibrate as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: print([m for m in ('jax', 'numpy', 'rich') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stderr.strip() == "[]"
    for option in ("--out", "--devices", "--quick", "--model"):
        assert option in done.stdout


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "flags", "text"),
    [
        (("--devices=1",), "", "--devices must be at least 2"),
        (("--out=/nowhere/cost.json",), "", "no folder /nowhere"),
        (("--model=gpt",), "", "no sizes of a model 'gpt'"),
        (("--devices=3",), "", "groups of two devices; 3 have none"),
        (("--devices=4",), "--xla_force_host_platform_device_count=2", "4 devices asked for, but there are 2"),
    ],
)
def test_refusals_are_one_line(arguments, flags, text, tmp_path):
    done = run(*(f"--out={tmp_path / 'cost.json'}", *arguments), flags=flags)
    assert done.returncode == 2
    assert text in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cost.json").exists()


@pytest.mark.long
def test_quick_calibration_gives_a_model_to_plan_with(tmp_path):
    out = tmp_path / "cost.json"
    done = run("--quick", "--devices=4", "--repeats=2", f"--out={out}")
    assert done.returncode == 0, done.stderr
    for text in ("measured ms", "fitted ms", "all-to-all over 4", "attention, 1 x 1024 tokens", "R2", str(out)):
        assert text in done.stdout
    cost = CostModel.load(out)
    assert cost.model == QWEN2_5_VL_7B
    assert cost.node == 4 and cost.across is None
    assert "4 x cpu" in cost.source and "forced devices of one process" in cost.source
    assert set(cost.fits) == {"attention", "within_node"}
    assert 0 < cost.attention_seconds(1000) < cost.attention_seconds(4000)
    assert 0 < cost.all_to_all_seconds(1000, 2) < cost.all_to_all_seconds(4000, 2)
    made = rounds(4, (4, 1), (0, 2))
    plan = ShardPlan(4, (4000, 500), (16e6, 25e4), (4, 1), (0, 2), made)
    assert 0 < cost.step_seconds(plan, train=False) < cost.step_seconds(plan)
