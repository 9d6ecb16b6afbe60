"""Simulates Flexes' Table 2 and Figures 9 to 11 and 14, beside the paper's numbers, and how busy GPUs are under each
policy. A part of `tail_batching.py`. All figures are simulated by `fluxjax.simulation`, calibrated to Flexes' Tables 1
and 3, and not to the figures compared here.
"""

from __future__ import annotations

import functools
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

from fluxjax.base.process import collector_paused
from fluxjax.config import cli
from fluxjax.simulation.options import SimulateConfig
from fluxjax.simulation.simulated_run import make_cluster, summary
from fluxjax.simulation.virtual_cluster import StepRecord

MODELS = ("7b", "14b", "32b")
VERL = ("simulation.rewards=synchronous",)
FLEXES = ("policy=tail_batching", "policy.prompts=1.25", "policy.responses=1.25", "policy.max_staleness=0")
TAIL = (*FLEXES, *VERL)
REWARD = (*FLEXES, "simulation.rewards=scheduled")
STREAM = (*REWARD, "stream_trainer=True")
PLANNER = (*REWARD, "parallelism.min_degree=1")
ALL = (*PLANNER, "stream_trainer=True")
ROWS = {"verl": VERL, "+ tail batching": TAIL, "+ reward": REWARD, "+ parallelism": PLANNER, "+ trainer": ALL}
LEAST_DEGREE = {"7b": 1, "14b": 2, "32b": 2}  # the planner sees no preemption here and would halve a right degree
TABLE_2 = {  # speedup over verl
    "verl": (1.0, 1.0, 1.0),
    "+ tail batching": (1.30, 1.48, 2.21),
    "+ reward": (2.01, 1.99, 2.48),
    "+ parallelism": (2.01, 2.02, 2.52),
    "+ trainer": (2.03, 2.22, 2.56),
}
IN_WORDS = {  # the paper's statements about figures without numbers
    "figure_9_short_rounds_over_verl": "2.1 to 3.6",
    "figure_4a_longest_response_over_short_rounds": "up to 8.9",
    "figure_10b_rollout_over_short_rounds_32b": "up to 7.8",
    "figure_11_mean_rollout_over_verl": "up to 3.9",
    "figure_11_both_over_prompts_only": "up to 1.6",
    "figure_11_both_over_responses_only": "up to 1.5",
    "figure_14_samples_a_second_over_verl": 2.2,
    "figure_14_twice_the_gpus": 1.5,
}
ETAS = ((1.0, 1.0), (1.0, 1.25), (1.0, 1.5), (1.25, 1.0), (1.5, 1.0), (1.25, 1.25))  # (prompts', responses')
WHAT_IF = {  # alternatives to assumptions that no figure of the paper fixes; each changes the first row
    "as assumed": (),
    "half of what a length has of its own": ("simulation.shared=0.75",),
    "twice the responses' median": ("simulation.median={median2}",),
    "wider spread of lengths": ("simulation.spread=1.3",),
    "narrower spread of lengths": ("simulation.spread=0.8",),
}


@functools.cache
def simulated(model: str, steps: int, seed: int, options: tuple[str, ...]) -> tuple[dict[str, Any], list[StepRecord]]:
    arguments = [f"--config=configs/simulation.py:{model}", f"--config.steps={steps}", f"--config.seed={seed}"]
    cluster = make_cluster(cli.load(arguments + [f"--config.{option}" for option in options], SimulateConfig))
    with collector_paused():
        cluster.run()
    print(f"{model} {' '.join(options)}: {cluster.clock.now:.0f} simulated seconds", file=sys.stderr)
    return summary(cluster, 0.0), cluster.records


def mean(records: Sequence[StepRecord], name: str, kind: str = "") -> float:
    return statistics.fmean(getattr(record, name) for record in records if record.round == kind or not kind)


def table_2(steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Simulates the rows of Flexes' Table 2. Steps are complete periods of four short rounds and a long one."""
    out: dict[str, Any] = {}
    for place, model in enumerate(MODELS):
        least = f"parallelism.min_degree={LEAST_DEGREE[model]}"
        some = {row: (*how, least) if how in (PLANNER, ALL) else how for row, how in ROWS.items()}
        rows = {row: [simulated(model, steps, seed, how)[1] for seed in seeds] for row, how in some.items()}
        seconds = {row: [mean(records, "seconds") for records in runs] for row, runs in rows.items()}
        out[model] = {
            row: {
                "simulated": _mean([base / value for base, value in zip(seconds["verl"], by_seed, strict=True)]),
                "paper": TABLE_2[row][place],
                "simulated_step_seconds": _mean(by_seed),
                **_rounds(rows[row], rows["verl"]),
            }
            for row, by_seed in seconds.items()
        }
    return out


def _rounds(runs: list[list[StepRecord]], verl: list[list[StepRecord]]) -> dict[str, Any]:
    """Short and long rounds (figures 9 and 10): means of a step, and the ratios of verl's times to them."""
    kinds = [kind for kind in ("short", "long") if any(record.round == kind for record in runs[0])] or [""]
    out = {}
    for kind in kinds:
        means = {n: _mean([mean(r, n, kind) for r in runs]) for n in ("seconds", "rollout", "train", "longest")}
        base = {n: _mean([mean(r, n) for r in verl]) for n in means}
        out[f"simulated_{kind or 'all'}_rounds"] = means | (
            {f"verl_{n}_over": _two(base[n] / means[n]) for n in means} if kind else {}
        )
    return out


def _two(value: float) -> float:
    return round(value, 2)


def _mean(values: Sequence[float]) -> float:
    return _two(statistics.fmean(values))


def why(steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """The speedup of tail batching alone under other assumptions, and the planner's without a least degree."""
    out: dict[str, Any] = {}
    for model in MODELS[:2]:
        out[model] = {}
        for name, options in WHAT_IF.items():
            how = tuple(option.format(median2=1100.0) for option in options)
            out[model][name] = _mean([_speedup(model, steps, seed, how) for seed in seeds])
        out[model]["training as long in every round as verl's"] = _mean(
            [_speedup(model, steps, seed, (), same_training=True) for seed in seeds]
        )
    runs = [[simulated("14b", steps, seed, how)[1] for how in (VERL, PLANNER)] for seed in seeds]
    speedups = [mean(verl, "seconds") / mean(planned, "seconds") for verl, planned in runs]
    out["14b"]["+ parallelism, down to one GPU an engine"] = _mean(speedups)
    return out


def _speedup(model: str, steps: int, seed: int, how: tuple[str, ...], same_training: bool = False) -> float:
    verl, tail = (simulated(model, steps, seed, (*policy, *how))[1] for policy in (VERL, TAIL))
    added_training = mean(verl, "train") - mean(tail, "train") if same_training else 0.0
    return mean(verl, "seconds") / (mean(tail, "seconds") + added_training)


def figure_11(steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Mean rollout seconds of complete periods over those without speculation, by (prompts' eta, responses' eta)."""
    out: dict[str, Any] = {}
    for model in MODELS:
        seconds = {}
        for prompts, responses in ETAS:
            how = (*TAIL, f"policy.prompts={prompts}", f"policy.responses={responses}")
            seconds[f"{prompts}, {responses}"] = statistics.fmean(
                mean(simulated(model, steps, seed, how)[1], "rollout") for seed in seeds
            )
        base = seconds["1.0, 1.0"]
        out[model] = {"simulated": {etas: round(value / base, 3) for etas, value in seconds.items()}}
        out[model]["simulated_rollout_over_both"] = _two(base / seconds["1.25, 1.25"])
    return out


def figure_14(steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """14B/16k, samples a second with 128, 256 and 512 prompts a step on 32, 64 and 128 GPUs."""
    out: dict[str, Any] = {}
    for times in (1, 2, 4):
        size = (f"rollout.prompts_per_step={128 * times}", f"simulation.gpus={32 * times}")
        workers = (f"simulation.rules={times}", f"simulation.sandboxes={512 * times}", f"simulation.judges={8 * times}")
        rates = {
            name: statistics.fmean(
                simulated("14b", steps, seed, (*how, *size, *workers))[0]["simulated_samples_per_second"]
                for seed in seeds
            )
            for name, how in (("verl", VERL), ("all", STREAM))
        }
        out[f"{32 * times} GPUs"] = {"simulated": {name: _two(rate) for name, rate in rates.items()}} | {
            "simulated_over_verl": _two(rates["all"] / rates["verl"])
        }
    return out


def simulate(steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "steps": steps,
        "seeds": list(seeds),
        "table_2": table_2(steps, seeds),
        "tail_batching_alone_with_other_assumptions": {"simulated": why(steps, seeds)},
        "figure_11": figure_11(steps, seeds[:1]),
        "figure_14": figure_14(steps, seeds[:1]),
        "paper_in_words": IN_WORDS,
    }


# --- how busy GPUs are ------------------------------------------------------------------------------

_ASYNC = ("policy=adaptive_async", "simulation.rewards=asynchronous")


def _ahead(steps: int) -> tuple[str, ...]:
    return (*_ASYNC, "policy.ratio=1.0", f"policy.max_staleness={steps}")


KINDS = {
    "synchronous, rewards after rollout": VERL,
    "synchronous, rewards as responses end": ("simulation.rewards=asynchronous",),
    "tail batching, scheduled rewards, stream trainer": STREAM,
    "one step off": _ahead(1),
    "adaptive": _ASYNC,
    "fully asynchronous": _ahead(8),
}


def utilisation(steps: int, seed: int) -> dict[str, Any]:
    """14B/16k on 32 GPUs: rollout and training alternate on all of them, or have half of them each."""
    out: dict[str, Any] = {}
    for kind, how in KINDS.items():
        apart = {"": (), ", 16 + 16": ("simulation.train_gpus=16",)} if how[:1] == _ASYNC[:1] else {"": ()}
        for name, place in apart.items():
            got = simulated("14b", steps, seed, (*how, *place))[0]
            out[kind + name] = {
                "simulated_busy": got["simulated_utilisation"]["busy"],
                "simulated_throughput_of_peak": got["simulated_utilisation"]["throughput"],
                "simulated_samples_per_second": got["simulated_samples_per_second"],
                "simulated_lag_mean": got["staleness"]["mean"],
                "simulated_lag_max": got["staleness"]["max"],
            }
    return out
