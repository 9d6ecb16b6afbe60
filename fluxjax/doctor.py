"""Finds what is wrong with a server beside the trainer, or with an installation and a configuration's data and rewards.

    python -m fluxjax.doctor --server http://127.0.0.1:30000 --model Qwen2.5-VL-3B-Instruct
    python -m fluxjax.doctor                                  the installation
    python -m fluxjax.doctor --config=configs/vlm.py          and data and rewards; flags as of fluxjax.train

With a server (SGLang, or rollout.serve), the trainer and the server get the same prompts of text, images, boxes and a
video. The parts are compared in the order of cause: template, token ids, weights, log-probs of each prompt (decoder,
pixels, positions by axis, tower), sampling, packed rows. The first part that differs is named, with the likely fix;
later parts are not asked. The trainer's model is computed here: JAX_PLATFORMS=cpu leaves the server's GPU alone.

Without a server: devices, driver and JAX's CUDA, jax-triton, memory, bubblewrap, decoder; and with a configuration,
some records of each source, and its rewards of a reference answer and of an empty one.

A line a check: ok, differs, or cannot be asked, and why. Exit status: 0, 1 if something differs, 2 for wrong arguments
or a server that can't be reached. FLUXJAX_TOKEN is the server's token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from rollout.listening import TOKEN, Parser, number

from .config import Config
from .config.cli import load

if TYPE_CHECKING:
    from .diagnosis.findings import Finding


def parser() -> Parser:
    found = Parser(prog="python -m fluxjax.doctor", description=__doc__, allow_abbrev=False)
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    found.add_argument("--server", metavar="URL", help="the server's address")
    found.add_argument("--model", metavar="DIR", help="with --server: the trainer's checkpoint folder")
    found.add_argument("--text", default="Which of the 3 boxes is red?", help="of the probes (default: %(default)s)")
    found.add_argument("--image", nargs="+", default=[], metavar="FILE", help="further probes, one an image")
    found.add_argument("--video", nargs="+", default=[], metavar="FILE", help="further probes, one a video")
    found.add_argument("--tolerance", type=number(float, 0, above=True), metavar="X",
                       help="of mean differences of log-probs (default: 0.001, or 0.05 below float32)")  # fmt: skip
    found.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                       help="of the packed rows: model.compute_dtype (default float32)")  # fmt: skip
    found.add_argument(
        "--samples", type=number(int, 1), default=20, metavar="N", help="records of a source (default 20)"
    )
    found.add_argument("--json", action="store_true", help="print one line of JSON")
    return found


def main(argv: list[str]) -> int:
    arguments = parser()
    options, flags = arguments.parse_known_args(argv)
    if bool(options.server) != bool(options.model) or (options.server and flags):
        arguments.error("--server URL and --model DIR go together, and take no --config")
    try:
        config = load(flags) if flags else None
        return asyncio.run(_shown(_findings(options, config), options.json, stops=bool(options.server)))
    except (ValueError, OSError, RuntimeError) as error:
        from rollout.engine import EngineError

        if isinstance(error, RuntimeError) and not isinstance(error, EngineError):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


async def _findings(options: argparse.Namespace, config: Config | None) -> AsyncIterator[Finding]:
    """Yields the findings that the options ask for. Raises EngineError, ValueError or OSError for wrong input."""
    if not options.server:
        from .diagnosis.installation import installation
        from .diagnosis.records import data_and_rewards

        for finding in installation(config):
            yield finding
        if config is not None:
            async for finding in data_and_rewards(config, options.samples):
                yield finding
        return
    from models.processing import Processor
    from rollout.sglang import ServerClient

    from .diagnosis.probes import probes
    from .diagnosis.server_checks import ServerComparison

    client = ServerClient(options.server, token=os.environ.get(TOKEN, ""))
    try:
        processor = Processor.load(options.model)
        asked, refused = probes(processor, options.text, options.image, options.video)
        comparison = ServerComparison(client, options.model, processor, asked, options.tolerance, options.dtype)
        async for finding in comparison.findings():
            yield finding
        for finding in refused:
            yield finding
    finally:
        await client.close()


async def _shown(findings: AsyncIterator[Finding], as_json: bool, stops: bool) -> int:
    """Prints findings, up to the first difference if `stops` is set, and the conclusion. Returns the exit status."""
    from .diagnosis.findings import State

    seen: list[Finding] = []
    async for finding in findings:
        seen.append(finding)
        if not as_json:
            print(f"{finding.name:<20} {finding.state.value:<15} {finding.detail}", flush=True)
        if stops and finding.state is State.DIFFERS:
            break
    first = next((finding for finding in seen if finding.state is State.DIFFERS), None)
    if as_json:
        checks = [{"name": name, "state": state.value, "detail": detail} for name, state, detail, _ in seen]
        print(json.dumps({"difference": first and first.name, "fix": first and first.fix, "checks": checks}))
    elif first is None:
        silent = sum(finding.state is State.UNKNOWN for finding in seen)
        print("no difference" + f", but {silent} checks could not be made" * bool(silent))
    else:
        print(f"first difference: {first.name}\nlikely fix: {first.fix}")
    return 0 if first is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
