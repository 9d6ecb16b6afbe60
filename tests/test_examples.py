"""Every file of `examples/` runs as its own words say, for fewer steps, and shows what it did."""

import os
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT

SHOWN = {
    "own_reward": "response dcab: reward 0.75",
    "own_data": "64 pictures to train on",
    "own_policy": "hopeless prompts were replaced",
    "own_algorithm": "nats a token",
}
LONG = ("own_data", "own_policy", "own_algorithm")


def test_every_example_is_run() -> None:
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} == SHOWN.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in SHOWN])
def test_example(name: str, tmp_path: pathlib.Path) -> None:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"  # the last one counts
    command = [sys.executable, f"examples/{name}.py", f"--config.run_dir={tmp_path / 'run'}", "--config.steps=2"]
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert SHOWN[name] in done.stdout
    assert "all 2 steps are done" in done.stdout + done.stderr
