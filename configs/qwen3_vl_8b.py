"""Qwen3-VL-8B learns geometry by reinforcement learning on one host of eight H100 (80 GB).

    hf download Qwen/Qwen3-VL-8B-Instruct --local-dir Qwen3-VL-8B-Instruct
    hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    python -m fluxjax.preflight --config=configs/qwen3_vl_8b.py --topology 1x8xh100
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/qwen3_vl_8b.py

Expected memory, by the pre-flight: 69 of 75 GiB that JAX may use of a device (accumulate), 5 GiB of
host memory while weights are loaded (docs/preflight.md).

Never measured: no step of it has run on a GPU, and no published checkpoint was loaded (the sizes are those of its
config.json; models of these layers with random weights are compared with transformers, `models/qwen3_vl/README.md`).
Speed, stability of the learning rate, and the final accuracy are not known. The reward `math` needs `pip install
'fluxjax[math]'`.
"""

import pathlib
import runpy

from fluxjax.config import Config, ConfigError

_QWEN = pathlib.Path(__file__).parent / "qwen2_5_vl_7b.py"  # the same run but for what is set below


def get_config(variant: str = "") -> Config:
    if variant:
        raise ConfigError(f"configs/qwen3_vl_8b.py has no variants, such as {variant!r}")
    config: Config = runpy.run_path(str(_QWEN))["get_config"]()
    config.name = "qwen3_vl_8b"
    config.model.path = "Qwen3-VL-8B-Instruct"
    config.data.max_pixels = 1280 * 32 * 32  # 1,280 features of an image at most
    config.rollout.slots = 24  # of each engine: a token's keys and values are 2.6 times as large as in Qwen2.5-VL-7B
    return config
