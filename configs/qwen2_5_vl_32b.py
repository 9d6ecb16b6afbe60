"""Qwen2.5-VL-32B learns geometry by reinforcement learning on four hosts of eight H100 (80 GB).

    hf download Qwen/Qwen2.5-VL-32B-Instruct --local-dir Qwen2.5-VL-32B-Instruct
    hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    python -m fluxjax.preflight --config=configs/qwen2_5_vl_32b.py --topology 4x8xh100
    srun --nodes=4 --ntasks-per-node=1 python -m fluxjax.train --config=configs/qwen2_5_vl_32b.py

Expected memory, by the pre-flight: 63 of 75 GiB that JAX may use of a device (accumulate), 6 GiB of
host memory while weights are loaded (docs/preflight.md).

Each host has one process, and the run's folder is on a file system that all hosts share (deploy/slurm.sbatch). Never
measured: no step of it has run on a GPU. The reward `math` needs `pip install 'fluxjax[math]'`.
"""

import pathlib
import runpy

from fluxjax.config import Config, ConfigError

_QWEN = pathlib.Path(__file__).parent / "qwen2_5_vl_7b.py"  # the same run but for what is set below


def get_config(variant: str = "") -> Config:
    if variant:
        raise ConfigError(f"configs/qwen2_5_vl_32b.py has no variants, such as {variant!r}")
    config: Config = runpy.run_path(str(_QWEN))["get_config"]()
    config.name = "qwen2_5_vl_32b"
    config.model.path = "Qwen2.5-VL-32B-Instruct"
    config.rollout.prompts_per_step = 128
    config.rollout.engines = 4
    config.parallelism.degree = 8  # an engine on each host: the weights alone are 62 GiB in bfloat16
    config.rollout.slots = 128
    config.packing.tokens_per_row = 8192
    config.packing.patches_per_device = 8192
    return config
