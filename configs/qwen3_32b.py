"""Qwen3-32B learns mathematics from text by reinforcement learning on eight hosts of eight H100 (80 GB).

    hf download Qwen/Qwen3-32B --local-dir Qwen3-32B
    hf download zwhe99/DeepMath-103K --repo-type dataset --local-dir DeepMath-103K
    python -m fluxjax.preflight --config=configs/qwen3_32b.py --topology 8x8xh100
    srun --nodes=8 --ntasks-per-node=1 python -m fluxjax.train --config=configs/qwen3_32b.py

Expected memory, by the pre-flight: 48 of 75 GiB that JAX may use of a device (accumulate), 6 GiB of
host memory while weights are loaded (docs/preflight.md).

Each host has one process, and the run's folder is on a file system that all hosts share (deploy/slurm.sbatch). Never
measured: no step of it has run on a GPU. The reward `math` needs `pip install 'fluxjax[math]'`.
"""

import pathlib
import runpy

from fluxjax.config import Config, ConfigError

_QWEN = pathlib.Path(__file__).parent / "qwen3_8b.py"  # the same run but for what is set below


def get_config(variant: str = "") -> Config:
    if variant:
        raise ConfigError(f"configs/qwen3_32b.py has no variants, such as {variant!r}")
    config: Config = runpy.run_path(str(_QWEN))["get_config"]()
    config.name = "qwen3_32b"
    config.model.path = "Qwen3-32B"
    config.rollout.prompts_per_step = 256
    config.rollout.engines = 8
    config.parallelism.degree = 8  # an engine on each host: the weights alone are 61 GiB in bfloat16
    config.rollout.slots = 96
    config.packing.tokens_per_row = 8192
    return config
