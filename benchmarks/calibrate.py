"""Measures this machine's speeds for the cost model, and writes the file of the planner.

    python benchmarks/calibrate.py                        all devices of JAX; without an accelerator, 8 of the CPU
    python benchmarks/calibrate.py --devices=2 --quick    two devices, rough figures

It measures the project's attention over packed sequences (forward, and backward for its factor), both all-to-alls of
an attention at each degree, and matrix products of the widths of the language model and of the vision tower. The forms
of `sharding.cost` are fitted to the times; the table shows how well. `CostModel.load(FILE)` reads the result. Links
within and across nodes are not distinguished: run it on one node, and cap the sharding degree at its devices.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # also without an installation

if TYPE_CHECKING:
    from benchmarks.measured_costs import Rows
    from sharding.cost import CostModel

CPU_DEVICES = 8  # devices of the CPU, if there is no accelerator
FORCE = "xla_force_host_platform_device_count"


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error for what cannot be measured or written."""
    options = _parser().parse_args(argv)
    out = pathlib.Path(options.out)
    if options.devices < 0 or options.devices == 1 or options.repeats < 0:
        return _fail("--devices must be at least 2 (0 is all there are) and --repeats must not be negative")
    if not out.parent.is_dir():
        return _fail(f"--out={out}: there is no folder {out.parent}")
    if FORCE not in os.environ.get("XLA_FLAGS", ""):  # before JAX starts; accelerators ignore the flag
        flags = f"{os.environ.get('XLA_FLAGS', '')} --{FORCE}={options.devices or CPU_DEVICES}"
        os.environ["XLA_FLAGS"] = flags.strip()
    from benchmarks.cost_fit import named, save
    from benchmarks.measured_costs import calibrate
    from sharding.cost import CostError
    from sharding.mesh import MeshError

    try:
        model = named(options.model)
        cost, rows = calibrate(options.devices, quick=options.quick, repeats=options.repeats)
        save(cost.of(model), out)
    except (CostError, MeshError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"--out={out}: {error.strerror}")
    _show(cost, rows, out)
    return 0


def _show(cost: CostModel, rows: Rows, out: pathlib.Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=cost.source, caption_justify="left")
    for name, justify in (("", "left"), ("measured ms", "right"), ("fitted ms", "right"), ("error", "right")):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    for name, measured, fitted in rows:
        table.add_row(name, f"{measured * 1e3:.3f}", f"{fitted * 1e3:.3f}", f"{fitted / measured - 1:+.0%}")
    console = Console()
    console.print(table)
    for name, figures in cost.fits.items():
        console.print(
            f"{name}: R2 {figures['r2']:.3f}, relative error {figures['mean_relative_error']:.0%} on average, "
            f"{figures['worst_relative_error']:.0%} at worst"
        )
    console.print(
        f"linear {cost.linear_flops / 1e9:,.0f} GFLOP/s, vision tower {cost.vision_flops / 1e9:,.0f} GFLOP/s, "
        f"attention backward {cost.backward_attention:.2f} times forward"
    )
    console.print(f"written to {out}", soft_wrap=True)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/calibrate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", default="cost.json", help="the file to write (default cost.json)")
    parser.add_argument("--devices", type=int, default=0, help="how many of the devices (default: all)")
    parser.add_argument("--model", default="qwen2.5-vl-7b", help="the model to scale to (default qwen2.5-vl-7b)")
    parser.add_argument("--repeats", type=int, default=0, help="timed calls of each (default 10 CPU, 20 else)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
