"""Held-out accuracy of one of a run's checkpoints.

    python -m fluxjax.evaluate --run DIR                 the newest checkpoint
    python -m fluxjax.evaluate --run DIR --step 200      the checkpoint after step 200, if it was kept
    python -m fluxjax.evaluate --run DIR --blind         with every pixel blanked
    python -m fluxjax.evaluate --run DIR --json          one JSON line

The run may still be going on: nothing in its folder is changed.
"""

import argparse
import json
import pathlib
import sys


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fluxjax.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", required=True, type=pathlib.Path, metavar="DIR", help="the run folder")
    parser.add_argument("--step", type=int, help="the step of a checkpoint (default: the newest)")
    parser.add_argument("--samples", type=int, help="prompts of each data source (default: as in the run's settings)")
    parser.add_argument("--blind", action="store_true", help="blank every pixel: what is answered without the media?")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args(argv)

    import absl.logging

    from .config import ConfigError
    from .config.run_folder import read_config

    errors: tuple[type[Exception], ...] = (ConfigError,)
    try:
        config = read_config(args.run)
        if args.samples is not None:
            config.evaluation.samples = args.samples
        config.validate()
        config.sharding.devices = 0  # all devices of this machine
        from .base.process import use_compile_cache
        from .run.main import USER_ERRORS
        from .run.trainer import FluxTrainer

        errors = USER_ERRORS
        absl.logging.set_verbosity(absl.logging.ERROR)  # Orbax would warn of a read-only folder
        use_compile_cache()
        with FluxTrainer(config, read_only=True) as trainer:
            step = trainer.load_checkpoint(args.step)
            accuracy = trainer.evaluate(blind=args.blind)
    except errors as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = {source: len(prompts) for source, prompts in trainer.held_out.prompts.items()}
    if args.json:
        print(json.dumps({"step": step, "blind": args.blind, "accuracy": accuracy, "prompts": counts}))
        return 0
    print(f"step {step}{', blind' if args.blind else ''}")
    for source, value in accuracy.items():
        print(f"  {source:<16}{value:7.1%} of {counts[source]} held-out prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
