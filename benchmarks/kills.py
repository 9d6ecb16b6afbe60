"""Measures what a run over several processes loses by a process that is killed or frozen at a random moment.

    python benchmarks/kills.py --out runs/killed                       # twenty seeds of SIGKILL, twenty of SIGSTOP
    python benchmarks/kills.py --out runs/killed --seeds 3 --kinds stop --processes 4

Each run is `python -m fluxjax.launch` on this machine, with the synchronous policy and embedded engines. One of its
processes gets the signal, once, at a random moment of the seconds that an undisturbed run takes: in one of every four
runs from all these seconds, in three from the seconds after the first step, since most of such a short run is its
start. Runs that are complete in `--out` are not repeated. Prints one JSON line: for each run the process, the second
and the phase; `ended`, seconds until every process of that attempt had ended; `back`, seconds until the next attempt
had made a step; `equal`, whether the final weights are those of the undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

from common import ROOT

SETTINGS = {
    "warm_start.steps": 3,
    "steps": 12,
    "evaluation.samples": 8,
    "evaluation.every": 2,
    "checkpoint.every": 1,
    "rollout.prompts_per_step": 6,
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
LIMIT = 600.0  # seconds after which a run counts as hanging
STEP = re.compile(r"^(RL|warm start) \d+/", re.MULTILINE)
LOOK_SECONDS = 0.05


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/vlm.py:debug")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=20, help="runs of each kind")
    parser.add_argument("--kinds", nargs="+", default=list(SIGNALS), choices=list(SIGNALS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/killed"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    whole = _once(options, "undisturbed", lambda folder: _undisturbed(options, folder))
    runs = []
    for kind in options.kinds:
        for seed in range(options.seeds):
            name = f"{kind}-{seed}"
            runs.append(_once(options, name, lambda folder, k=kind, s=seed: _disturbed(options, folder, k, s, whole)))
    settings = {name: getattr(options, name) for name in ("config", "processes", "seeds")}
    print(json.dumps({"benchmark": "kills", **settings, "undisturbed": whole, "runs": runs} | _summary(runs)))
    return 0


def _once(options: argparse.Namespace, name: str, run: Any) -> dict[str, Any]:
    """Calls `run`, unless the file of an earlier call has its result, and returns the result."""
    file = options.out / f"{name}.json"
    if not file.exists():
        print(f"{name} ...", file=sys.stderr)
        result = run(options.out / name)
        file.write_text(json.dumps(result))
        print(f"{name}: {result}", file=sys.stderr)
    return json.loads(file.read_text())


def _undisturbed(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    began = 0.0
    first = 0.0
    for _ in range(2):  # the first one compiles
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        run = _start(options, folder)
        while not STEP.search(_log(folder)) and run.poll() is None:
            _look(began)
        first = time.monotonic() - began
        status = run.wait(LIMIT)
        if status:
            raise RuntimeError(f"the undisturbed run ended with {status}: see {folder}.log")
    seconds = {"first_step": round(first, 1), "seconds": round(time.monotonic() - began, 1)}
    return seconds | {"weights": _weights(folder)}


def _disturbed(
    options: argparse.Namespace, folder: pathlib.Path, kind: str, seed: int, whole: Mapping[str, Any]
) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    draw = random.Random(f"{kind} {seed}")
    least = whole["first_step"] if seed % 4 else 0.02 * whole["seconds"]
    moment, victim = draw.uniform(least, 0.95 * whole["seconds"]), draw.randrange(options.processes)
    began = time.monotonic()
    run = _start(options, folder)
    time.sleep(moment)
    gang = _children(run.pid)
    result = {"kind": kind, "seed": seed, "process": victim, "moment": round(moment, 1), "phase": _phase(folder)}
    if len(gang) < options.processes or run.poll() is not None:
        run.wait(LIMIT)
        return result | {"late": True}  # the run ended before the signal
    os.kill(gang[victim], SIGNALS[kind])
    killed, said = time.monotonic(), len(_log(folder))
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in gang):
        _look(began)
    result["ended"] = round(time.monotonic() - killed, 1)
    while not STEP.search(_log(folder)[said:].partition("goes on from")[2]) and run.poll() is None:
        _look(began)
    result["back"] = round(time.monotonic() - killed, 1)
    status = run.wait(max(LIMIT - (time.monotonic() - began), 1.0))
    return result | {"status": status, "equal": status == 0 and _weights(folder) == whole["weights"]}


def _start(options: argparse.Namespace, folder: pathlib.Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fluxjax.launch", "--processes", str(options.processes), "--"]
    command += [f"--config={options.config}", f"--config.run_dir={folder}"]
    command += [f"--config.{name}={value}" for name, value in SETTINGS.items()]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, stdout=log, stderr=log)


def _children(pid: int) -> list[int]:
    """Returns the ids of a process's children, in the order in which they were started."""
    return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _look(began: float) -> None:
    if time.monotonic() > began + LIMIT:
        raise TimeoutError("the run hangs")
    time.sleep(LOOK_SECONDS)


def _log(folder: pathlib.Path) -> str:
    return folder.with_name(f"{folder.name}.log").read_text()


def _phase(folder: pathlib.Path) -> str:
    """Returns the phase that process 0 has reported last; `start` before it has reported any."""
    lines = [line for line in _log(folder).splitlines() if re.match(r"RL|warm start|held out|all \d+ steps", line)]
    return re.sub(r" \|.*|:.*", "", lines[-1]) if lines else "start"


def _weights(folder: pathlib.Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    disturbed = [run for run in runs if "ended" in run]
    if not disturbed:
        return {}
    return {
        "ended_max": max(run["ended"] for run in disturbed),
        "back_median": statistics.median(run["back"] for run in disturbed),
        "back_max": max(run["back"] for run in disturbed),
        "equal": sum(run["equal"] for run in disturbed),
        "made": len(disturbed),
        "late": len(runs) - len(disturbed),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
