"""Measures fluxjax on one GPU, part by part: the first measurements on a card that is lent for a quarter of an hour.

    python benchmarks/gpu_suite.py all                       every part, in the order below
    python benchmarks/gpu_suite.py machine kernels           some parts
    python benchmarks/gpu_suite.py all --seconds 540         without parts that would not end in time
    python benchmarks/gpu_suite.py all --dry                 on a CPU, at tiny shapes: whether every part runs

A part is a process of its own, `benchmarks/gpu/PART.py`, with a time limit of its own; some parts run another part's
script under other flags of XLA. A part that fails or is stopped never stops the next. Its result (card, versions,
prediction, figures) is appended to `gpu_CARD.json` in `--out` when it ends; a part that was stopped keeps the figures
that it had printed. Compiled programs and the results of autotuning go to `cache` in the same folder; the next run uses
them. The output of parts goes to `logs`.

Without network, `--wheels DIR` installs wheels for this run only; `scripts/gpu_wheels.sh DIR` downloads them.

parts, with the expected seconds and the prediction of each:
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence

from gpu import record, runner

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
QUICK_TUNING = "--xla_gpu_blas_max_algorithms=16"  # tries fewer algorithms of each product: compiles faster
UNTUNED = "--xla_gpu_autotune_level=0"  # a tiny model's products gain nothing, and its many programs start at once
COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"


@dataclasses.dataclass(frozen=True)
class Part:
    """A script of `benchmarks/gpu`. The prediction was written before the first figure."""

    limit: float  # seconds
    expected: float  # seconds
    prediction: str
    script: str = ""  # "": the script of the part's own name
    flags: tuple[str, ...] = (QUICK_TUNING,)  # flags of XLA


PARTS = {
    "machine": Part(
        60, 10, "bf16 product 680-790 TFLOP/s; copy 2.9-3.0 TB/s; 14 arrays 0.3-0.6 ms; empty call 20-40 us"
    ),
    "kernels": Part(150, 70, "errors: bf16 <= 0.012, f32 <= 2e-5 of the largest value; equal bits twice"),
    "attention": Part(
        150,
        50,
        "1 x 16384: forward 300-350 TFLOP/s (5.5-6.4 ms), backward 190-240 (20-25 ms), cuDNN forward 620-650; "
        "16 x 1024: forward 220-270; branches within 15 % of that by allowed pairs",
    ),
    "attention_values": Part(
        100, 50, "errors of both kernels 2e-3 to 6e-3, equal bits; two calls: XLA below 1e-5, cuDNN above 0.012"
    ),
    "attention_candidates": Part(
        240,
        120,
        "1 x 16k, TFLOP/s: ours 620-640 forward, 455-470 backward (measured before its frame was shared), Triton 421, "
        "376; heads of 256: Triton takes 0.3-0.6 of portable",
    ),
    "head": Part(
        80, 20, "fused: forward 40 ms (450 TFLOP/s), backward 105 (340); portable: forward 55-70, backward 150+"
    ),
    "train": Part(
        200,
        115,
        "remat=layer 390-405 ms, remat=dots 368-380 ms (398 and 374 measured), four microbatches 1420-1450 ms, MFU "
        "44.7-45.7 %; remat=none at 8192 tokens 205-213 ms (216 by Triton's kernels)",
    ),
    "engine": Part(
        140,
        60,
        "as measured: 3.0 ms a token at 64 slots, 2.4 at 8 (4.7 and 3.06 with gathered pages and rounds of 4)",
    ),
    "trace": Part(
        75,
        50,
        "training: matrix products 60-65 %, attention 10-15, element-wise 15-20, head 13; "
        "decoding: 525 kernels and 3 waits of the host a token",
    ),
    "loop": Part(
        240,
        200,
        "as measured, 122 s to the first step of RL, then 0.37 s a step; log-probabilities differ by < 1e-5 (1.9e-4 "
        "with TF32)",
        flags=(UNTUNED,),
    ),
    "rounds": Part(150, 90, "rounds of 64 tokens take 25 % less a token than rounds of 4, at 8 prompts"),
    "rounds_graphs": Part(
        150,
        90,
        "with command buffers, 20 % less a token than without, at 8 prompts",
        "rounds",
        (QUICK_TUNING, COMMAND_BUFFERS),
    ),
    "paged": Part(
        90,
        40,
        "in place, ms a layer: 64 x 4096 0.19-0.23 (floor 0.160; gathered 0.615, Pallas 0.282 measured), 64 x 1024 "
        "0.055-0.075, one row of 32k among 63 of 1k 0.08-0.12 (gathered 3.33, Pallas 0.182)",
    ),
    "deltanet": Part(
        150,
        60,
        "errors <= 2e-6; 4096 tokens, forward and backward: 12-20 ms, a scan over tokens 20-40 times as long; 1024 and "
        "16384 tokens in proportion; blocks of 32 chunks 20-40 % faster; a shared prompt saves 0.60-0.65",
    ),
    "train_tuned": Part(240, 150, "with all algorithms tried, 3-8 % less a step than `train`", "train", ()),
}


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 if a part failed, or 2 with one line on standard error for settings that cannot work."""
    options = _parser().parse_args(argv)
    unknown = [name for name in options.parts if name not in (*PARTS, "all")]
    if unknown:
        print(f"error: no part is called {unknown[0]!r}; there are: {', '.join(PARTS)}, all", file=sys.stderr)
        return 2
    if options.wheels and not list(options.wheels.glob("*.whl")):
        print(f"error: {options.wheels} has no wheels; scripts/gpu_wheels.sh downloads them", file=sys.stderr)
        return 2
    names = list(PARTS) if "all" in options.parts else options.parts
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as temporary:
        folder = options.out or (pathlib.Path(temporary) / "out" if options.dry else RESULTS)
        return _run(names, options, folder, pathlib.Path(temporary))


def _run(names: Sequence[str], options: argparse.Namespace, folder: pathlib.Path, temporary: pathlib.Path) -> int:
    started = time.monotonic()
    runner.stop_on_signals()
    packages = runner.install(options.wheels, temporary / "packages") if options.wheels else None
    environment = runner.environment(folder, packages, dry=options.dry)
    card, driver = record.card()
    versions = record.versions(driver, packages)
    results = record.Results(folder / f"gpu_{record.short(card)}.json")
    for name in names:
        part = PARTS[name]
        left = (options.seconds or float("inf")) - (time.monotonic() - started)
        if left < part.expected:
            print(f"{name}: left out, {part.expected:.0f} s expected and {left:.0f} s left", file=sys.stderr)
            results.leave_out(name, left)
            continue
        print(f"{name}: at most {min(part.limit, left):.0f} s", file=sys.stderr, flush=True)
        flagged = environment if options.dry else runner.with_flags(environment, part.flags)
        logs = folder / "logs"
        ended = runner.run(name, min(part.limit, left), flagged, logs, dry=options.dry, script=part.script)
        results.add(name, ended, card=card, dry=options.dry, versions=versions, prediction=part.prediction)
    print(results.table())
    return int(results.failed)


def _parser() -> argparse.ArgumentParser:
    parts = "\n".join(
        textwrap.fill(f"{name:13} {part.expected:.0f} s. {part.prediction}", 110, subsequent_indent=" " * 14)
        for name, part in PARTS.items()
    )
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{parts}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", metavar="PART", help="a part, or all")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny shapes; nothing is kept without --out")
    parser.add_argument("--seconds", type=float, metavar="N", help="for all parts together")
    parser.add_argument("--wheels", type=pathlib.Path, metavar="DIR", help="wheels to install for this run")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="default: benchmarks/results")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
