"""Qwen3.5-4B learns geometry by reinforcement learning on one H100 (80 GB).

    hf download Qwen/Qwen3.5-4B --local-dir Qwen3.5-4B
    hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    python -m fluxjax.preflight --config=configs/qwen3_5_4b.py:one_gpu --topology 1x1xh100
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/qwen3_5_4b.py:one_gpu

`one_gpu` (the default) trains adapters (LoRA) beside the projections of both kinds of layers.

Expected memory, by the pre-flight: 54 of 75 GiB that JAX may use (accumulate), 5 GiB of host memory while weights are
loaded (docs/preflight.md).

Never measured: no step of it has run on a GPU, and no published checkpoint was loaded (names, shapes and bytes of all
tensors are those of its index; models of these layers with random weights are compared with transformers,
`models/qwen3_5/README.md`). Speed, stability of the learning rate, and the final accuracy are not known. Qwen3.5 thinks
before it answers: with 2,048 new tokens some answers will be cut off. The reward `math` needs `pip install
'fluxjax[math]'`.
"""

import pathlib
import runpy

from fluxjax.config import Config, ConfigError

_QWEN = pathlib.Path(__file__).parent / "qwen3_5_9b.py"  # the same run but for what is set below


def get_config(variant: str = "") -> Config:
    variant = variant or "one_gpu"
    if variant != "one_gpu":
        raise ConfigError(f"configs/qwen3_5_4b.py has the variant 'one_gpu', not {variant!r}")
    config: Config = runpy.run_path(str(_QWEN))["get_config"]()
    config.name = f"qwen3_5_4b-{variant}"
    config.model.path = "Qwen3.5-4B"
    config.rollout.engines = 1
    config.rollout.slots = 64
    config.packing.tokens_per_row = 16384
    config.lora.rank = 32
    config.lora.alpha = 64.0
    config.lora.targets = (*config.lora.targets, "in_proj_qkv", "in_proj_z", "out_proj")
    config.optim.lr = 1e-5
    return config
