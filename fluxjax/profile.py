"""Measures how fast the embedded engine prefills and decodes on 1, 2, 4, ... devices of this machine.

    python -m fluxjax.profile --config=configs/text.py --out profile.json
    python -m fluxjax.profile --out profile.json --degrees 1 2 --batches 16 64 --lengths 32 64 --repeats 3

--config.parallelism.profile=profile.json then begins a run with the degree that decodes fastest. On a machine without
accelerators, XLA_FLAGS=--xla_force_host_platform_device_count=4 gives more than one device, to try it.
"""

import argparse
import asyncio
import sys

from .config import ConfigError
from .config.cli import parse


def main(argv: list[str]) -> int:
    """Returns 0, or 2 for an error that the user can mend: in the file, or in the degrees, batches or lengths."""
    parser = argparse.ArgumentParser(prog="python -m fluxjax.profile", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", default="profile.json")
    for name in ("degrees", "batches", "lengths"):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[])
    parser.add_argument("--repeats", type=int, default=5)
    args, rest = parser.parse_known_args(argv)
    config = parse(rest, f"{__doc__}\n{parser.format_usage()}")

    import jax

    from rollout.engine import EngineError
    from rollout.jax_engine import JaxEngine
    from rollout.throughput import Profile, measure, sizes

    from .base.errors import DataError
    from .base.process import use_compile_cache
    from .data.sources import open_sources
    from .run.build import build_model

    use_compile_cache()
    devices = jax.local_devices()
    rollout = config.rollout
    new_tokens = min(16, rollout.max_sequence_tokens // 2)
    degrees = args.degrees or [degree for degree in (1, 2, 4, 8) if degree <= len(devices)]
    batches = args.batches or sorted({max(rollout.slots // 8, 1), max(rollout.slots // 2, 1)})
    longest = rollout.max_sequence_tokens - new_tokens
    lengths = args.lengths or sorted({max(longest // 4, 1), longest})
    try:
        if max(degrees) > len(devices) or min(*degrees, *batches, *lengths, args.repeats) < 1:
            raise ConfigError(
                f"--degrees {degrees}, --batches {batches}, --lengths {lengths} and --repeats {args.repeats} must be "
                f"positive, and there are {len(devices)} devices"
            )
        model, _ = build_model(config, open_sources(config.data))
        engine = JaxEngine(
            model,
            slots=max(batches),
            max_sequence_tokens=max(lengths) + new_tokens,
            compute_dtype=config.model.compute_dtype.value,
            devices=devices[:1],
        )
        measuring = measure(
            engine,
            devices,
            degrees=degrees,
            batches=batches,
            lengths=lengths,
            new_tokens=new_tokens,
            repeats=args.repeats,
            vocabulary=model.config.text.vocab_size,
            progress=_progress,
        )
        points = asyncio.run(measuring)
        profile = Profile(devices[0].device_kind, len(devices), sizes(model.config.text), points)
        profile.save(args.out)
    except (ConfigError, DataError, EngineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{profile.device}, {profile.devices} devices; tokens a second of one engine")
    print(f"{'degree':>8}{'batch':>8}{'length':>8}{'prefill':>12}{'decode':>12}")
    for point in points:
        print(f"{point.degree:>8}{point.batch:>8}{point.length:>8}{point.prefill:>12.0f}{point.decode:>12.0f}")
    print(f"written to {args.out}")
    return 0


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty() or done in (1, total) or done * 10 // total != (done - 1) * 10 // total:
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        print(f"measured {done} of {total}", file=sys.stderr, end=end)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
