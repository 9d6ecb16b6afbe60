"""Measures what the shadow loader saves: waiting for data, memory of process 0, bytes between processes.

    python benchmarks/shadow_loader.py                                   # all parts, one JSON line
    python benchmarks/shadow_loader.py --part critical [--steps N] [--prompts N] [--epochs N]
    python benchmarks/shadow_loader.py --part memory [--batches 64 256 1024]
    python benchmarks/shadow_loader.py --part bytes [--materializers 2 4 8]
    python benchmarks/shadow_loader.py --part decode [--repeats N]
    python benchmarks/shadow_loader.py --part modes

`critical` runs two trainer processes without a model, each with one core that it shares with its preprocessor: a small
cluster. They wait instead of computing; all else is real: files, draws, plans (FlexUlysses), process 0's messages,
slices. `critical_path_share` is the time that a step waits for data, over the sum of this time and the computing time.
The latter is such that `central` loses about 55 %, and equal for `shadow`. `benchmarks/README.md` says more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

import shadow_media
from common import ROOT, cores, peak_rss_mib, spread

LOST = 0.55  # the target for the share of a step that `central` loses
NEAR_GIB = 1.0  # `data.near_gib`, in `critical`: with it, two steps are prepared before they are drawn
TURNS = (0.5, 0.75)  # factors on the computing time: decoding then takes longer than computing
PARTS = ("critical", "memory", "bytes", "decode", "modes")


@dataclasses.dataclass(frozen=True)
class World:
    """The settings that all processes of a measurement share."""

    manifest: str
    loader: str  # central, flight or uri
    addresses: tuple[str, ...] = ()  # the preprocessors'
    prompts: int = 8
    processes: int = 2
    workers: int = 0
    frames: int = 16
    row: int = 1 << 14  # tokens of a device's microbatch
    pinned: bool = False
    near_gib: float = 0.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--media", type=pathlib.Path, help="folder for the media (made once; default: temporary)")
    parser.add_argument("--prompts", type=int, help="of a step (default: 128 in `critical`, 32 in `modes`)")
    parser.add_argument("--steps", type=int, default=3, help="of an epoch, in `critical` and `modes`")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--materializers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.media or pathlib.Path(scratch)
        measured = {part: MEASURES[part](options, folder / part) for part in options.part}
    result: dict[str, Any] = {"benchmark": "shadow_loader", "cores": cores(), "load_average_before": round(load, 2)}
    critical, memory, decode = (measured.get(name) for name in ("critical", "memory", "decode"))
    if critical:
        result["critical_path_share"] = {side: critical[side]["share"] for side in ("central", "shadow")}
    if memory:
        result["controller_memory_growth"] = {side: memory[side]["growth"] for side in ("central", "shadow")}
    if decode:
        result["decode_ratio"] = decode["ratio"]
    print(json.dumps(result | measured))
    return 0


# --- processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def preprocessors(count: int, pinned: bool = False, flags: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """Starts preprocessors, yields their addresses, and ends them. With `pinned`, each has a core of its own."""
    command = [sys.executable, "-m", "fluxjax.preprocess", *flags]
    started = []
    try:
        for k in range(count):
            core = ["taskset", "-c", str(k % cores())] if pinned else []
            started.append(subprocess.Popen([*core, *command], stdout=subprocess.PIPE, cwd=ROOT))
        lines = [process.stdout.readline() for process in started if process.stdout is not None]
        yield tuple(json.loads(line)["address"] for line in lines)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function in a new process, which has its own memory and threads, and returns its result. Raises
    RuntimeError if the function raises."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    if isinstance(result, Exception):
        raise result
    return result


def _answer(pipe: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        pipe.send(function(*arguments))
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


# --- the parts ------------------------------------------------------------------------------------


def critical(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    prompts = options.prompts or 128
    manifest = shadow_media.build(folder, prompts * options.steps * 3 // 4, prompts * options.steps // 4, (64, 160))
    world = World(str(manifest), "central", prompts=prompts, row=1 << 12, pinned=True)

    def run(world: World, compute: float, epochs: int) -> dict[str, Any]:
        with preprocessors(2 if world.loader == "flight" else 0, pinned=True, flags=["--workers=1"]) as addresses:
            world = dataclasses.replace(world, addresses=addresses)
            return _shared(in_process(_controller, world, compute, options.steps * epochs), options.steps)

    compute = 0.0
    for _ in range(3):  # with longer computing, more media are decoded meanwhile
        data = run(world, compute, 1)["data_seconds"]
        compute = statistics.fmean([compute, data]) * (1 - LOST) / LOST if compute else data * (1 - LOST) / LOST / 1.5
    shadow = dataclasses.replace(world, loader="flight")
    ahead = dataclasses.replace(shadow, near_gib=NEAR_GIB)
    # If all cores decode during all of the computing time, no loader can hide more.
    turns = {f"{factor:g}": run(ahead, factor * compute, 1) for factor in TURNS}
    return {
        "compute_seconds": round(compute, 3),
        "prompts": prompts,
        "near_gib": NEAR_GIB,
        "central": run(world, compute, options.epochs),
        "shadow": run(ahead, compute, options.epochs),
        "shadow_by_default": run(shadow, compute, options.epochs),
        "first_epoch_by_compute": {k: {n: t[n] for n in ("share", "busy_by_epoch")} for k, t in turns.items()},
    }


def _shared(steps: Sequence[dict[str, float]], an_epoch: int) -> dict[str, Any]:
    """Summarises the steps of a run. Shares and means leave out the first step, which does all work that is done only
    once."""
    epochs = [range(max(k, 1), min(k + an_epoch, len(steps))) for k in range(0, len(steps), an_epoch)]
    epochs = [epoch for epoch in epochs if epoch]

    def share(numbers: Sequence[int]) -> float:
        data, compute = (sum(steps[k][name] for k in numbers) for name in ("data", "compute"))
        return round(data / (data + compute), 4)

    def busy(numbers: Sequence[int]) -> float:
        first, last = steps[numbers[0] - 1], steps[numbers[-1]]
        return round((last["busy"] - first["busy"]) / (last["at"] - first["at"]) / cores(), 3)

    return {
        "share": share(range(1, len(steps))),
        "share_by_epoch": [share(epoch) for epoch in epochs],
        "busy_by_epoch": [busy(epoch) for epoch in epochs],
        "plan_seconds": round(statistics.median(step["plan"] for step in steps), 4),
        "time_to_first_batch": round(steps[0]["data"], 3),
    } | {
        f"{name}_seconds": round(statistics.fmean(step[name] for step in steps[1:]), 4)
        for name in ("data", "draw", "prefill", "train")
    }


def memory(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    manifest = shadow_media.build(folder, 96, 32, (32, 64))
    result: dict[str, Any] = {}
    with preprocessors(2, flags=["--workers=1"]) as addresses:
        for side, loader in (("central", "central"), ("shadow", "flight")):
            peaks = {}
            for batch in options.batches:
                found = addresses if loader == "flight" else ()
                world = World(str(manifest), loader, found, batch, processes=8, frames=8)
                peaks[batch] = in_process(_peak, world)
            least, most = min(options.batches), max(options.batches)
            allowed = 2 * (most - least) / 1024  # MiB: 2 kB a sample
            grown = (peaks[most] - allowed) / peaks[least] - 1
            result[side] = {"peak_mib": peaks, "growth": round(grown, 4)}
    return result


def bytes_fetched(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    manifest = shadow_media.build(folder, 18, 6, (128, 160))  # videos that are long enough to be spread, and pictures
    with preprocessors(2, flags=["--workers=1"]) as addresses:
        world = World(str(manifest), "flight", addresses, prompts=24, frames=128)
        found = {n: in_process(_fetched, dataclasses.replace(world, processes=n)) for n in options.materializers}
    return {
        "by_materializers": found,
        "largest_over_share": max(figures["largest_over_share"] for figures in found.values()),
    }


def decode(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    manifest = shadow_media.build(folder, 48, 0, (48, 160))
    rates: dict[str, list[float]] = {}
    for _ in range(options.repeats):  # in turns
        for side in ("shadow", "torch", "grain"):
            with (
                preprocessors(2, flags=["--workers=1"]) if side == "shadow" else contextlib.nullcontext(()) as addresses
            ):
                rate = in_process(_decoded, World(str(manifest), side, addresses))
            if rate is not None:
                rates.setdefault(side, []).append(rate)
    medians = {side: statistics.median(rate) for side, rate in rates.items()}
    ratio = {side: round(medians["shadow"] / rate, 3) for side, rate in medians.items() if side != "shadow"}
    return {"frames_per_second": {side: spread(rate) for side, rate in rates.items()}, "ratio": ratio}


def modes(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Compares slices over Arrow Flight with processes that each decode their own media: the seconds until pixels
    arrive, without any computing."""
    prompts = options.prompts or 32
    manifest = shadow_media.build(folder, prompts * options.steps, 0, (64, 160))
    result: dict[str, Any] = {}
    for name in ("flight", "uri"):
        world = World(str(manifest), name, prompts=prompts, workers=1)
        with preprocessors(2, flags=["--workers=1"]) if name == "flight" else contextlib.nullcontext(()) as addresses:
            steps = in_process(_controller, dataclasses.replace(world, addresses=addresses), 0.0, 2 * options.steps)
        figures = _shared(steps, options.steps)
        halves = [steps[: options.steps], steps[options.steps :]]
        result[name] = {"seconds_by_epoch": [round(sum(s["data"] for s in half), 3) for half in halves], **figures}
    result["flight_over_uri"] = round(result["flight"]["data_seconds"] / result["uri"]["data_seconds"], 3)
    return result


MEASURES = {"critical": critical, "memory": memory, "bytes": bytes_fetched, "decode": decode, "modes": modes}


def _controller(world: World, compute: float, steps: int) -> list[dict[str, float]]:
    from shadow_worker import controller

    return controller(world, compute, steps)


def _peak(world: World) -> float:
    from shadow_worker import one_batch

    one_batch(world)
    return peak_rss_mib()


def _fetched(world: World) -> dict[str, Any]:
    from shadow_worker import slices_fetched

    return slices_fetched(world)


def _decoded(world: World) -> float | None:
    from shadow_worker import frames_per_second

    return frames_per_second(world)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
