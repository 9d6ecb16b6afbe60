"""Measures what many turns cost: tokens that are prefilled, bytes of pixels that travel, steps of slow environments.

    python benchmarks/episodes.py                          # all parts, about ten minutes on two cores
    python benchmarks/episodes.py --part prefill           # tokens prefilled with and without kept prefixes
    python benchmarks/episodes.py --part pixels            # bytes of pixels, against all images with each turn
    python benchmarks/episodes.py --part tail              # simulated: `synchronous` beside `tail_batching`
    python benchmarks/episodes.py --small                  # whether it runs

Prints one JSON line on standard output and its progress on standard error. Episodes have `--turns` turns, and an image
in the prompt and in each observation. benchmarks/README.md describes the figures.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

PARTS = ("prefill", "pixels", "tail")
# Mean seconds of an environment's answer: a page of a browser, a long tool, a sandbox that builds and tests.
SLOW = (5.0, 15.0, 60.0)
POLICIES = {
    "synchronous": ("policy=synchronous",),
    "tail_batching": ("policy=tail_batching",),
    "tail_batching, on policy": ("policy=tail_batching", "policy.max_staleness=0"),
}


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--turns", type=int, default=8, help="turns of an episode, at most 16 (default 8)")
    parser.add_argument("--group", type=int, default=4, help="episodes of a prompt (default 4)")
    parser.add_argument("--repeats", type=int, default=5, help="prompts on each side (default 5)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a simulated run (default 10)")
    parser.add_argument("--seeds", type=int, default=3, help="simulated runs of each setting (default 3)")
    parser.add_argument("--small", action="store_true", help="tries everything on little")
    options = parser.parse_args(argv)
    if options.small:
        options.turns, options.group, options.repeats, options.steps, options.seeds = 3, 2, 1, 5, 1
    if min(options.group, options.repeats, options.steps, options.seeds) < 1 or not 2 <= options.turns <= 16:
        print("error: --turns must be 2 to 16; --group, --repeats, --steps and --seeds at least 1", file=sys.stderr)
        return 2
    result: dict[str, Any] = {"benchmark": "episodes", "turns": options.turns}
    if options.part != "tail":
        import episodes_played

        if options.part in ("all", "prefill"):
            result |= episodes_played.prefill(options.turns, options.group, options.repeats)
        if options.part in ("all", "pixels"):
            result |= episodes_played.pixels(options.turns, options.group)
    if options.part in ("all", "tail"):
        result |= tail(options.turns, options.steps, range(options.seeds), options.small)
    print(json.dumps(result))
    return 0


def tail(turns: int, steps: int, seeds: Sequence[int], small: bool) -> dict[str, Any]:
    """Simulates half of `configs/simulation.py`, Qwen2.5 14B on 16 GPUs, with environments. `tail_speedup` is the least
    ratio of all environments; a ratio is that of the medians of all seeds' mean seconds a step."""
    found: dict[str, Any] = {}
    for environment in SLOW[1:2] if small else SLOW:
        seconds: dict[str, list[float]] = {name: [] for name in POLICIES}
        for seed in seeds:
            for name, policy in POLICIES.items():
                seconds[name].append(_step_seconds(turns, steps, seed, environment, policy, small))
                _say(f"environments of {environment:g} s, seed {seed}, {name}: {seconds[name][-1]:.1f} s a step")
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        found[f"{environment:g}"] = {
            "simulated_step_seconds": {name: [round(value, 1) for value in values] for name, values in seconds.items()},
            "speedup": round(medians["synchronous"] / medians["tail_batching"], 2),
            "speedup_on_policy": round(medians["synchronous"] / medians["tail_batching, on policy"], 2),
        }
    return {
        "tail_speedup": min(by_environment["speedup"] for by_environment in found.values()),
        "tail": {"steps": steps, "seeds": list(seeds), "by_environment_seconds": found},
    }


def _step_seconds(turns: int, steps: int, seed: int, environment: float, policy: Sequence[str], small: bool) -> float:
    from fluxjax.base.process import collector_paused
    from fluxjax.config import cli
    from fluxjax.simulation.options import SimulateConfig
    from fluxjax.simulation.simulated_run import make_cluster

    given = [f"steps={steps}", f"seed={seed}", f"simulation.turns={turns}"]
    given += [f"simulation.environment_seconds={environment}", *policy]
    size = 16 if small else 64
    given += [f"rollout.prompts_per_step={size}", f"simulation.gpus={size // 4}"]
    cluster = make_cluster(
        cli.load(["--config=configs/simulation.py:14b", *(f"--config.{value}" for value in given)], SimulateConfig)
    )
    with collector_paused():
        cluster.run()
    return statistics.fmean(record.seconds for record in cluster.records)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
