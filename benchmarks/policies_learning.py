"""Measures whether the policies learn equally well: held-out accuracy of the embedded task, over several seeds.

    python benchmarks/policies_learning.py --out runs/learning          # 15 runs, about 70 minutes on one core
    python benchmarks/policies_learning.py --out runs/learning --picture docs/pictures/policies.png
    python benchmarks/policies_learning.py --config configs/text.py --seeds 0 1
    python benchmarks/policies_learning.py --config configs/vlm.py:digits --lengths \
        --policies synchronous tail_batching tail_batching_spread -- --config.steps=400

Every run is `python -m fluxjax.train` with a seed and a policy; policies with old data also get an importance
correction. Runs that are complete in `--out` are not repeated. Prints one JSON line: the final accuracy of each run,
means and standard deviations, and in pairs of equal seeds the differences to `synchronous` in points: their mean and
its 95 % interval (Student's t). Arguments after `--` go to every run. `--lengths` adds the final accuracy by length of
the right answer (characters), means over seeds, over the held-out prompts of each length; with `--strips N` it uses N
held-out strips of digits instead of 400, and compares their accuracies in pairs, too (`of_all_strips`).
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import scipy.stats
from accuracy_by_length import Counts, by_length, pooled
from common import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fluxjax.report.metrics import read

TRUNCATED = "--config.algorithm.importance.kind=truncate"
ON_POLICY = (  # as in Flexes
    "--config.policy=tail_batching",
    "--config.policy.prompts=1.25",
    "--config.policy.max_staleness=0",
)
RUNS: dict[str, tuple[str, ...]] = {  # the policy and the other flags of a run
    "synchronous": ("--config.policy=synchronous",),
    "tail_batching": (*ON_POLICY, "--config.policy.responses=1.0"),
    "tail_batching_responses": (*ON_POLICY, "--config.policy.responses=1.25"),
    "tail_batching_spread": ("--config.policy=tail_batching", TRUNCATED),
    "adaptive_async": ("--config.policy=adaptive_async", "--config.policy.max_staleness=2", TRUNCATED),
    "adaptive_async_decoupled": (
        "--config.policy=adaptive_async",
        "--config.policy.max_staleness=2",
        TRUNCATED,
        "--config.algorithm.importance.decoupled=True",
    ),
    "adaptive_async_older": (
        "--config.policy=adaptive_async",
        TRUNCATED,
        "--config.policy.max_staleness=5",
    ),
}
DEFAULT = ["synchronous", "tail_batching", "adaptive_async"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/vlm.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--policies", nargs="+", choices=RUNS, default=DEFAULT)
    parser.add_argument("--every", type=int, default=25, help="steps between two evaluations on all held-out prompts")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/learning"))
    parser.add_argument("--picture", type=pathlib.Path, help="where to draw the curves")
    parser.add_argument("--lengths", action="store_true", help="accuracy by length of the answer, too")
    parser.add_argument(
        "--strips", type=int, default=0, help="held-out strips of digits for --lengths, if not the run's own"
    )
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="settings of every run")
    options = parser.parse_args(argv)
    if options.strips and not options.lengths:
        parser.error("--strips needs --lengths")
    runs: dict[str, dict[int, dict[str, Any]]] = {policy: {} for policy in options.policies}
    lengths: dict[str, list[Counts]] = {policy: [] for policy in options.policies}
    for seed in options.seeds:  # seed by seed: finished runs can then be compared early
        for policy in options.policies:
            folder = options.out / f"{policy}-{seed}"
            if not train(folder, options.config, seed, options.every, (*RUNS[policy], *options.flags)):
                print(f"error: {policy} with seed {seed} did not end well; see {folder}.log", file=sys.stderr)
                return 1
            runs[policy][seed] = json.loads((folder / "summary.json").read_text())
            if options.lengths:
                lengths[policy].append(by_length(folder, options.strips))
            print(json.dumps(_compared(runs)), file=sys.stderr)
    result = {"benchmark": "policies_learning", "config": options.config, "flags": options.flags}
    result["measured"] = _compared(runs)
    if options.lengths:
        result["by_length"] = {policy: pooled(counts) for policy, counts in lengths.items()}
    if options.strips:
        result |= {"strips": options.strips, "of_all_strips": _of_all_strips(lengths)}
    print(json.dumps(result))
    if options.picture:
        draw(options.out, options.policies, options.seeds, options.picture)
    return 0


def train(folder: pathlib.Path, config: str, seed: int, every: int, flags: Sequence[str]) -> bool:
    """Makes a run unless it is complete. Returns whether it ended well."""
    file = folder / "summary.json"
    if file.exists() and json.loads(file.read_text())["complete"]:
        return True
    print(f"{folder.name} ...", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fluxjax.train", f"--config={config}", f"--config.run_dir={folder}"]
    command += [f"--config.seed={seed}", f"--config.evaluation.every={every}"]
    command += flags
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        return subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode == 0


def _compared(runs: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    finals = {
        policy: {
            source: [summary["accuracy"][source]["end"] for _, summary in sorted(by_seed.items())]
            for source in sorted(next(iter(by_seed.values()))["accuracy"])
        }
        for policy, by_seed in runs.items()
        if by_seed
    }
    for policy, by_source in finals.items():
        result[policy] = {
            source: {
                "final": values,
                "mean": round(statistics.mean(values), 4),
                "deviation": round(statistics.stdev(values), 4) if len(values) > 1 else 0.0,
            }
            for source, values in by_source.items()
        }
        if policy != "synchronous" and (plain := finals.get("synchronous")):
            for source, values in by_source.items():
                result[policy][source]["paired_points"] = paired_points(values, plain[source][: len(values)])
        totals = [summary["seconds"]["total"] for summary in runs[policy].values()]
        result[policy]["seconds"] = [round(total, 1) for total in totals]
    return result


def _of_all_strips(lengths: dict[str, list[Counts]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for policy, runs in lengths.items():
        by_run = [run["digits"].values() for run in runs]
        finals = [round(sum(right for right, _ in counts) / sum(asked for _, asked in counts), 5) for counts in by_run]
        result[policy] = {"final": finals, "mean": round(statistics.mean(finals), 5)}
        if policy != "synchronous" and "synchronous" in result:
            result[policy]["paired_points"] = paired_points(finals, result["synchronous"]["final"])
    return result


def paired_points(values: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """Compares accuracies of the same seeds, in points of 100: the mean of the differences and, for two seeds or more,
    its 95 % interval (Student's t). Raises ValueError for sequences of different lengths."""
    points = [100 * (value - base) for value, base in zip(values, reference, strict=True)]
    mean = statistics.mean(points)
    if len(points) < 2:
        return {"mean": round(mean, 2)}
    half = float(scipy.stats.t.ppf(0.975, len(points) - 1)) * statistics.stdev(points) / math.sqrt(len(points))
    return {"mean": round(mean, 2), "interval_95": [round(mean - half, 2), round(mean + half, 2)]}


def draw(out: pathlib.Path, policies: Sequence[str], seeds: Sequence[int], picture: pathlib.Path) -> None:
    """Draws the curves of held-out accuracy, a panel for each source. A policy is one colour, its mean over seeds
    thick, each seed thin."""
    curves: dict[str, dict[str, list[list[tuple[int, float]]]]] = {}
    for policy in policies:
        for seed in seeds:
            lines = [line for line in read(out / f"{policy}-{seed}" / "metrics.jsonl") if line["phase"] == "eval"]
            for name in sorted({key for line in lines for key in line if key.startswith("accuracy/")}):
                points = sorted({line["step"]: line[name] for line in lines if name in line}.items())
                curves.setdefault(name.removeprefix("accuracy/"), {}).setdefault(policy, []).append(points)
    figure = Figure(figsize=(5.5 * len(curves) + 2.5, 4), layout="constrained")
    axes = figure.subplots(1, len(curves), squeeze=False)
    for axis, (source, by_policy) in zip(axes[0], curves.items(), strict=True):
        for number, (policy, runs) in enumerate(by_policy.items()):
            colour, style = f"C{number}", "-" if number < 10 else "--"  # there are ten colours
            for points in runs:
                axis.plot(*zip(*points, strict=True), color=colour, alpha=0.25, linewidth=0.7)
            steps = sorted(set.intersection(*({step for step, _ in points} for points in runs)))
            mean = [statistics.mean(dict(points)[step] for points in runs) for step in steps]
            axis.plot(steps, mean, style, color=colour, linewidth=2, label=policy)
        axis.set(title=source, xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))  # beside the curves: there may be a dozen
    picture.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(picture))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
