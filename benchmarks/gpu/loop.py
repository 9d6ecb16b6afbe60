"""Runs the whole loop of reinforcement learning, `configs/vlm.py:debug` without its check of memory, and reads its
metrics.

Learner and engine share one GPU. Missing data sets are built first (`data_seconds`). The run is stopped after 210
seconds, or earlier, so that the part takes 232 seconds at most. `first_step_seconds` is from the begin of the run to
the end of the first step of a phase, `step_seconds` the median time from the end of one step to the end of the next,
`logprob_gap` the largest mean difference of log-probabilities, in nats, between engine and learner. `nvidia-smi`, if
installed, reports twice a second the share of time in which the GPU computed anything.

Predicted before the first try: 20-40 s of compiling, then 0.15-0.35 s a step; the GPU is busy less than 15 % of the
time; the gap is below 1e-4, in float32. Three tries of 45 s, two minutes and 198 s ended before the first step of RL,
since XLA autotunes every program; the suite turns that off for this part.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import part

LIMIT, TOGETHER = 210.0, 232.0  # seconds of the run, and of the part
BUILD = "import sys; from fluxjax.tasks.embedded import ensure; ensure(sys.argv[1])"
GAP = "rollout_trainer_logprob_gap"
FEW = {  # of everything, for a dry run
    "steps": 2,
    "warm_start.steps": 0,
    "rollout.prompts_per_step": 2,
    "rollout.slots": 16,
    "packing.rows_per_device": 2,
    "model.tiny.vision_depth": 1,
    "model.tiny.vision_full_attention_layers": "(0,)",
    "evaluation.samples": 2,
}


def measure(figures: part.Figures, dry: bool) -> None:
    longest, together = (300.0, 400.0) if dry else (LIMIT, TOGETHER)  # a slow CPU may take its time
    with tempfile.TemporaryDirectory(prefix="loop-") as folder:
        run_dir = pathlib.Path(folder) / "run"
        settings = {"run_dir": run_dir, "sharding.preflight": "false", **(FEW if dry else {})}
        flags = [f"--config.{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "fluxjax.train", "--config=configs/vlm.py:debug", *flags]
        environment = dict(os.environ)
        if dry:
            environment.setdefault("JAX_PLATFORMS", "cpu")
        begin = time.time()
        building = [_started([sys.executable, "-c", BUILD, name], environment) for name in ("digits", "pans")]
        statuses = [_status(process, together / 2) for process in building]
        figures.add(data_seconds=round(time.time() - begin, 1), data_statuses=statuses)
        usage = _watch_gpu(pathlib.Path(folder) / "gpu.csv")
        began = time.time()
        end = min(began + longest, begin + together)
        run = _started(command, environment)
        try:
            while run.poll() is None and time.time() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(max(0.1, min(10.0, end - time.time())))
                figures.add(**_figures(run_dir, began))
            stopped = run.poll() is None
        finally:
            _stop(run)
            _stop(usage)
        figures.add(
            stopped=stopped,
            status=run.returncode,
            seconds=round(time.time() - began, 1),
            **_figures(run_dir, began),
            gpu=_gpu(pathlib.Path(folder) / "gpu.csv"),
        )
        figures.failed = bool(run.returncode and not stopped) or not _records(run_dir)


def _started(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """Starts a process of this project; what it prints is progress, not figures."""
    found = environment | {"PYTHONPATH": os.pathsep.join([str(part.ROOT), environment.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, cwd=part.ROOT, env=found, stdout=sys.stderr)


def _status(process: subprocess.Popen, limit: float) -> int:
    """The exit status of a process, which is stopped after `limit` seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit)
    _stop(process)
    return process.returncode


def _stop(process: subprocess.Popen | None) -> None:
    """Asks a process to end, and kills it if it does not within two seconds."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _records(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics. The last one may be half a line still."""
    records, file = [], run_dir / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def _figures(run_dir: pathlib.Path, began: float) -> dict[str, Any]:
    records = _records(run_dir)
    by_phase = {phase: [r for r in records if r["phase"] == phase] for phase in ("warm_start", "rl")}
    found: dict[str, Any] = {}
    for phase, lines in by_phase.items():
        times = [line["time"] for line in lines]
        between = [after - before for before, after in itertools.pairwise(times)]
        found[phase] = {"steps": len(lines)}
        if times:
            found[phase]["first_step_seconds"] = round(times[0] - began, 1)
        if between:
            found[phase] |= {"step_seconds": round(statistics.median(between), 3), "quickest": round(min(between), 3)}
    if gaps := [line[GAP] for line in by_phase["rl"] if GAP in line]:
        found["logprob_gap"] = max(gaps)
        found["logprob_gap_max"] = max(line[f"{GAP}_max"] for line in by_phase["rl"] if GAP in line)
    if by_phase["rl"]:
        last = by_phase["rl"][-1]
        found["last_step_seconds"] = {name[8:]: value for name, value in last.items() if name.startswith("seconds/")}
    summary = run_dir / "summary.json"
    return found | {"summary": json.loads(summary.read_text()) if summary.exists() else None}


def _watch_gpu(file: pathlib.Path) -> subprocess.Popen | None:
    """Begins to write the GPU's use and memory into a file, twice a second; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
    with file.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)


def _gpu(file: pathlib.Path) -> dict[str, float] | None:
    """The share of time, in percent, in which the GPU computed anything, and its memory in use, in MiB."""
    samples: list[list[float]] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):
            samples.append([float(value) for value in line.split(",")])
    if not samples:
        return None
    busy, memory = zip(*(sample[:2] for sample in samples), strict=True)
    latest = busy[-20:]  # ten seconds: steps, where compiling is over
    return {
        "samples": len(busy),
        "busy_percent": round(statistics.mean(busy), 1),
        "busy_percent_of_the_last_ten_seconds": round(statistics.mean(latest), 1),
        "most_memory_mib": max(memory),
    }


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
