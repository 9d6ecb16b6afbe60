"""Measures what a run loses by killed servers, in pairs of runs of one seed: one run is undisturbed, in the other one
each server in turn gets SIGKILL, never while another server is down.

    python benchmarks/killed_servers.py --out runs/kills                  # three pairs, about an hour on two cores
    python benchmarks/killed_servers.py --out runs/kills --begin 800      # the last 200 of 1000 steps
    python benchmarks/killed_servers.py --config configs/vlm_sglang.py:serve --every 60 --seeds 0

Every run is `python -m fluxjax.train`; its Prometheus port says which servers are up, with which weights. Runs that are
complete in `--out` are not repeated. Prints one JSON line: for each run its seconds, its final accuracy and the number
of its training samples; for each kill its time and version, and the seconds until the server was back with the other
servers' version; whether the two runs of a pair were trained on the same prompts, with as many responses of each; and
the differences of accuracies in pairs, in points.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

from common import ROOT
from policies_learning import paired_points
from prometheus_client.parser import text_string_to_metric_families

LOOK_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Server:
    up: bool
    version: int


@dataclasses.dataclass
class Kill:
    server: str
    at: float  # seconds since the run began
    version: int  # the run's version at the kill
    back: float | None = None  # seconds until the server was up again, None: the run ended before
    back_version: int = -1


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/vlm_sglang.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--begin", type=int, default=0, help="steps that a pair has in common, by the embedded engine")
    parser.add_argument("--every", type=float, default=180.0, help="seconds between two kills")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/kills"))
    parser.add_argument("rest", nargs="*", help="more settings of both runs: --config.servers.count=3, after --")
    options = parser.parse_args(argv)
    pairs = []
    for seed in options.seeds:
        if options.begin and not _base(options, seed):
            print(f"error: the run in {options.out / f'base-{seed}'} did not end well", file=sys.stderr)
            return 1
        pair = {}
        for name in ("undisturbed", "killed"):
            folder = options.out / f"{name}-{seed}"
            if not (folder / "watched.json").exists() and not _train(options, seed, folder, name == "killed"):
                print(f"error: the run in {folder} did not end well; see {folder}.log", file=sys.stderr)
                return 1
            pair[name] = _described(folder)
        pairs.append({"seed": seed, **pair, "same_samples": _samples(options.out, seed)})
    names = ("config", "begin", "steps", "every")
    line = {"benchmark": "killed_servers"} | {name: getattr(options, name) for name in names}
    print(json.dumps(line | {"pairs": pairs} | _compared(pairs)))
    return 0


# --- one run ------------------------------------------------------------------------------------


def _base(options: argparse.Namespace, seed: int) -> bool:
    """Makes the run of `--begin` steps from which both runs of a pair continue, unless it exists. Returns whether its
    checkpoint exists now."""
    folder = options.out / f"base-{seed}"
    checkpoint = folder / "checkpoints" / str(options.begin)
    if checkpoint.exists():
        return True
    print(f"{folder.name} ...", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings = {"seed": seed, "steps": options.begin + options.steps, "run_dir": folder, "rollout.engine": "jax"}
    settings |= {"checkpoint.every": options.begin, "rollout.kv_tokens": 0, "rollout.slots": 368}
    command = [sys.executable, "-m", "fluxjax.train", f"--config={options.config}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        run = subprocess.Popen([*command, *options.rest], cwd=ROOT, stdout=log, stderr=log)
        while run.poll() is None and not checkpoint.exists():
            time.sleep(LOOK_SECONDS)
        run.kill()  # only its checkpoint is used; a checkpoint is complete or does not exist
        run.wait()
    return checkpoint.exists()


def _begin(options: argparse.Namespace, seed: int, folder: pathlib.Path) -> None:
    """Makes `folder` a run that has done the common steps."""
    if options.begin and not folder.exists():
        checkpoint = pathlib.Path("checkpoints") / str(options.begin)
        shutil.copytree(options.out / f"base-{seed}" / checkpoint, folder / checkpoint)


def _train(options: argparse.Namespace, seed: int, folder: pathlib.Path, kill: bool) -> bool:
    """Trains a run and returns whether it ended well. Writes the observations of its servers to `watched.json` in its
    folder."""
    print(f"{folder.name} ...", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _begin(options, seed, folder)
    steps = options.begin + options.steps
    settings = {"seed": seed, "steps": steps, "run_dir": folder, "report.prometheus": port}
    settings |= {"report.dump_samples_every": 1}  # records the training samples
    command = [sys.executable, "-m", "fluxjax.train", f"--config={options.config}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        run = subprocess.Popen([*command, *options.rest], cwd=ROOT, stdout=log, stderr=log)
        try:
            watched = _watch(run, port, folder, options.every if kill else float("inf"))
        finally:
            run.terminate()
            status = run.wait()
    if status != 0:
        return False
    (folder / "watched.json").write_text(json.dumps(watched))
    return True


def _watch(run: subprocess.Popen[bytes], port: int, folder: pathlib.Path, every: float) -> dict[str, Any]:
    """Looks at the servers until the run ends, and kills one server every `every` seconds if all are up."""
    began = time.monotonic()
    seen: dict[str, float] = {}  # server -> seconds until it appeared
    started: dict[str, float] = {}  # server -> seconds until it was up first
    kills: list[Kill] = []
    due = float("inf")
    while run.poll() is None:
        now = time.monotonic() - began
        servers = _servers(port)
        newest = max((server.version for server in servers.values()), default=-1)
        for name, server in servers.items():
            seen.setdefault(name, now)
            if server.up:
                started.setdefault(name, now - seen[name])
        for kill in kills:
            server = servers.get(kill.server, Server(False, -1))
            if kill.back is None and server.up and server.version >= kill.version and now > kill.at + 2:
                kill.back, kill.back_version = now - kill.at, server.version
        if servers and all(server.up for server in servers.values()) and all(kill.back for kill in kills):
            due = min(due, now + every)
            if now >= due:
                name = sorted(servers)[len(kills) % len(servers)]
                os.kill(_process(folder / "servers" / f"{name.replace(' ', '-')}.log"), signal.SIGKILL)
                kills.append(Kill(name, now, newest))
                due = now + every
        time.sleep(LOOK_SECONDS)
    return {"started": started, "kills": [dataclasses.asdict(kill) for kill in kills]}


def _servers(port: int) -> dict[str, Server]:
    """Returns the run's servers by name; empty before they appear."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
    except OSError:
        return {}
    values: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith("fluxjax_server_"):
            values[sample.labels["server"]][sample.name.removeprefix("fluxjax_server_")] = sample.value
    return {name: Server(bool(gauges["up"]), int(gauges["weight_version"])) for name, gauges in values.items()}


def _process(log: pathlib.Path) -> int:
    """Returns the id of the server process that writes to `log`: the leader of its group, not one of its children."""
    writers = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.path.samefile(folder / "fd" / "1", log):
                writers.append(int(folder.name))
        except OSError:
            continue  # the process has ended, or is another user's
    if not writers:
        raise RuntimeError(f"no process writes to {log}")
    return next(pid for pid in writers if os.getpgid(pid) == pid)


# --- results of the runs ------------------------------------------------------------------------


def _described(folder: pathlib.Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    watched = json.loads((folder / "watched.json").read_text())
    result = {
        "seconds": summary["seconds"]["total"],
        "accuracy": {source: values["end"] for source, values in sorted(summary["accuracy"].items())},
        "steps": summary["steps"],
        "samples_trained": summary["samples_trained"],
        "logprob_gap_max": float(f"{summary['logprob_gap_max']:.1e}"),
        "start_seconds": {name: round(seconds, 1) for name, seconds in sorted(watched["started"].items())},
    }
    if watched["kills"]:
        result["kills"] = [
            kill | {"at": round(kill["at"], 1), "back": kill["back"] and round(kill["back"], 1)}
            for kill in watched["kills"]
        ]
    return result


def _samples(out: pathlib.Path, seed: int) -> bool:
    """Returns whether both runs of a pair were trained on the same prompts in each step, with as many responses of
    each."""
    return _trained_on(out / f"undisturbed-{seed}") == _trained_on(out / f"killed-{seed}")


def _trained_on(folder: pathlib.Path) -> Mapping[tuple[int, str, str], int]:
    """Counts the responses that a run was trained on, by (step, source, prompt)."""
    counts: collections.Counter[tuple[int, str, str]] = collections.Counter()
    for file in sorted((folder / "samples").glob("*.jsonl")):
        for record in map(json.loads, file.read_text().splitlines()):
            counts[record["step"], record["source"], record["id"]] += 1
    return counts


def _compared(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compares the runs of each pair. `back_share` is the longest return of a killed server, in start-up times of its
    run."""
    shares = [
        kill["back"] / max(pair["killed"]["start_seconds"].values())
        for pair in pairs
        for kill in pair["killed"].get("kills", ())
        if kill["back"] is not None
    ]
    points = {
        source: paired_points(
            [pair["killed"]["accuracy"][source] for pair in pairs],
            [pair["undisturbed"]["accuracy"][source] for pair in pairs],
        )
        for source in pairs[0]["killed"]["accuracy"]
    }
    return {"back_share": round(max(shares), 2) if shares else None, "paired_points": points}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
