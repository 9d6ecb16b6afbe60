"""Compares on-demand communication with collective FSDP: measured on two processes, simulated on 8 to 32 devices.

    python benchmarks/odc.py                              all four parts
    python benchmarks/odc.py --part measured --minibatches 5
    python benchmarks/odc.py --lengths 1024 128 128 128 128 128 128 128

Parts: `measured` times minibatches of LongAlign-like lengths (forward and backward of 4 samples a device) under
collective FSDP with LB-Micro, ODC with LB-Micro and ODC with LB-Mini, interleaved, beside the schedules' predictions;
`together` times minibatches whose longest sequence is too long for one device: by FlexUlysses, by strategy `odc` (the
long sequence collectively, the others at each device's pace), and as if one device could hold it; it uses composer and
learner of a run, text only; `bandwidth` compares gather and scatter-accumulate with the collectives on the same arrays;
`simulated` predicts bubble rates for the paper's settings, beside its Tables 4 and 6.

Prints one JSON line on standard output and its progress on standard error. `benchmarks/README.md` says more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import numpy as np
from common import Pair, WorkerError, spread
from odc_simulated import fitted, simulate

from benchmarks.packing_baselines import SCHEDULERS, MicrobatchSchedule, bubble_rate, makespan
from sharding.planner.plan import Limits

# Eight layers and wide heads: attention's share of the longest sequence is that of a 1.5B model at 64k tokens.
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 3328,
    "num_layers": 8,
    "num_heads": 32,
    "num_kv_heads": 2,
    "head_dim": 128,
}
LONGEST = 1024  # tokens; LongAlign's lengths are scaled down to this maximum
METHODS = {  # name: (executor, scheduler, barrier)
    "collective_lb_micro": ("collective", "lb_micro", "microbatch"),
    "odc_lb_micro": ("odc", "lb_micro", "minibatch"),
    "odc_lb_mini": ("odc", "lb_mini", "minibatch"),
}
PARTS = ("measured", "together", "bandwidth", "simulated")
TOGETHER = {  # a sequence that takes both devices, and others
    "few others": (1024, *[96] * 4),
    "some others": (1024, *[192] * 8),
    "many short others": (1024, *[64] * 32),
    "a long one among the others": (1024, 640, *[128] * 16),
}
ROOM = 640  # tokens that a device holds in `together`
WAYS = {"flex_ulysses": ("flex_ulysses", ROOM), "odc": ("odc", ROOM), "odc_if_it_fitted": ("odc", 1024)}
SIZES = (1 << 16, 1 << 20, 1 << 24)  # floats of an array that is gathered: 256 KiB to 64 MiB


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 with one line on standard error for a worker that failed, 2 for input that can't be."""
    options = _parser().parse_args(argv)
    parts = options.part or list(PARTS)
    result: dict[str, Any] = {"benchmark": "odc"}
    try:
        if set(parts) - {"simulated"}:
            result |= _on_two_processes(options, parts)
        if "simulated" in parts:
            result |= {name: value for name, value in simulate().items() if name.startswith("simulated")}
    except (WorkerError, OSError, ValueError) as error:  # PlanError is a ValueError
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorkerError) else 2
    print(json.dumps(result))
    return 0


def _on_two_processes(options: argparse.Namespace, parts: Sequence[str]) -> dict[str, Any]:
    minibatches = [tuple(options.lengths)] if options.lengths else _minibatches(options.minibatches)
    schedules = {
        f"{index} {name}": (how, _schedule(scheduler, lengths))
        for index, lengths in enumerate(minibatches)
        for name, (how, scheduler, _) in METHODS.items()
    }
    raw = {name: (how, dataclasses.asdict(schedule)) for name, (how, schedule) in schedules.items()}
    runs = (raw if "measured" in parts else {}) | (_together() if "together" in parts else {})
    load_before = os.getloadavg()[0]
    settings = {
        "model": MODEL,
        "runs": runs,
        "remat": options.remat,
        "deterministic": options.deterministic,
    }
    with Pair("odc_worker.py", settings, {"NPROC": "2"}) as pair:  # two threads: one serves, one computes
        result: dict[str, Any] = {
            "what": "two processes of one CPU core each, gloo and jax.experimental.transfer over loopback, float32",
            "load_average_before": round(load_before, 2),
        }
        if "measured" in parts:
            result["measured"] = _measure(pair.ask, schedules, minibatches, options) | {
                "model": MODEL | {"parameters": pair.about["parameters"]},
                "rematerialisation": options.remat,
            }
        if "together" in parts:
            result["together"] = _compare(pair.ask, options)
        if "bandwidth" in parts:
            result["bandwidth"] = [_bandwidth(pair.ask, values, options.repeats) for values in SIZES]
        result["peak_rss_mib"] = [answer["peak_rss_mib"] for answer in pair.finish()]
    return result


def _minibatches(count: int) -> list[tuple[int, ...]]:
    """Lengths of 4 samples for each of 2 devices: LongAlign's, fitted to the paper's bubble rate and scaled down."""
    lengths = fitted("longalign")
    lengths = lengths.scaled(LONGEST / lengths.longest)
    return [tuple(lengths.draw(np.random.default_rng(seed), 8).tolist()) for seed in range(count)]


def _schedule(scheduler: str, lengths: Sequence[int]) -> MicrobatchSchedule:
    """Schedules a minibatch on two devices, by FLOPs of the model above; a microbatch holds as many tokens as the
    longest sequence (packing ratio 1)."""
    m = MODEL
    heads = m["num_heads"] * m["head_dim"]
    layer = m["hidden_size"] * (2 * heads + 2 * m["num_kv_heads"] * m["head_dim"] + 3 * m["intermediate_size"])
    weights = m["num_layers"] * layer + m["vocab_size"] * m["hidden_size"]
    work = [2.0 * weights * n + 2.0 * m["num_layers"] * heads * n**2 for n in lengths]
    return SCHEDULERS[scheduler](lengths, 2, Limits(tokens_per_device=max(LONGEST, *lengths)), work=work)


def _measure(ask: Any, schedules: Any, minibatches: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds of each minibatch under each method, and of all minibatches. Ratios above 1 mean that ODC
    with LB-Mini is faster."""
    groups = {str(index): [f"{index} {name}" for name in METHODS] for index in range(len(minibatches))}
    seconds, idle = _timed(ask, groups, options)
    total = {
        name: sum(statistics.median(seconds[f"{index} {name}"]) for index in range(len(minibatches)))
        for name in METHODS
    }
    ideal = {
        name: sum(makespan(schedules[f"{index} {name}"][1], barrier) for index in range(len(minibatches)))
        for name, (_, _, barrier) in METHODS.items()
    }
    return {
        "minibatches": [
            {
                "lengths": sorted(lengths, reverse=True),
                "methods": {
                    name: {
                        "seconds": spread(seconds[f"{index} {name}"]),
                        "cores_idle": round(statistics.median(idle[f"{index} {name}"]), 3),
                        "bubble_rate_of_the_schedule": round(
                            bubble_rate(schedules[f"{index} {name}"][1], barrier=barrier), 3
                        ),
                        "microbatches": schedules[f"{index} {name}"][1].counts().tolist(),
                    }
                    for name, (_, _, barrier) in METHODS.items()
                },
            }
            for index, lengths in enumerate(minibatches)
        ],
        "repeats": options.repeats,
        "seconds": {name: round(value, 3) for name, value in total.items()},
        "odc_lb_mini_against": {
            name: {
                "measured": round(total[name] / total["odc_lb_mini"], 3),
                "predicted_by_the_schedules": round(ideal[name] / ideal["odc_lb_mini"], 3),
            }
            for name in METHODS
            if name != "odc_lb_mini"
        },
    }


def _timed(ask: Any, groups: dict[str, list[str]], options: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the seconds of each run and the idle share of the cores' time, repeat by repeat. Raises WorkerError if
    the runs of a group differ in loss or gradients."""
    names = [name for members in groups.values() for name in members]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    idle: dict[str, list[float]] = {name: [] for name in names}
    checks: dict[str, tuple[float, float]] = {}
    for repeat in range(options.warmup + options.repeats):
        for name in names:
            answers = ask(do="step", run=name)
            took = max(answer["seconds"] for answer in answers)
            checks[name] = (answers[0]["loss"], answers[0]["grad_norm"])
            _say(f"{name}: {took:.3f} s{' (warm-up)' if repeat < options.warmup else ''}")
            if repeat >= options.warmup:
                seconds[name].append(took)
                idle[name].append(1 - sum(answer["cpu"] for answer in answers) / (2 * took))
    for group, members in groups.items():
        found = np.array([checks[name] for name in members])
        if not np.allclose(found, found[0], rtol=1e-4):
            raise WorkerError(f"the methods disagree on minibatch {group}: loss and gradient norm {found.tolist()}")
    return seconds, idle


def _together() -> dict[str, Any]:
    return {
        f"{load} {way}": ("composed", (strategy, room, lengths))
        for load, lengths in TOGETHER.items()
        for way, (strategy, room) in WAYS.items()
    }


def _compare(ask: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds of forward and backward pass by each of `WAYS`. Ratios above 1 mean that strategy `odc` is
    faster."""
    seconds, _ = _timed(ask, {load: [f"{load} {way}" for way in WAYS] for load in TOGETHER}, options)
    result: dict[str, Any] = {}
    for load, lengths in TOGETHER.items():
        medians = {way: statistics.median(seconds[f"{load} {way}"]) for way in WAYS}
        result[load] = {
            "lengths": lengths,
            "tokens_per_device": ROOM,
            "seconds": {way: spread(seconds[f"{load} {way}"]) for way in WAYS},
            "odc_against": {way: round(medians[way] / medians["odc"], 3) for way in WAYS if way != "odc"},
        }
    return result


def _bandwidth(ask: Any, values: int, repeats: int) -> dict[str, Any]:
    """GB/s that a device receives: half of the gathered array, or half of the array of summed parts."""
    answers = ask(do="bandwidth", values=values, repeats=max(repeats, 5))
    received = values // 2 * 4  # the scatters read twice as many values, a full array on each device
    rates: dict[str, Any] = {"array_mib": values * 4 / 2**20}
    for name in ("all_gather", "gather", "reduce_scatter", "scatter_accumulate"):
        took = statistics.median(max(pair) for pair in zip(*(answer[name] for answer in answers), strict=True))
        rates[name] = {"ms": round(took * 1e3, 2), "gb_per_s": round(received / took / 1e9, 3)}
    rates["gather_against_all_gather"] = round(rates["all_gather"]["ms"] / rates["gather"]["ms"], 2)
    rates["scatter_accumulate_against_reduce_scatter"] = round(
        rates["reduce_scatter"]["ms"] / rates["scatter_accumulate"]["ms"], 2
    )
    _say(f"bandwidth: {rates}")
    return rates


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given several times")
    parser.add_argument("--lengths", type=int, nargs="+", help="one minibatch of your own: tokens of each sequence")
    parser.add_argument("--minibatches", type=int, default=4, help="random ones, of 4 samples a device")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them; the first compiles")
    parser.add_argument("--deterministic", action="store_true", help="ODC adds gradients in a fixed order")
    parser.add_argument("--remat", action="store_true", help="compute each layer again in the backward pass")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
