"""Simulates the seconds of update and log-probs on 32 to 128 GPUs, for each way to place a batch, beside FlexRL's.

    python benchmarks/flex_ulysses_simulated.py                       ../shared/data/lengths/flexrl_mixes.json
    python benchmarks/flex_ulysses_simulated.py FILE --cluster=h200   other mixes; links of the other cluster
    python benchmarks/flex_ulysses_simulated.py --cost=cost.json      a file of python benchmarks/calibrate.py

Prints one JSON line. Nothing here is measured: plans are those of `sharding.planner`, seconds those of `sharding.cost`,
fitted to FlexRL's micro-benchmarks. Weight gathering, gradient reduction, the optimizer and loading are left out.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import numpy as np

from benchmarks.cost_fit import forward_seconds, published
from benchmarks.dynamic_packing import repacked
from benchmarks.plan_picture import sent
from benchmarks.planner_baselines import bucketing, flexrl, greedy
from sharding.cost import CostError, CostModel
from sharding.planner.flex import Limits, flex_ulysses, ulysses
from sharding.planner.plan import PlanError, ShardPlan
from sharding.planner.vision_units import spread_vision

MIXES = pathlib.Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "lengths" / "flexrl_mixes.json"
DEGREES = (2, 4, 8)
CAP = 8  # FlexRL's p_max, and a node
PACKING = {"short": 1024, "cap": 8192, "most": 2}  # the trainer's own defaults
Case = Mapping[str, Any]

# --- FlexRL's figures -------------------------------------------------------------------------------

STAGES = ("update", "old", "ref")
TABLE2 = {  # seconds of update, old and ref log-probs; 7B on H800; Ulysses with 4 devices a sequence (Figure 5)
    "CR-01": {
        "ours": (4.952, 6.354, 3.336),
        "ulysses": (28.002, 20.866, 20.337),
        "bucketing": (53.006, 50.763, 49.881),
    },
    "CR-02": {
        "ours": (7.777, 18.318, 8.108),
        "ulysses": (33.326, 28.197, 27.751),
        "bucketing": (98.510, 97.575, 95.036),
    },
    "CR-03": {
        "ours": (4.969, 3.979, 3.908),
        "ulysses": (12.370, 8.901, 8.705),
        "bucketing": (72.386, 70.287, 69.811),
    },
    "CR-12": {
        "ours": (5.635, 4.438, 4.329),
        "ulysses": (34.536, 31.649, 31.392),
        "bucketing": (79.057, 77.244, 75.763),
    },
    "CR-13": {
        "ours": (4.541, 11.185, 6.643),
        "ulysses": (51.983, 49.702, 48.861),
        "bucketing": (90.853, 91.113, 88.703),
    },
    "CR-15": {"ours": (6.692, 5.229, 4.924), "ulysses": (63.407, 61.255, 60.590)},
}
# The pair of rows, "+ ShadowLoader" and both, that differs in FlexUlysses alone while loading takes no time.
TABLE1 = {"ours": (9.5, 4.9, 3.7), "bucketing": (24.3, 25.3, 5.0)}
TABLE1_CASE = "image_heavy_128"
FIGURE7 = {"throughput_over_ulysses": 1.50, "balance": {"bucketing": 6.70, "ulysses": 1.12, "flex_ulysses": 1.00}}
PAPER_CASES = {
    "image_heavy_32": "CR-01",
    "video_heavy_32": "CR-02",
    "only_video_32": "CR-03",
    "only_video_64": "CR-12",
    "image_heavy_128": "CR-13",
    "only_video_128": "CR-15",
}


def simulate(mixes: Sequence[Case], cost: CostModel | None = None) -> dict[str, Any]:
    """Simulates all methods on the cases of `flexrl_mixes.json`, and returns medians over the cases of each name,
    beside FlexRL's figures. All keys say `simulated`, except `paper`."""
    cost = cost or published("h800")
    cases: dict[str, list[Case]] = {}
    for case in mixes:
        cases.setdefault(case["name"], []).append(case)
    if "only_video_32" in cases and len(cases["only_video_32"]) > 1:  # two cases joined: 128 samples on 64 GPUs
        cases["only_video_64"] = [_joined(*pair) for pair in _neighbours(cases["only_video_32"])]
    simulated = {name: _medians([_case(case, cost) for case in same]) for name, same in cases.items()}
    result: dict[str, Any] = {
        "simulated_with": cost.source,
        "simulated_model": cost.model.name,
        "simulated_fit": cost.fits,
        "simulated_seconds": simulated,
        "simulated_speedup": {name: _speedups(methods, PAPER_CASES.get(name)) for name, methods in simulated.items()},
    }
    if TABLE1_CASE in simulated:
        result["simulated_table1"] = _beside(simulated[TABLE1_CASE], "bucketing", TABLE1, "bucketing")
    if "image_heavy_32" in simulated:
        result["simulated_figure7"] = _figure7(simulated["image_heavy_32"])
    return result


# --- one case ---------------------------------------------------------------------------------------


def _case(case: Case, cost: CostModel) -> dict[str, dict[str, float]]:
    """Returns by method the simulated seconds of an update, of log-probs and of the vision tower, the balance of
    attention, and the traffic."""
    lengths = [sequence["length"] for sequence in case["sequences"]]
    vision_tokens = np.array([sequence["vision_tokens"] for sequence in case["sequences"]], float)
    patches = cost.model.patches_per_token * vision_tokens
    devices = case["devices"]
    limits = Limits(max_degree=CAP, num_heads=cost.model.heads)
    out: dict[str, dict[str, float]] = {}

    def add(name: str, plan: ShardPlan, vision: np.ndarray | None = None) -> None:
        """Adds the figures of a plan. `vision` has the patches that each device computes; if it is None, patches are
        spread over all devices as in a run, and their features travel."""
        route = 0.0
        if vision is None:
            vision, moved = _planned_vision(case["sequences"], plan, cost.model.patches_per_token)
            route = _route_seconds(moved / devices, cost)
        tower = float(cost.vision_seconds(vision.max()))  # before the layers: all wait for the slowest
        towers = (1 + cost.recompute + cost.backward_linear) * tower
        out[name] = {
            "simulated_update_seconds": cost.step_seconds(plan) + towers + (2 + cost.recompute) * route,
            "simulated_logprob_seconds": cost.step_seconds(plan, train=False) + tower + route,
            "simulated_balance": plan.balance,
            "simulated_traffic_tokens": float(sent(plan).sum()),
            "simulated_vision_forward_seconds": tower,
        }

    for name, planner in (("bucketing", bucketing), ("greedy", greedy)):
        plan = planner(lengths, devices, limits)
        add(name, plan, _in_place(plan, patches))
    for degree in DEGREES:
        plan = ulysses(lengths, devices, limits, degree=degree)  # one group after the other, nothing overlaps
        add(f"ulysses_{degree}", plan, _in_place(plan, patches))
        add(f"ulysses_{degree}_whole_vision", plan, _in_place(plan, patches, every=True))
        add(f"ulysses_{degree}_ours", repacked(plan, **PACKING))
    add("flexrl", repacked(flexrl(lengths, devices, limits), **PACKING))
    add("flex_ulysses", repacked(flex_ulysses(lengths, devices, limits), **PACKING))
    calibrated = flex_ulysses(lengths, devices, limits, work=forward_seconds(cost, lengths), cost=cost.step_seconds)
    add("flex_ulysses_calibrated", repacked(calibrated, **PACKING))
    return out


def _in_place(plan: ShardPlan, patches: np.ndarray, *, every: bool = False) -> np.ndarray:
    """Returns `[devices]`, the patches that each device computes if a sequence's patches stay on its devices: divided
    among these, or, with `every`, all of them on each device (embeddings are merged first and sliced afterwards, so
    that the tower does not depend on the plan)."""
    out = np.zeros(plan.num_devices)
    for count, degree, first in zip(patches.tolist(), plan.degrees, plan.firsts, strict=True):
        out[first : first + degree] += count if every else count / degree
    return out


def _planned_vision(sequences: Sequence[Case], plan: ShardPlan, per_token: int) -> tuple[np.ndarray, float]:
    """Returns `[devices]`, the patches of each device if images and frame pairs are spread over all devices, and the
    number of tokens whose features travel."""
    units, homes = [], []
    for index, sequence in enumerate(sequences):
        pairs = max(-(-sequence["frames"] // 2), 1)
        tokens, more = divmod(sequence["vision_tokens"], pairs)
        units += [per_token * (tokens + (pair < more)) for pair in range(pairs) if tokens or pair < more]
        homes += [index] * (len(units) - len(homes))
    firsts, degrees = ([column[index] for index in homes] for column in (plan.firsts, plan.degrees))
    vision = spread_vision(units, firsts, degrees, plan.num_devices)
    away = [not first <= device < first + p for device, first, p in zip(vision.tolist(), firsts, degrees, strict=True)]
    moved = sum(size for size, moves in zip(units, away, strict=True) if moves)
    return np.bincount(vision, units, plan.num_devices), moved / per_token


def _route_seconds(tokens: float, cost: CostModel) -> float:
    """Returns the seconds of one pass in which each device sends the features of `tokens` to the tokens'
    devices, assuming that all features leave their node."""
    link = cost.across or cost.within
    sent = tokens * cost.model.width * cost.model.value_bytes
    return link.alpha + link.per_byte * sent if tokens else 0.0


def _neighbours(same: Sequence[Case]) -> list[tuple[Case, Case]]:
    return [(case, same[(i + 1) % len(same)]) for i, case in enumerate(same)][: len(same) if len(same) > 2 else 1]


def _joined(first: Case, second: Case) -> Case:
    return {
        "name": "joined",
        "devices": first["devices"] + second["devices"],
        "sequences": [*first["sequences"], *second["sequences"]],
    }


# --- beside the paper -------------------------------------------------------------------------------


def _medians(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        method: {key: round(statistics.median(run[method][key] for run in runs), 4) for key in figures}
        for method, figures in runs[0].items()
    }


def _speedups(methods: Mapping[str, Mapping[str, float]], paper_case: str | None) -> dict[str, Any]:
    paper = TABLE2.get(paper_case or "", {})
    sides = {"over_bucketing": "bucketing", "over_ulysses_4": "ulysses", "over_ulysses_4_whole_vision": "ulysses"}
    out: dict[str, Any] = {"paper_case": paper_case}
    for name, side in sides.items():
        out[name] = _beside(methods, name.removeprefix("over_"), paper, side)
    return out


def _beside(methods: Mapping[str, Mapping[str, float]], baseline: str, paper: Mapping[str, Any], side: str) -> dict:
    """Returns for each stage the baseline's seconds over those of `flex_ulysses`: planned by the papers' proxies
    (`simulated`), planned by the cost model (`simulated_calibrated`), and published (`paper`)."""
    out: dict[str, Any] = {}
    for index, stage in enumerate(STAGES):
        key = "simulated_update_seconds" if stage == "update" else "simulated_logprob_seconds"
        out[stage] = {
            f"simulated{suffix}": round(methods[baseline][key] / methods["flex_ulysses" + suffix][key], 2)
            for suffix in ("", "_calibrated")
        }
        if side in paper:
            out[stage]["paper"] = round(paper[side][index] / paper["ours"][index], 2)
    return out


def _figure7(methods: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Throughput of update and both log-probs over each fixed degree, and the balance of attention."""

    def total(name: str) -> float:
        return methods[name]["simulated_update_seconds"] + 2 * methods[name]["simulated_logprob_seconds"]

    kinds: dict[str, Callable[[int], str]] = {
        "simulated_throughput_over_ulysses": lambda p: f"ulysses_{p}",
        "simulated_throughput_over_ulysses_whole_vision": lambda p: f"ulysses_{p}_whole_vision",
        "simulated_throughput_over_ulysses_ours": lambda p: f"ulysses_{p}_ours",
    }
    out: dict[str, Any] = {
        key: {str(p): round(total(name(p)) / total("flex_ulysses"), 2) for p in DEGREES} for key, name in kinds.items()
    }
    shown = ("bucketing", "ulysses_2", "ulysses_4", "ulysses_8", "flex_ulysses")
    out["simulated_balance"] = {name: methods[name]["simulated_balance"] for name in shown}
    return out | {"paper": FIGURE7}


# --- command line -----------------------------------------------------------------------------------


def read_mixes(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the cases of a file. Raises ValueError, with the path, if it is missing or holds no mixes."""
    try:
        mixes = json.loads(path.read_text())
        for case in mixes:
            needed = [case, *case["sequences"]]
            missing = {"name", "devices"} - needed[0].keys() | {"length", "vision_tokens", "frames"} - needed[1].keys()
            if missing or not all(sequence.keys() >= needed[1].keys() for sequence in needed[2:]):
                raise KeyError(*(sorted(missing) or ["a sequence lacks what the first one has"]))
    except OSError as error:
        raise ValueError(f"no mixes at {path}: {error.strerror}; give a file of sequence lengths") from error
    except (AttributeError, IndexError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no mixes: {type(error).__name__} {error}") from error
    if not mixes:
        raise ValueError(f"{path} holds no mixes: it is empty")
    return mixes


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("mixes", nargs="?", default=MIXES, type=pathlib.Path, help=f"default: {MIXES.name}")
    parser.add_argument("--cluster", default="h800", help="h800 (default) or h200")
    parser.add_argument("--cost", help="a cost model's file instead of the published measurements")
    options = parser.parse_args(argv)
    try:
        cost = CostModel.load(options.cost) if options.cost else published(options.cluster)
        result = simulate(read_mixes(options.mixes), cost)
    except (CostError, PlanError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"benchmark": "flex_ulysses_simulated"} | result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
