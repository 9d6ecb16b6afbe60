"""MiMo-VL-7B learns geometry by reinforcement learning on one host of eight H100 (80 GB).

    hf download XiaomiMiMo/MiMo-VL-7B-RL --local-dir MiMo-VL-7B-RL
    hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    python -m fluxjax.preflight --config=configs/mimo_vl_7b.py --topology 1x8xh100
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/mimo_vl_7b.py

Expected memory, by the pre-flight: 67 of 75 GiB that JAX may use of a device (accumulate), 5 GiB of
host memory while weights are loaded (docs/preflight.md).

Never measured: no step of it has run on a GPU, and no MiMo checkpoint was loaded (its architecture is that of
Qwen2.5-VL, and its sizes are those of the technical report). MiMo thinks at length: with 4,096 new tokens some answers
will be cut off.
"""

import pathlib
import runpy

from fluxjax.config import Config, ConfigError

_QWEN = pathlib.Path(__file__).parent / "qwen2_5_vl_7b.py"  # the same run but for what is set below


def get_config(variant: str = "") -> Config:
    if variant:
        raise ConfigError(f"configs/mimo_vl_7b.py has no variants, such as {variant!r}")
    config: Config = runpy.run_path(str(_QWEN))["get_config"]()
    config.name = "mimo_vl_7b"
    config.model.path = "MiMo-VL-7B-RL"
    config.rollout.max_new_tokens = 4096
    config.rollout.max_sequence_tokens = 6144
    config.rollout.slots = 16
    return config
