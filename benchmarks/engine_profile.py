"""Measures how fast the embedded engine prefills and decodes on 1, 2, 4, ... devices of this machine.

    python benchmarks/engine_profile.py --config=configs/text.py --out profile.json
    python benchmarks/engine_profile.py --out profile.json --degrees 1 2 --batches 16 64 --lengths 32 64 --repeats 3

--config.parallelism.profile=profile.json then begins a run with the degree that decodes fastest. On a machine without
accelerators, XLA_FLAGS=--xla_force_host_platform_device_count=4 gives several devices, to try the command.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import numpy as np

from fluxjax.config import ConfigError
from fluxjax.config.cli import parse
from models.inputs import ModelInput
from rollout.engine import Engine, EngineError, GenerateRequest, SamplingParams, TokenChunk
from rollout.throughput import VERSION, Point, Profile, sizes
from sharding.mesh import Device


def main(argv: list[str]) -> int:
    """Returns 0, or 2 for an error in the file, the degrees, the batches or the lengths."""
    parser = argparse.ArgumentParser(prog="python benchmarks/engine_profile.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", default="profile.json")
    for name in ("degrees", "batches", "lengths"):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[])
    parser.add_argument("--repeats", type=int, default=5)
    args, rest = parser.parse_known_args(argv)
    config = parse(rest, f"{__doc__}\n{parser.format_usage()}")

    import jax

    from fluxjax.base.errors import DataError
    from fluxjax.base.process import use_compile_cache
    from fluxjax.data.loader import open_sources
    from fluxjax.run.build import build_model
    from rollout.jax_engine import JaxEngine

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
        model, _ = build_model(config, open_sources(config))
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
        save(profile, args.out)
    except (ConfigError, DataError, EngineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{profile.device}, {profile.devices} devices; tokens a second of one engine")
    print(f"{'degree':>8}{'batch':>8}{'length':>8}{'prefill':>12}{'decode':>12}")
    for point in points:
        print(f"{point.degree:>8}{point.batch:>8}{point.length:>8}{point.prefill:>12.0f}{point.decode:>12.0f}")
    print(f"written to {args.out}")
    return 0


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    text = json.dumps({"version": VERSION, **dataclasses.asdict(profile)}, indent=1)
    pathlib.Path(path).write_text(text + "\n")


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty() or done in (1, total) or done * 10 // total != (done - 1) * 10 // total:
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        print(f"measured {done} of {total}", file=sys.stderr, end=end)


async def measure(
    engine: Engine,
    devices: Sequence[Device],
    *,
    degrees: Sequence[int],
    batches: Sequence[int],
    lengths: Sequence[int],
    new_tokens: int = 16,
    repeats: int = 5,
    vocabulary: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Point, ...]:
    """Measures an otherwise idle engine on the first 1, 2, 4, ... of `devices`, and leaves it on the last set of them.

    Each point is tried once for compilation, then `repeats` times in turn with all others, so that a busy machine
    spoils no point alone. The engine needs slots for the largest batch and room for the largest length and
    `new_tokens` (at least 2). `progress` gets the samples done and in all. Raises EngineError as the engine does.
    """
    cases = [(degree, batch, length) for degree in degrees for batch in batches for length in lengths]
    seconds: dict[tuple[int, int, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for turn in range(repeats + 1):
        for number, case in enumerate(cases):
            degree, batch, length = case
            await engine.set_parallelism(devices[:degree])
            measured = await _once(engine, batch, length, new_tokens, vocabulary)
            if turn:
                seconds[case].append(measured)
            progress(turn * len(cases) + number + 1, (repeats + 1) * len(cases))
    points = []
    for degree, batch, length in cases:
        prefill, decode = (statistics.median(phase) for phase in zip(*seconds[degree, batch, length], strict=True))
        points.append(Point(degree, batch, length, batch * length / prefill, batch * (new_tokens - 1) / decode))
    return tuple(points)


async def _once(engine: Engine, batch: int, length: int, new_tokens: int, vocabulary: int) -> tuple[float, float]:
    """Seconds until all samples have their first token, and from then until all are complete."""
    rng = np.random.default_rng(0)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, length))
    first = [0.0] * batch

    async def read(number: int, stream: AsyncIterator[TokenChunk]) -> None:
        async for _ in stream:
            first[number] = first[number] or time.perf_counter()

    await engine.pause()
    streams = []
    for number in range(batch):
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        prompt = ModelInput(ids, positions, np.full(length, -1, np.int32), length)
        sampling = SamplingParams(max_new_tokens=new_tokens)
        streams.append(engine.generate(GenerateRequest(f"profile.{number:06d}", prompt, sampling, seed=number)))
    begin = time.perf_counter()
    await engine.resume()
    await asyncio.gather(*(read(number, stream) for number, stream in enumerate(streams)))
    end, started = time.perf_counter(), max(first)
    return started - begin, max(end - started, 1e-9)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
