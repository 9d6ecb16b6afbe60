"""Runs the real coordinator and its policies against a simulated cluster, on virtual time.

    python -m fluxjax.simulate --config=configs/simulation.py:14b-tail
    python -m fluxjax.simulate --config.simulation.gpus=64 --config.steps=20 --gantt gantt.png
    python -m fluxjax.simulate --config=configs/simulation.py:1024 --json

Prints a summary, or with --json one JSON line. --gantt FILE draws the last steps. docs/simulation.md says what the
seconds are made of, and how far to trust them.
"""

import argparse
import json
import pathlib
import sys
import time

from .config.cli import parse
from .simulation.options import SimulateConfig

DEFAULT_CONFIG = "configs/simulation.py"


def main(argv: list[str]) -> int:
    """Returns 0; 1 if the run cannot go on; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage="python -m fluxjax.simulate --help")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gantt", type=pathlib.Path)
    options, rest = parser.parse_known_args(argv)
    config = parse(rest, __doc__ or "", SimulateConfig, DEFAULT_CONFIG)
    if options.gantt and not options.gantt.absolute().parent.is_dir():
        print(f"error: --gantt {options.gantt}: there is no folder {options.gantt.parent}", file=sys.stderr)
        return 2
    from .base.process import collector_paused
    from .coordinator import CoordinatorError  # loads JAX: imported only after the command line is checked
    from .simulation.simulated_run import ProgressLine, make_cluster, show, summary
    from .simulation.virtual_cluster import StuckError

    cluster = make_cluster(config, ProgressLine(config.steps))
    began, status = time.perf_counter(), 0
    try:
        with collector_paused():  # a simulation makes no circles of references
            cluster.run()
    except KeyboardInterrupt:
        print("interrupted; this is how far it came", file=sys.stderr)
        status = 130
    except (CoordinatorError, StuckError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    result = summary(cluster, time.perf_counter() - began)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    if options.gantt:
        from .report.pictures import timeline

        timeline(cluster.timeline.spans(), options.gantt)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
