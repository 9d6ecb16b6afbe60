"""Qwen3-8B learns mathematics from text by reinforcement learning on one host of eight H100 (80 GB).

    hf download Qwen/Qwen3-8B --local-dir Qwen3-8B
    hf download zwhe99/DeepMath-103K --repo-type dataset --local-dir DeepMath-103K
    python -m fluxjax.preflight --config=configs/qwen3_8b.py --topology 1x8xh100
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/qwen3_8b.py

Expected memory, by the pre-flight: 64 of 75 GiB that JAX may use of a device (accumulate), 5 GiB of
host memory while weights are loaded (docs/preflight.md).

Never measured: no step of it has run on a GPU. Qwen3 thinks before it answers: with 4,096 new tokens some answers will
be cut off. The reward `math` needs `pip install 'fluxjax[math]'`.
"""

import pathlib
import runpy

from fluxjax.config import Config, ConfigError

_QWEN = pathlib.Path(__file__).parent / "qwen2_5_7b.py"  # the same run but for what is set below


def get_config(variant: str = "") -> Config:
    if variant:
        raise ConfigError(f"configs/qwen3_8b.py has no variants, such as {variant!r}")
    config: Config = runpy.run_path(str(_QWEN))["get_config"]()
    config.name = "qwen3_8b"
    config.model.path = "Qwen3-8B"
    config.rollout.slots = 24  # of each engine: a token's keys and values are 2.6 times as large as in Qwen2.5-7B
    return config
