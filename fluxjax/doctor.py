"""Finds why a server and the trainer disagree, or what is wrong with an installation, or with data and rewards.

    python -m fluxjax.doctor --server http://127.0.0.1:30000 --model Qwen2.5-VL-3B-Instruct
    python -m fluxjax.doctor                                  the installation
    python -m fluxjax.doctor --config=configs/vlm.py          also data and rewards; takes fluxjax.train's flags

With a server (SGLang, or rollout.serve), the trainer and the server get the same prompts of text, images, boxes and a
video. Causes are checked before effects; the first part that differs is named, with the likely fix (docs/doctor.md).
The trainer's part runs here: JAX_PLATFORMS=cpu leaves the server's GPU alone. FLUXJAX_TOKEN is the server's token.

Each check prints a line: ok, differs, or cannot be asked, and why. Exit status: 0, 1 if something differs, 2 for
arguments, a checkpoint or a server that can't be used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import TYPE_CHECKING

from rollout.listening import Parser, exit_status, number

from .config.cli import load

if TYPE_CHECKING:
    from .diagnosis import Finding


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m fluxjax.doctor", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--server", metavar="URL", help="the server's address")
    parser.add_argument("--model", metavar="DIR", help="with --server: the trainer's checkpoint folder")
    parser.add_argument(
        "--text", default="Which of the 3 boxes is red?", help="the probes' text (default: %(default)s)"
    )
    parser.add_argument("--image", nargs="+", default=[], metavar="FILE", help="images, each for one more probe")
    parser.add_argument("--video", nargs="+", default=[], metavar="FILE", help="videos, each for one more probe")
    parser.add_argument("--tolerance", type=number(float, 0, above=True), metavar="X",
                       help="allowed mean difference of log-probs (default: 0.001, or 0.05 below float32)")  # fmt: skip
    parser.add_argument(
        "--dumps", metavar="DIR", help="the server's --debug-tensor-dump-output-folder, to find the layer that differs"
    )
    parser.add_argument(
        "--samples", type=number(int, 1), default=20, metavar="N", help="records read of each data source (default 20)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options, options.flags = parser.parse_known_args(argv)
    if bool(options.server) != bool(options.model) or (options.server and options.flags):
        parser.error("--server URL and --model DIR must be given together, and without --config")
    if options.dumps and not options.server:
        parser.error("--dumps DIR needs --server URL")
    options.differs = False
    return exit_status(lambda options: asyncio.run(_examine(options)), options) or int(options.differs)


async def _examine(options: argparse.Namespace) -> None:
    """Prints findings (of a server: up to the first difference) and the conclusion; sets `options.differs`."""
    if options.server:
        from .diagnosis.server import ServerComparison

        findings = ServerComparison(options).findings()
    else:
        from .diagnosis.installation import installation

        findings = installation(load(options.flags) if options.flags else None, options.samples)
    seen: list[Finding] = []
    async for finding in findings:
        seen.append(finding)
        if not options.json:
            print(f"{finding.name:<20} {finding.state:<15} {finding.detail}", flush=True)
        if options.server and finding.state == "differs":
            break
    first = next((finding for finding in seen if finding.state == "differs"), None)
    options.differs = first is not None
    if options.json:
        checks = [{"name": finding.name, "state": finding.state, "detail": finding.detail} for finding in seen]
        print(json.dumps({"difference": first and first.name, "fix": first and first.fix, "checks": checks}))
    elif first is None:
        unasked = sum(not finding.asked for finding in seen)
        print("no difference" + f", but {unasked} checks could not be made" * bool(unasked))
    else:
        print(f"first difference: {first.name}\nlikely fix: {first.fix}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
