"""Measures runs over many processes: the cost of process 0's decisions, how a step scales, and what ODC gains if only
balance counts.

    python benchmarks/hosts.py                                      all three parts
    python benchmarks/hosts.py --part controller --processes 1 2 4 --scripted 64 512
    python benchmarks/hosts.py --part waiting --settings longalign:4 --minibatches 24

Parts: `controller` times process 0's work for the other processes in a step (planning, sending their rows, receiving
their agreement) and counts the bytes, for real processes and for scripted ones that read and answer but compute
nothing; `scaling` compares a step of one process with a step of two on twice the batch, each pinned to a core, by size
of the model; `waiting` compares ODC with LB-Mini and collective FSDP with LB-Micro on eight real processes that wait
instead of computing, as long as ODC's cost model says.

Prints one JSON line on standard output and its progress on standard error. `benchmarks/README.md` says more.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import numpy as np
from common import Team, WorkerError, cores, spread
from hosts_worker import MODELS
from odc_simulated import METHODS, METHODS_RL, lengths_of, work

from benchmarks.packing_baselines import MicrobatchSchedule, makespan
from sharding.planner.plan import Limits

PARTS = ("controller", "scaling", "waiting")
STEP_SECONDS = 10.0  # seconds of a step; process 0 should decide in less than a hundredth of them
RANKS = 8
SIDES = ("collective_lb_micro", "odc_lb_mini")
SETTINGS = (
    "longalign:1",
    "longalign:2",
    "longalign:4",
    "longalign:8",
    "swe_smith:2",
    "swe_smith:4",
    "aime:2",
    "aime:4",
)
GOLDEN = "longalign:4"  # the golden setting of ODC's parametric study; the paper reports a gain of 1.34
STRATEGIES = ("fsdp", "ulysses", "flex_ulysses", "odc")


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 with one line on standard error for a process that failed, 2 for input that can't be."""
    options = _parser().parse_args(argv)
    parts = options.part or list(PARTS)
    result: dict[str, Any] = {
        "benchmark": "hosts",
        "cores": cores(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    try:
        if "controller" in parts:
            result |= controller(options)
        if "scaling" in parts:
            result["weak_scaling"] = scaling(options)
        if "waiting" in parts:
            result |= waiting(options)
    except (WorkerError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorkerError) else 2
    print(json.dumps(result))
    return 0


# --- process 0's work for all processes -----------------------------------------------------------


def controller(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, by number of processes, the seconds of each task of process 0 in a step, and the bytes it sends."""
    found: dict[str, Any] = {}
    for processes in options.processes:
        with Team("hosts_worker.py", _told(options, strategy="fsdp"), {}, processes) as team:
            found[str(processes)] = _controlled(team, processes, options) | {"followers": "real"}
    for processes in options.scripted:
        with Team("hosts_worker.py", _told(options, strategy="fsdp", scripted=processes), {}, 1) as team:
            found[str(processes)] = _controlled(team, processes, options) | {"followers": "scripted"}
    several = [figures for figures in found.values() if figures["bytes_a_process"]]
    return {
        "controller": {
            "responses_a_process": options.groups * options.group_size,
            "devices_a_process": options.devices,
            "by_processes": found,
        },
        "controller_share": max((figures["share"] for figures in found.values()), default=0.0),
        "bytes_a_process_largest_over_smallest": round(
            max((figures["bytes_a_process"] for figures in several), default=0)
            / max(min((figures["bytes_a_process"] for figures in several), default=1), 1),
            3,
        ),
    }


def _told(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    names = ("groups", "group_size", "devices")
    return {name: getattr(options, name) for name in names} | more


def _controlled(team: Team, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    answers = []
    for repeat in range(options.warmup + options.repeats):
        answer = team.ask(do="tell")[0]
        _say(f"{processes} processes: {json.dumps(answer)}{' (warm-up)' if repeat < options.warmup else ''}")
        if repeat >= options.warmup:
            answers.append(answer)
    team.finish()
    seconds = {name: spread([answer["seconds"][name] for answer in answers]) for name in answers[0]["seconds"]}
    parts = ("plan", "send")
    whole = statistics.median(sum(answer["seconds"][part] for part in parts) for answer in answers)
    size, told = statistics.median(answer["bytes"] for answer in answers), answers[0]["tokens_told"]
    return {
        "seconds": seconds,
        "share": round(whole / STEP_SECONDS, 5),
        "bytes": size,
        "bytes_a_process": round(size / (processes - 1)) if processes > 1 else 0,
        "bytes_a_token": round(size / told, 2) if told else 0,  # 0: process 0 may have all of few groups
        "tokens": answers[0]["tokens"],
    }


# --- a step of one process, and of two with twice the batch ---------------------------------------


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, by model and strategy, the tokens a second of two processes over twice those of one: 1 is perfect.
    `machine` is this ratio for two processes that do not communicate: the machine causes its difference to 1."""
    return {
        model: {"machine": _scaled(model, "fsdp", options, strangers=True)}
        | {strategy: _scaled(model, strategy, options) for strategy in options.strategies}
        for model in options.models
    }


def _scaled(model: str, strategy: str, options: argparse.Namespace, strangers: bool = False) -> dict[str, Any]:
    """Times steps of one process, alternating with steps of two processes with twice the prompts. If two processes
    refuse the strategy, returns their reason."""
    settings = {"groups": 4, "group_size": 4, "devices": 1, "strategy": strategy, "model": model, "row": options.row}
    with (
        Team("hosts_worker.py", settings, {}, 1, pinned=True) as single,
        Team("hosts_worker.py", settings | {"strangers": strangers}, {}, 2, pinned=True) as pair,
    ):
        if refused := pair.about.get("refused"):
            return {"refused": refused}
        seconds: dict[str, list[float]] = {"one": [], "two": []}
        for repeat in range(options.warmup + options.repeats):
            for name, team in (("one", single), ("two", pair)):
                took = max(answer["seconds"] for answer in team.ask(do="step"))
                warm_up = repeat < options.warmup
                _say(f"{model}, {strategy}, {name}: {took:.3f} s{' (warm-up)' if warm_up else ''}")
                if not warm_up:
                    seconds[name].append(took)
        ends = {"one": single.finish()[0], "two": pair.finish()[0]}
    tokens = {"one": ends["one"]["tokens"], "two": ends["two"]["tokens"] * (2 if strangers else 1)}
    rate = {name: tokens[name] / statistics.median(seconds[name]) for name in seconds}
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "efficiency": round(rate["two"] / (2 * rate["one"]), 3),
        "parameters": ends["one"]["parameters"],
        "tokens": tokens,
    }


# --- ODC against collective FSDP, waits instead of computation ------------------------------------


def waiting(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the speedup by ODC on eight real processes, by data set and samples a device in a minibatch."""
    found: dict[str, Any] = {}
    with Team("hosts_waiting.py", {}, {"NPROC": "2"}, RANKS) as team:
        for barrier in ("microbatch", "minibatch"):  # opens connections, compiles programs
            team.ask(do="minibatch", seconds=[[0.0, 0.0]] * RANKS, barrier=barrier)
        for setting in options.settings:
            found[setting] = _gain(team, setting, options)
        team.finish()
    golden = found.get(GOLDEN, {}).get("gain")
    return {"odc_speedup_8_ranks": golden, "paper_measured": 1.34, "waiting": found}


def _gain(team: Team, setting: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the time of collective FSDP over that of ODC, summed over the medians of the same minibatches."""
    data, size = setting.split(":")
    schedules = _schedules(data, int(size), options.minibatches)
    scale = options.ideal * RANKS * len(schedules) / sum(sum(by_side[SIDES[0]].work) for by_side in schedules)
    seconds: dict[str, list[list[float]]] = {side: [[] for _ in schedules] for side in SIDES}
    for repeat in range(options.waiting_repeats):
        for index, by_side in enumerate(schedules):
            for side in SIDES if (repeat + index) % 2 == 0 else SIDES[::-1]:
                barrier = METHODS[side][1]
                loads = scale * by_side[side].loads()
                microbatches = [
                    [load for load in device_loads if load or barrier == "microbatch"]
                    for device_loads in loads.tolist()
                ]
                answers = team.ask(do="minibatch", seconds=microbatches, barrier=barrier)
                seconds[side][index].append(max(answer["seconds"] for answer in answers))
    total = {side: sum(map(statistics.median, values)) for side, values in seconds.items()}
    ideal = {side: scale * sum(makespan(by_side[side], METHODS[side][1]) for by_side in schedules) for side in SIDES}
    gain = total[SIDES[0]] / total[SIDES[1]]
    _say(f"{setting}: {gain:.3f}, predicted {ideal[SIDES[0]] / ideal[SIDES[1]]:.3f}")
    return {
        "gain": round(gain, 3),
        "predicted_by_the_schedules": round(ideal[SIDES[0]] / ideal[SIDES[1]], 3),
        "seconds": {side: round(value, 3) for side, value in total.items()},
        "seconds_predicted": {side: round(value, 3) for side, value in ideal.items()},
        "minibatches": len(schedules),
        "repeats": options.waiting_repeats,
    }


def _schedules(data: str, size: int, count: int) -> list[dict[str, MicrobatchSchedule]]:
    """Returns the schedules of both sides for random minibatches of ODC's 1.5B model."""
    lengths = lengths_of(data, "1.5B")
    methods = METHODS_RL if data == "aime" else METHODS
    limits, rng = Limits(tokens_per_device=lengths.longest), np.random.default_rng(0)
    drawn = [lengths.draw(rng, RANKS * size) for _ in range(count)]
    return [
        {side: methods[side][0](minibatch, RANKS, limits, work=work("1.5B", minibatch)) for side in SIDES}
        for minibatch in drawn
    ]


# --- command line ---------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _setting(text: str) -> str:
    data, _, size = text.partition(":")
    if data not in ("longalign", "swe_smith", "aime") or not size.isdecimal() or int(size) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not like longalign:4")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of controller and scaling (default 5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument(
        "--models", choices=MODELS, nargs="*", default=["3M", "20M"], help="of scaling (default 3M 20M)"
    )
    parser.add_argument(
        "--strategies", choices=STRATEGIES, nargs="*", default=STRATEGIES, help="of scaling (default all)"
    )
    parser.add_argument(
        "--row", type=int, default=2048, help="tokens of a device's row, of scaling: more are fewer microbatches "
        "(default 2048)",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4], help="real ones (default 1 2 4)")
    parser.add_argument("--scripted", type=int, nargs="*", default=[64, 512], help="scripted ones (default 64 512)")
    parser.add_argument("--groups", type=int, default=4, help="prompts of a process (default 4)")
    parser.add_argument("--group-size", type=int, default=8, help="responses of a prompt (default 8)")
    parser.add_argument("--devices", type=int, default=8, help="of a process, in the controller's plan (default 8)")
    parser.add_argument(
        "--settings", type=_setting, nargs="*", default=SETTINGS, help="of waiting: data set:samples a device"
    )
    parser.add_argument("--minibatches", type=int, default=24, help="of each of them (default 24)")
    parser.add_argument("--waiting-repeats", type=int, default=3, help="of each minibatch (default 3)")
    parser.add_argument(
        "--ideal", type=float, default=0.5, help="mean seconds of a device in a minibatch (default 0.5)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
