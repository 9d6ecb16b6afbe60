"""Qwen2.5-VL-3B learns geometry by reinforcement learning on one H100 (80 GB).

    hf download Qwen/Qwen2.5-VL-3B-Instruct --local-dir Qwen2.5-VL-3B-Instruct
    hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    python -m fluxjax.preflight --config=configs/qwen2_5_vl_3b.py:one_gpu --topology 1x1xh100
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/qwen2_5_vl_3b.py:one_gpu

`one_gpu` (the default) trains adapters (LoRA). `one_gpu_full` trains all weights: Adam's moments are in bfloat16, there
is no reference, whose weights would take 14 GiB, rows are half as long, and the cache holds five eighths of what 64 of
the longest samples need.

Expected memory, by the pre-flight: 43 of 75 GiB that JAX may use (publish); one_gpu_full 69 (accumulate); 2.3 GiB of
host memory while weights are loaded. Expected time, by the cost model: about a minute a step, two thirds of it decoding
(docs/preflight.md).

Never measured: no step of it has run on a GPU. The reward `math` needs `pip install 'fluxjax[math]'`.
"""

import pathlib
import runpy

from fluxjax.config import FSDP, Config, ConfigError, DType

_QWEN = pathlib.Path(__file__).parent / "qwen2_5_vl_7b.py"  # the same run but for what is set below


def get_config(variant: str = "") -> Config:
    variant = variant or "one_gpu"
    if variant not in ("one_gpu", "one_gpu_full"):
        raise ConfigError(f"configs/qwen2_5_vl_3b.py has the variants 'one_gpu' and 'one_gpu_full', not {variant!r}")
    config: Config = runpy.run_path(str(_QWEN))["get_config"]()
    config.name = f"qwen2_5_vl_3b-{variant}"
    config.model.path = "Qwen2.5-VL-3B-Instruct"
    config.rollout.engines = 1
    config.sharding.strategy = FSDP()
    if variant == "one_gpu":
        config.lora.rank = 32
        config.lora.alpha = 64.0
        config.optim.lr = 1e-5
    else:
        config.rollout.kv_tokens = 163_840  # of 64 slots, that is 2,560 each: the longest wait for others to end
        config.packing.tokens_per_row = 8192
        config.packing.patches_per_device = 8192
        config.optim.moments_dtype = DType.BFLOAT16
        config.optim.betas = (0.9, 0.99)
        config.algorithm.kl_coefficient = 0.0  # its reference would be another 14 GiB
    return config
