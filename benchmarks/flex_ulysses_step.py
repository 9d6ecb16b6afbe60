"""Measures, counts and simulates a training step under several shard plans.

    python benchmarks/flex_ulysses_step.py                      all three parts
    python benchmarks/flex_ulysses_step.py --part measured      two processes pinned to a core each
    python benchmarks/flex_ulysses_step.py --lengths 4096 512 512 512 512 512 512 512 512

Parts: `measured` times forward and backward of one batch under bucketing (FSDP with verl's deal of sequences), fixed
Ulysses and FlexUlysses, interleaved; `counted` lays out random batches of the mixes for 8 devices and counts padding,
compiled shapes, and the collectives of a step; `simulated` predicts 32 to 128 GPUs with the cost model calibrated on
FlexRL's tables, beside the paper's figures.

Prints one JSON line on standard output and its progress on standard error. `benchmarks/README.md` says more.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import numpy as np
from common import ROOT, Pair, WorkerError, spread

from benchmarks.dynamic_packing import repacked
from benchmarks.plan_text import text_of
from benchmarks.planner_baselines import bucketing
from sharding.planner.flex import Limits, flex_ulysses, ulysses
from sharding.planner.plan import ShardPlan
from sharding.spread.buffers import SizedLayout, lay, size_cost
from sharding.spread.shapes import ShapeBook

MIXES = ROOT.parent / "shared" / "data" / "lengths" / "flexrl_mixes.json"
WORKLOADS = {
    "skewed": (4096, *[512] * 8),  # a token count that buckets evenly, a quadratic cost that does not
    "one_long": (2048, *[64] * 32),
    "even": (128,) * 64,  # nothing to balance: shows the cost of sharding
}
MODEL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 32,
}
PARTS = ("measured", "counted", "simulated")


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 with one line on standard error for a worker that failed, 2 for input that is missing."""
    options = _parser().parse_args(argv)
    parts = options.part or list(PARTS)
    result: dict[str, Any] = {"benchmark": "flex_ulysses_step"}
    try:
        mixes = json.loads(pathlib.Path(options.mixes).read_text()) if {"counted", "simulated"} & set(parts) else []
        if "measured" in parts:
            result["measured"] = measure(options)
        if "counted" in parts:
            result["counted"] = count(mixes, options)
        if "simulated" in parts:
            from flex_ulysses_simulated import simulate

            result["simulated"] = simulate(mixes)
    except (WorkerError, OSError, ValueError) as error:  # PlanError and damaged JSON are ValueErrors
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorkerError) else 2
    print(json.dumps(result))
    return 0


# --- measured -----------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step under each plan of each workload; ratios of medians above 1 mean that FlexUlysses is faster."""
    workloads = {"given": tuple(options.lengths)} if options.lengths else WORKLOADS
    plans = {name: _plans(lengths) for name, lengths in workloads.items()}
    settings = {
        "model": MODEL,
        "plans": {f"{load} {name}": text_of(plan) for load, named in plans.items() for name, plan in named.items()},
    }
    load_before = os.getloadavg()[0]
    seconds: dict[str, list[float]] = {name: [] for name in settings["plans"]}
    losses: dict[str, float] = {}
    with Pair("ulysses_worker.py", settings, {}) as pair:
        for index in range(options.warmup + options.repeats):
            for name in seconds:
                answers = pair.ask(do="step", plan=name)
                losses[name] = answers[0]["loss"]
                _say(f"{name}: {answers[0]['seconds']:.3f} s{' (warm-up)' if index < options.warmup else ''}")
                if index >= options.warmup:
                    seconds[name].append(max(answer["seconds"] for answer in answers))
        last = pair.finish()
    result: dict[str, Any] = {
        "what": "forward and backward of one batch, 2 processes of one CPU core each, gloo, float32",
        "load_average_before": round(load_before, 2),
        "model": MODEL | {"parameters": pair.about["parameters"]},
        "repeats": options.repeats,
        "peak_rss_mib": [answer["peak_rss_mib"] for answer in last],
    }
    for load, named in plans.items():
        medians = {name: statistics.median(seconds[f"{load} {name}"]) for name in named}
        result[load] = {
            "lengths": {str(length): count for length, count in collections.Counter(workloads[load]).items()},
            "plans": {
                name: {
                    "seconds": spread(seconds[f"{load} {name}"]),
                    "balance": round(plan.balance, 3),
                    "degrees": dict(collections.Counter(map(str, plan.degrees))),
                    "loss": losses[f"{load} {name}"],
                }
                for name, plan in named.items()
            },
            "flex_ulysses_against": {
                name: round(medians[name] / medians["flex_ulysses"], 3) for name in medians if name != "flex_ulysses"
            },
        }
    return result


def _plans(lengths: Sequence[int]) -> dict[str, ShardPlan]:
    limits = Limits(num_heads=MODEL["num_heads"])
    return {
        "fsdp_bucketing": bucketing(lengths, 2, limits),
        "ulysses": ulysses(lengths, 2, limits, degree=2),
        "flex_ulysses": flex_ulysses(lengths, 2, limits),
    }


# --- counted ------------------------------------------------------------------------------------


def count(mixes: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Counts shapes, padding and rounds of batches sampled from the sequences of each mix and laid out for 8 devices;
    lengths are not scaled."""
    rng = np.random.default_rng(0)
    pools: dict[str, list[int]] = collections.defaultdict(list)
    for case in mixes:
        pools[case["name"]] += [sequence["length"] for sequence in case["sequences"]]
    limits = Limits(num_heads=28)
    result: dict[str, Any] = {"devices": 8, "batches_a_mix": options.batches, "sequences_a_batch": 16}
    for name, pool in pools.items():
        layouts, book = [], ShapeBook()
        for _ in range(options.batches):
            lengths = np.array([int(length) for length in rng.choice(pool, 16)])
            layout = lay(repacked(flex_ulysses(lengths.tolist(), 8, limits), short=2048, cap=32768, most=2))
            # A chunk's last token predicts the first one of the next chunk.
            needs = layout.needs() | {"exports": sum(round.degree > 1 for round in layout.plan.rounds)}
            layouts.append(SizedLayout(layout, book.fit(needs, {}, size_cost)))
        shapes = {(layout.columns, layout.rounds) for layout in layouts}
        padding = [layout.padding() for layout in layouts]
        result[name] = {
            "shapes": len(shapes),
            "mlp_padding": round(statistics.mean(shares["mlp"] for shares in padding), 3),
            "all_to_all_padding": round(statistics.mean(shares["all_to_all"] for shares in padding), 3),
            "rounds": round(statistics.mean(len(layout.rounds) for layout in layouts), 2),
        }
        _say(f"{name}: {result[name]}")
    result["collectives"] = _collectives()
    return result


def _collectives() -> dict[str, Any]:
    """Counts the collectives in one compiled step of the model above, with 8 layers, on 8 devices, in a process of its
    own. A layer's collectives count once, since the layers are a scan."""
    code = (
        "import json\n"
        "import jax, ulysses_worker as w\n"
        "from sharding.planner.flex import Limits, flex_ulysses\n"
        f"model = w.text_model({MODEL!r} | {{'num_layers': 8}})\n"
        "strategy = w.Fsdp(w.make_mesh(8), model, forward=w.logprobs, loss=w.loss, row_dims=w.row_dims)\n"
        "lengths = [700, 300, 200, 150, 90, 90, 60, 50, 40, 30]\n"
        "batch = w.batch_of(flex_ulysses(lengths, 8, Limits(num_heads=8)), 512)\n"
        "params = strategy.shard(w.models.split(model)[1])\n"
        "compiled = jax.jit(strategy.loss_and_grad).lower(params, strategy.place(batch)).compile()\n"
        "print(json.dumps({'rounds': batch.spread.rounds, 'text': compiled.as_text()}))\n"
    )
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT / "benchmarks",
        env=dict(os.environ) | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        raise WorkerError(f"compiling for 8 devices failed: {done.stderr.strip().splitlines()[-1]}")
    answer = json.loads(done.stdout)
    names = re.findall(
        r" (all-to-all|all-gather|reduce-scatter|all-reduce|collective-permute)(?:-start)?\(", answer["text"]
    )
    return {"rounds": answer["rounds"], "in_the_program": dict(sorted(collections.Counter(names).items()))}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given several times")
    parser.add_argument("--lengths", type=int, nargs="+", help="a workload of your own: tokens of each (measured)")
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each plan (measured)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them; the first compiles (measured)")
    parser.add_argument("--batches", type=int, default=50, help="random batches of each mix (counted)")
    parser.add_argument("--mixes", default=str(MIXES), help="JSON file of sequence lengths (counted, simulated)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
