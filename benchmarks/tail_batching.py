"""Compares tail batching and its relatives: simulated, beside Flexes' figures, and measured on the embedded engine.

    python benchmarks/tail_batching.py                         # simulated and measured
    python benchmarks/tail_batching.py --part simulated        # Table 2, figures 9 to 11 and 14: minutes, no GPU
    python benchmarks/tail_batching.py --part utilisation      # how busy simulated GPUs are under each policy
    python benchmarks/tail_batching.py --part measured         # rollout and total time of a trained sample, on this CPU

Prints one JSON line, progress on standard error. `--steps` (20: complete periods of four short rounds and a long one)
and `--seeds` (1) are those of each simulated run. benchmarks/README.md describes the figures.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--part", choices=("all", "simulated", "utilisation", "measured"), default="all")
    parser.add_argument("--steps", type=int, default=20, help="of a simulated run, a multiple of 5 (default 20)")
    parser.add_argument("--seeds", type=int, default=1, help="simulated runs of each setting of Table 2 (default 1)")
    options = parser.parse_args(argv)
    if options.steps < 5 or options.steps % 5 or options.seeds < 1:
        print("error: --steps must be a multiple of 5, --seeds at least 1", file=sys.stderr)
        return 2
    result: dict[str, Any] = {"benchmark": "tail_batching"}
    if options.part in ("all", "simulated"):
        from tail_batching_simulated import simulate

        result["simulated"] = simulate(options.steps, range(options.seeds))
    if options.part in ("all", "utilisation"):
        from tail_batching_simulated import utilisation

        result["utilisation"] = utilisation(2 * options.steps, 0)
    if options.part in ("all", "measured"):
        from policies_measured import Sizes, measure

        result["measured"] = measure(Sizes())
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
