"""Reports what a run needs of each device, without the devices: compiles the run's programs on this machine's CPU.

    python -m fluxjax.preflight --config=configs/qwen2_5_vl_7b.py --topology 1x8xh100
    python -m fluxjax.preflight --config=configs/qwen2_5_vl_7b.py --topology 1x8xh100 --layers 2 --json
    python -m fluxjax.preflight --config=configs/qwen2_5_7b.py --topology 1x8xh100 --config.rollout.slots=128

Compiles the largest shape of each program (gradients of a microbatch, update, log-probs, prefill, decode) for GPUs
that are only described: no weights, data or GPU are needed. Prints the memory of a device by kinds of use, all
collectives, the collectives that no computation hides, host memory for loading, the longest row that fits, and settings
that fit if the given ones do not.

  --topology HOSTSxDEVICESxKIND   the devices, such as 1x8xh100; kinds are those in fluxjax/sizing/targets
  --layers N                      compile N and 2N decoder layers only, and extrapolate: quicker for deep models
  --model-config FILE             a config.json with the model's sizes, if model.path is not on this machine; known
                                  models need none (fluxjax/sizing/models)
  --out FILE                      the picture; by default preflight.png in config.run_dir, or runs/preflight-NAME.png
  --json                          print one line of JSON instead of tables: fits, peak_gib, memory_gib, ...
  --aot-folder FOLDER             a folder with jax-cuda12-plugin and jax-cuda12-pjrt, or the same for CUDA 13; by
                                  default the folder that FLUXJAX_AOT names, else .aot of the checkout, which
                                  `bash scripts/test.sh aot` makes, else the Python environment

Exit status: 0 if the run fits, 1 if not, 2 for what the user can mend. JAX may use 95 % of a device's memory here, or
what XLA_PYTHON_CLIENT_MEM_FRACTION says. Set this variable for the run, too: without it, JAX takes 75 %.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys

from .config import Config, ConfigError
from .config.cli import parse

FRACTION = 0.95  # of a device's memory; CUDA, NCCL and the kernels' code need the rest


def main(argv: list[str]) -> int:
    """Returns 0 if the run fits, 1 if it does not, 2 for an error that the user can mend."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage="python -m fluxjax.preflight --help")
    parser.add_argument("--topology", default="1x8xh100")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--model-config", default="")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--aot-folder", default="")
    options, rest = parser.parse_known_args(argv)
    config = parse(rest, __doc__ or "", default="configs/qwen2_5_vl_7b.py")
    try:
        return _preflight(config, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _preflight(config: Config, options: argparse.Namespace) -> int:
    from .sizing.topology import MEMORY_FRACTION, Topology, find_plugin, memory_fraction

    topology, fraction = Topology.parse(options.topology), memory_fraction(FRACTION)
    if options.layers < 0:
        raise ConfigError(f"--layers {options.layers}: must not be negative")
    default = f"{config.run_dir}/preflight.png" if config.run_dir else f"runs/preflight-{config.name}.png"
    picture: pathlib.Path = options.out or pathlib.Path(default)
    if options.out and not picture.absolute().parent.is_dir():
        raise ConfigError(f"--out {picture}: there is no folder {picture.parent}")
    find_plugin(options.aot_folder)
    from .runtime.engine_pool import engines_sleep  # imports JAX, which finds the plugin
    from .sizing.check import DeviceRoom, check
    from .sizing.model_sizes import model_sizes
    from .sizing.show import draw, show

    model = model_sizes(config, options.model_config)
    room = DeviceRoom(topology.memory, fraction * topology.memory, f"{MEMORY_FRACTION}={fraction:.2f}")
    sleeping = engines_sleep(config, topology.hosts == 1 and config.distributed.processes <= 1)
    progress = functools.partial(print, file=sys.stderr, flush=True)
    verdict = check(config, model, topology.devices(), room, progress, layers=options.layers, sleeping=sleeping)
    title = f"{config.name} on {topology}"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(verdict, title, picture)
    if options.json:
        print(json.dumps({"config": config.name, "topology": str(topology), **verdict.json()}))
    else:
        from rich.console import Console

        show(verdict, title, Console(width=None if sys.stdout.isatty() else 120))
        print(f"drawn in {picture}")
    return 0 if verdict.fits else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
