"""Qwen3.5-9B learns geometry by reinforcement learning on one host of eight H100 (80 GB).

    hf download Qwen/Qwen3.5-9B --local-dir Qwen3.5-9B
    hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    python -m fluxjax.preflight --config=configs/qwen3_5_9b.py --topology 1x8xh100
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/qwen3_5_9b.py

Expected memory: 72.7 of 75.2 GiB that JAX may use of a device (accumulate; docs/preflight.md). Rows of 16,384 tokens
take 75.5.

Never measured: no step of it has run on a GPU, and no published checkpoint was loaded (names, shapes and bytes of all
tensors are those of its index; models of these layers with random weights are compared with transformers,
`models/qwen3_5/README.md`). Speed, stability of the learning rate, and the final accuracy are not known. Qwen3.5 thinks
before it answers: with 2,048 new tokens some answers will be cut off. The reward `math` needs `pip install
'fluxjax[math]'`.
"""

import pathlib
import runpy

from fluxjax.config import FSDP, Config, ConfigError

_QWEN = pathlib.Path(__file__).parent / "qwen2_5_vl_7b.py"  # the same run but for what is set below


def get_config(variant: str = "") -> Config:
    if variant:
        raise ConfigError(f"configs/qwen3_5_9b.py has no variants, such as {variant!r}")
    config: Config = runpy.run_path(str(_QWEN))["get_config"]()
    config.name = "qwen3_5_9b"
    config.model.path = "Qwen3.5-9B"
    config.data.max_pixels = 1280 * 32 * 32  # 1,280 features of an image at most
    config.rollout.slots = 32  # of each engine: beside pages, each has the states of 24 layers, 50 MB
    config.packing.tokens_per_row = 12288  # rows of 16,384 tokens take 75.5 GiB
    config.sharding.strategy = FSDP()
    return config
