"""Measures the peak host memory of a real run of a larger model: read from a checkpoint, trained for two steps, saved.

    python benchmarks/real_size.py                       Qwen2.5-VL with a decoder of 0.5B weights
    python benchmarks/real_size.py --shape tiny          whether it runs
    python benchmarks/real_size.py --export              only reads it and writes it in bfloat16, weight by weight

Writes a checkpoint of this shape with random weights, and runs `fluxjax.train` on it in a process of its own. On a CPU
the devices' memory is the host's, so the peak is that of both. `state_gb` is the memory of the run's state: master
weights, two moments and gradients in float32, and the engine's weights; with `--export`, the weights in float32. The
backward pass computes layers again (`sharding.remat=layer`), as in any run that is short of memory. Prints one JSON
line on standard output (`ratio`: peak over state) and its progress on standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from common import ROOT, cores

SIZES: dict[str, dict[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_layers": 24, "num_heads": 14, "num_kv_heads": 2},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_layers": 36, "num_heads": 16, "num_kv_heads": 2},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2},
}
VOCABULARY = 151936  # Qwen2.5's
STATE_BYTES, SERVED_BYTES = 16, 4  # bytes a weight: float32 master, two moments and gradient; the engine's float32
FEW = {  # small settings of all but the weights
    "steps": 2,
    "warm_start.steps": 0,
    "rollout.prompts_per_step": 2,
    "rollout.slots": 16,
    "packing.rows_per_device": 2,
    "sharding.remat": "layer",
    "evaluation.samples": 4,
    "evaluation.every": 0,
    "checkpoint.every": 0,
}
RUN = """
import resource, sys
from fluxjax.train import main
status = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)
raise SystemExit(status)
"""
EXPORT = """
import resource, sys
import jax.numpy as jnp
import models
models.save(models.load(sys.argv[1]), sys.argv[2], dtype=jnp.bfloat16)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 if the run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, default="0.5b", help="sizes of the decoder (default: 0.5b)")
    parser.add_argument("--export", action="store_true", help="read and write only; a training state would not fit")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="real-size-") as folder:
        checkpoint = pathlib.Path(folder) / "checkpoint"
        # In a process of its own: the memory for sampling weights does not count in the measured peak.
        written = _child([str(pathlib.Path(__file__)), "--write", options.shape, str(checkpoint)])
        weights, stored = json.loads(written.splitlines()[-1])
        _say(f"{weights:,} weights, {stored / 1e9:.2f} GB on disk")
        if options.export:
            output = _child(["-c", EXPORT, str(checkpoint), f"{folder}/export"])
            state = weights * SERVED_BYTES
        else:
            settings = {"model.path": checkpoint, "run_dir": f"{folder}/run", **FEW}
            flags = [f"--config.{name}={value}" for name, value in settings.items()]
            output = _child(["-c", RUN, "--config=configs/vlm.py:debug", *flags])
            state = weights * (STATE_BYTES + SERVED_BYTES)
        peak = int(output.split("peak ")[-1].split()[0])
    figures = {"peak_gb": peak / 1e9, "state_gb": state / 1e9, "ratio": peak / state}
    print(json.dumps({"benchmark": "real_size", "shape": options.shape, "export": options.export, "weights": weights,
                      **{name: round(value, 3) for name, value in figures.items()}, "cores": cores()}))  # fmt: skip
    return 0


def write(shape: str, folder: pathlib.Path) -> None:
    """Writes a checkpoint with random weights in bfloat16; prints the number of weights and their bytes on disk."""
    import jax.numpy as jnp

    import models
    from fluxjax.config.cli import read_file
    from fluxjax.data.loader import open_sources
    from fluxjax.run.build import build_model, tiny_model, tiny_vision
    from models.decoder import parameter_count

    config = read_file(f"{ROOT}/configs/vlm.py:debug")
    _, processor = build_model(config, open_sources(config))
    quarter = SIZES[shape]["hidden_size"] // SIZES[shape]["num_heads"] // 8
    section = (2 * quarter, quarter, quarter)
    config.model.tiny |= {**SIZES[shape], "mrope_section": section, "initializer_range": 0.02}
    tiny = tiny_model(config.model, processor, tiny_vision(config.model))
    model = models.create(dataclasses.replace(tiny, text=dataclasses.replace(tiny.text, vocab_size=VOCABULARY)))
    models.save(model, folder, dtype=jnp.bfloat16)
    processor.save(folder)
    print(json.dumps([parameter_count(model), sum(file.stat().st_size for file in folder.glob("*.safetensors"))]))


def _child(arguments: Sequence[str]) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
    if run.returncode:
        _say(run.stdout)
        raise SystemExit(1)
    return run.stdout


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2], pathlib.Path(sys.argv[3]))
        raise SystemExit(0)
    raise SystemExit(main(sys.argv[1:]))
