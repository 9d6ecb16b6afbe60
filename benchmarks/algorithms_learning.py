"""Measures whether every built-in algorithm learns: held-out accuracy of an embedded task, over several seeds.

    python benchmarks/algorithms_learning.py --out runs/algorithms      # 33 runs, about 25 minutes on two cores
    python benchmarks/algorithms_learning.py --out runs/algorithms --picture docs/pictures/algorithms.png
    python benchmarks/algorithms_learning.py --algorithms grpo cispo --seeds 0 1

Every run is `python -m fluxjax.train` with a seed and `--config.algorithm.name`. The only other difference:
`distillation` has a teacher, the model that `grpo` trained with the same seed. Runs that are complete in `--out` are
not repeated. Prints one JSON line: for each algorithm the accuracies after the warm start and at the end, and in points
the gain and the difference to `grpo` over pairs of equal seeds, with their 95 % intervals (Student's t);
`not_above_warm_start` names the algorithms whose gain's interval does not lie above 0.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

from policies_learning import draw, paired_points, train

from fluxjax.algorithms import ALGORITHMS

NAMES = [name for name in ALGORITHMS if name != "sft"]  # the warm start is `sft`
TEACHER = "grpo"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/text.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--every", type=int, default=20, help="steps between two evaluations on all held-out prompts")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/algorithms"))
    parser.add_argument("--picture", type=pathlib.Path, help="where to draw the curves")
    options = parser.parse_args(argv)
    # The teacher learns first.
    names = sorted(options.algorithms, key=lambda name: name != TEACHER)
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in options.seeds:  # seed by seed: finished runs can then be compared early
        for name in names:
            folder = options.out / f"{name}-{seed}"
            if not train(folder, options.config, seed, options.every, _flags(name, options.out, seed)):
                print(f"error: {name} with seed {seed} did not end well; see {folder}.log", file=sys.stderr)
                return 1
            summaries[name].append(json.loads((folder / "summary.json").read_text()))
    measured = {name: _gains(summaries[name]) for name in names}
    for name, by_source in measured.items():
        for source, figures in by_source.items():
            if name != TEACHER and TEACHER in measured:
                figures[f"above_{TEACHER}_points"] = paired_points(figures["end"], measured[TEACHER][source]["end"])
    flat = [
        f"{name} ({source})"
        for name, by_source in measured.items()
        for source, figures in by_source.items()
        if figures["gain_points"].get("interval_95", [0.0])[0] <= 0.0
    ]
    result = {"benchmark": "algorithms_learning", "config": options.config, "seeds": options.seeds}
    print(json.dumps(result | {"not_above_warm_start": flat, "measured": measured}))
    if options.picture:
        draw(options.out, names, options.seeds, options.picture)
    return 0


def _flags(name: str, out: pathlib.Path, seed: int) -> list[str]:
    flags = [f"--config.algorithm.name={name}"]
    if name == "distillation":
        flags.append(f"--config.algorithm.reference={out / f'{TEACHER}-{seed}' / 'model'}")
    return flags


def _gains(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns by source the accuracies after the warm start and at the end of each run, and the gain in points."""
    result = {}
    for source in sorted(summaries[0]["accuracy"]):
        start, end = ([summary["accuracy"][source][at] for summary in summaries] for at in ("start", "end"))
        result[source] = {"start": start, "end": end, "gain_points": paired_points(end, start)}
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
