"""Measures how even plans are and what they send: FlexUlysses and its baselines on mixes of sequence lengths.

    python benchmarks/flex_ulysses_plan.py                      the mixes of ../shared; degrees up to 16, 8 and 32
    python benchmarks/flex_ulysses_plan.py --mixes FILE         other mixes: a JSON list of cases with `devices` and
                                                                `sequences`, each with a `length`
    python benchmarks/flex_ulysses_plan.py --cap 8 --alpha 1.2  other limits

Prints one JSON line. For every case and planner: `balance` (largest over mean attention work of a device), `memory`
(largest over mean tokens), `traffic` (vectors moved, the sum of length * (p - 1) / p, over the traffic of degree 8 for
all) and `split_cost` (FlexRL's TotalCost, over that of degree 8). `balance_bound`: the balance that no plan under that
cap can beat. `plan_ms` is the median of `--repeats` on this machine, everything included. `plan_ms_few` has
the slowest of eight draws with fewer sequences than devices, for three such numbers. `seconds_4096_on_1024` is the
median for 4,096 sequences, sampled from the image-heavy mixes (or from all, if there are none), on 1,024 devices, and
`seconds_4096_on_1024_by_cost` the same if the published cost model chooses between plans of several tolerances.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are small
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import numpy as np
from common import ROOT

from benchmarks.cost_fit import forward_seconds, published
from benchmarks.planner_baselines import PLANNERS, balance_bound
from sharding.planner.flex import Limits, flex_ulysses, ulysses
from sharding.planner.plan import GAMMA, PlanError, ShardPlan

MIXES = ROOT.parent / "shared" / "data" / "lengths" / "flexrl_mixes.json"
FIXED = (2, 4, 8)
FEW = ((16, 32), (32, 64), (8, 128))  # (sequences, devices) of `plan_ms_few`


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error for settings or mixes that cannot work."""
    options = _parser().parse_args(argv)
    try:
        cases = json.loads(pathlib.Path(options.mixes).read_text())
        result = measure(cases, options)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, PlanError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def measure(cases: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Runs the whole benchmark. Raises PlanError for a case without a plan."""
    load, rows = os.getloadavg()[0], []
    for case in cases:
        lengths, devices = [int(sequence["length"]) for sequence in case["sequences"]], int(case["devices"])
        limits = _limits(options, options.cap, devices)
        # Ratios are to the plan with degree 8 for all sequences, or with the largest degree that the devices allow.
        eight = [min(8, devices & -devices)] * len(lengths)
        row = {"name": case.get("name", ""), "seed": case.get("seed"), "devices": devices, "sequences": len(lengths)}
        row["cap"], row["balance_bound"] = limits.max_degree, round(balance_bound(lengths, devices, limits), 4)
        plan = flex_ulysses(lengths, devices, limits)
        row |= _figures(plan, eight, limits) | {"plan_ms": _milliseconds(lengths, devices, limits, options.repeats)}
        row["degrees"] = {str(p): plan.degrees.count(p) for p in sorted(set(plan.degrees))}
        row["baselines"] = {
            name: _figures(planner(lengths, devices, limits), eight, limits)
            for name, planner in PLANNERS.items()
            if name not in ("flex_ulysses", "ulysses")
        }
        row["baselines"] |= {
            f"ulysses_{p}": _figures(ulysses(lengths, devices, limits, degree=p), eight, limits)
            for p in FIXED
            if p <= limits.max_degree
        }
        row["other_caps"] = {}
        for cap in options.other_caps:
            capped = _limits(options, cap, devices)
            figures = _figures(flex_ulysses(lengths, devices, capped), eight, capped)
            bound = round(balance_bound(lengths, devices, capped), 4)
            row["other_caps"][str(cap)] = figures | {"balance_bound": bound}
        rows.append(row)
        print(_line(row), file=sys.stderr)
    largest = [row["plan_ms"] for row in rows if row["sequences"] == 256 and row["devices"] == 128]
    return {
        "benchmark": "flex_ulysses_plan",
        "cap": options.cap,
        "alpha": options.alpha,
        "tolerance": options.tolerance,
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
        "repeats": options.repeats,
        "worst_balance": max(row["balance"] for row in rows),
        "worst_balance_over_bound": round(max(row["balance"] / row["balance_bound"] for row in rows), 4),
        "worst_memory": max(row["memory"] for row in rows),
        "worst_traffic_image_heavy": _worst(rows, True),
        "worst_traffic_elsewhere": _worst(rows, False),
        "plan_ms": round(statistics.median(row["plan_ms"] for row in rows), 2),
        "plan_ms_256_on_128": round(statistics.median(largest), 2) if largest else None,
        "plan_ms_few": _few(options),
        **_many(cases, options),
        "cases": rows,
    }


def _few(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of planning few sequences: by number (`16 on 32` devices), the slowest median of eight draws."""
    rng, found = np.random.default_rng(0), dict[str, float]()
    for count, devices in FEW:
        limits = _limits(options, options.cap, devices)
        draws = np.clip(rng.lognormal(8.1, 1.0, (7, count)), 16, 32_768).astype(int).tolist()
        draws.append([32_000] + [1_500] * (count - 1))  # one that no plan can even out
        found[f"{count} on {devices}"] = max(_milliseconds(row, devices, limits, options.repeats) for row in draws)
    return {name: round(value, 2) for name, value in found.items()}


def _many(cases: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, float]:
    """Seconds of planning 4,096 sequences, sampled with replacement, for 1,024 devices."""
    chosen = [case for case in cases if case.get("name", "").startswith("image_heavy")] or cases
    pool = [int(sequence["length"]) for case in chosen for sequence in case["sequences"]]
    lengths = np.random.default_rng(0).choice(pool, 4096).tolist()
    limits = _limits(options, options.cap, 1024)
    known = dataclasses.replace(limits, max_degree=min(limits.max_degree, 16))  # the published model has 28 heads
    seconds = {
        "seconds_4096_on_1024": _milliseconds(lengths, 1024, limits, options.repeats) / 1e3,
        "seconds_4096_on_1024_by_cost": _milliseconds(lengths, 1024, known, 1, published()) / 1e3,
    }
    return {name: round(value, 3) for name, value in seconds.items()}


def _limits(options: argparse.Namespace, cap: int, devices: int) -> Limits:
    limits = Limits(alpha=options.alpha, tolerance=options.tolerance)
    return dataclasses.replace(limits, max_degree=min(cap, limits.degree(devices)))


def _worst(rows: Sequence[dict[str, Any]], image_heavy: bool) -> float | None:
    values = [row["traffic"] for row in rows if row["name"].startswith("image_heavy") == image_heavy]
    return max(values, default=None)


def _figures(plan: ShardPlan, eight: Sequence[int], limits: Limits) -> dict[str, float]:
    def traffic(degrees: Sequence[int]) -> float:
        return sum(n * (p - 1) / p for n, p in zip(plan.lengths, degrees, strict=True))

    def split_cost(degrees: Sequence[int]) -> float:
        return sum(
            n * (p - 1) / p**2 * (GAMMA if p > limits.tau else 1.0) for n, p in zip(plan.lengths, degrees, strict=True)
        )

    return {
        "balance": round(plan.balance, 4),
        "memory": round(plan.memory_ratio, 4),
        "traffic": round(traffic(plan.degrees) / max(traffic(eight), 1e-9), 4),
        "split_cost": round(split_cost(plan.degrees) / max(split_cost(eight), 1e-9), 4),
    }


def _milliseconds(lengths: Sequence[int], devices: int, limits: Limits, repeats: int, cost: Any = None) -> float:
    seconds, work = [], None if cost is None else forward_seconds(cost, lengths)
    for _ in range(repeats):
        begin = time.perf_counter()
        flex_ulysses(lengths, devices, limits, work=work, cost=cost and cost.step_seconds)
        seconds.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(seconds), 2)


def _line(row: dict[str, Any]) -> str:
    figures = {"flex_ulysses": row} | row["baselines"]
    parts = [f"{name} {f['balance']:.2f}/{f['memory']:.2f}/{f['traffic']:.2f}" for name, f in figures.items()]
    return f"{row['name']} ({row['plan_ms']:.1f} ms) balance/memory/traffic: {', '.join(parts)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--mixes", default=str(MIXES), help="JSON file of cases")
    parser.add_argument("--cap", type=int, default=16, help="highest degree (28 query heads: 16)")
    parser.add_argument("--other-caps", type=int, nargs="*", default=[8, 32], help="planned as well")
    parser.add_argument("--alpha", type=float, default=Limits.alpha, help="most tokens of a device over the mean")
    parser.add_argument("--tolerance", type=float, default=Limits.tolerance, help="accepted excess of the largest load")
    parser.add_argument("--repeats", type=int, default=9, help="timed plans of each case")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
