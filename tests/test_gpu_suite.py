"""The suite for a GPU, run dry: parts print figures, and a part that fails or hangs stops no other."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUITE = ROOT / "benchmarks" / "gpu_suite.py"
sys.path.insert(0, str(SUITE.parent))  # not a package

from gpu import record, runner  # noqa: E402
from gpu_suite import PARTS  # noqa: E402


def run_suite(*words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"}
    return subprocess.run([sys.executable, str(SUITE), *words], env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_cheap_parts_run_dry_and_parts_without_seconds_are_left_out(tmp_path):
    done = run_suite("machine", "loop", "head", "--dry", "--seconds", "100", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    entries = {entry["part"]: entry for entry in json.loads((tmp_path / "gpu_cpu.json").read_text())}
    assert list(entries) == ["machine", "head"]  # 200 seconds are expected of the loop
    assert "loop          left out" in done.stdout
    machine = entries["machine"]
    assert machine["card"] == "cpu" and machine["dry"] and machine["versions"]["jax"] and "error" not in machine
    assert machine["prediction"] and machine["seconds"] > 0 and machine["outcome"]["product"]["tflops"] > 0
    assert set(entries["head"]["outcome"]["forms"]) == {"fused", "portable"}


@pytest.mark.long
@pytest.mark.turn(1)
@pytest.mark.timeout(900)
def test_all_parts_run_dry(tmp_path):
    done = run_suite("all", "--dry", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {entry["part"]: entry["outcome"] for entry in json.loads((tmp_path / "gpu_cpu.json").read_text())}
    assert list(outcomes) == list(PARTS) and all(outcomes.values())
    kernels = outcomes["kernels"]
    assert kernels["long row"]["equal bits"] and kernels["many numbers"]["different"] == [0] * 4
    assert outcomes["attention"]["branches"]["kernel"] == "portable"
    assert outcomes["train"]["all kept"]["tokens_per_second"] > 0 and outcomes["loop"]
    assert outcomes["rounds_graphs"]["ms_per_token"]["rounds of 64"]["ms"] > 0
    assert all("difference" in form for form in outcomes["paged"]["one long row"].values())


def test_unknown_parts_and_folders_without_wheels_end_in_one_line(tmp_path):
    wheels = ["all", "--wheels", str(tmp_path)]
    for words, expected in ((["heads"], "no part is called 'heads'"), (wheels, "no wheels")):
        done = run_suite(*words)
        assert done.returncode == 2 and expected in done.stderr and len(done.stderr.splitlines()) == 1


PROGRAMS = {
    "fails": "print('{\"first\": 1}', flush=True); raise SystemExit('for a reason')",
    "hangs": 'import os, time; print(\'{"first": 2}\\n{"half\', flush=True); os.fork(); time.sleep(60)',
    "silent": "pass",
    "ends": "print('no figures'); print('{\"first\": 3}')",
}


def test_a_part_that_fails_or_hangs_keeps_its_figures_and_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PARTS", tmp_path)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    results = record.Results(tmp_path / "out" / "gpu_cpu.json")
    for name in (*PROGRAMS, "missing"):
        if name in PROGRAMS:
            (tmp_path / f"{name}.py").write_text(PROGRAMS[name])
        limit = 1 if name == "hangs" else 30
        results.add(name, runner.run(name, limit, dict(os.environ), tmp_path / "logs", dry=True), prediction="some")
    entries = {entry["part"]: entry for entry in json.loads((tmp_path / "out" / "gpu_cpu.json").read_text())}
    outcomes = {"fails": {"first": 1}, "hangs": {"first": 2}, "silent": None, "ends": {"first": 3}, "missing": None}
    assert {name: entry.get("outcome") for name, entry in entries.items()} == outcomes
    assert "for a reason" in entries["fails"]["error"] and entries["hangs"]["error"] == "stopped after 1 s"
    assert "no figures" in entries["silent"]["error"] and "does not exist" in entries["missing"]["error"]
    assert "error" not in entries["ends"] and results.failed
    assert len(record.Results(tmp_path / "out" / "gpu_cpu.json")._entries) == 5  # the next run appends


@pytest.mark.parametrize(
    ("card", "name"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("cpu", "cpu")]
)
def test_files_are_named_for_cards(card, name):
    assert record.short(card) == name
