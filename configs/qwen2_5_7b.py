"""Qwen2.5-7B learns mathematics from text by reinforcement learning on one host of eight H100 (80 GB).

    hf download Qwen/Qwen2.5-7B-Instruct --local-dir Qwen2.5-7B-Instruct
    hf download zwhe99/DeepMath-103K --repo-type dataset --local-dir DeepMath-103K
    python -m fluxjax.preflight --config=configs/qwen2_5_7b.py --topology 1x8xh100
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/qwen2_5_7b.py

Expected memory, by the pre-flight: 65 of 75 GiB that JAX may use of a device (accumulate), 4 GiB of
host memory while weights are loaded (docs/preflight.md).

Never measured: no step of it has run on a GPU. The reward `math` needs `pip install 'fluxjax[math]'`.
"""

from fluxjax.config import Config, ConfigError, DType, FlexUlysses, Remat, SourceConfig


def get_config(variant: str = "") -> Config:
    if variant:
        raise ConfigError(f"configs/qwen2_5_7b.py has no variants, such as {variant!r}")
    config = Config(name="qwen2_5_7b")
    config.steps = 200
    config.model.path = "Qwen2.5-7B-Instruct"
    config.model.compute_dtype = DType.BFLOAT16
    config.data.sources = {
        "deepmath": SourceConfig(
            path="DeepMath-103K/data",
            reward="math",
            columns={"prompt": "question", "answer": "final_answer"},
        )
    }
    config.data.chat_template = True
    config.rollout.prompts_per_step = 128
    config.rollout.max_new_tokens = 4096
    config.rollout.max_sequence_tokens = 5120
    config.rollout.slots = 64  # of each engine
    config.rollout.engines = 8
    config.algorithm.clip_high = 0.28
    config.algorithm.kl_coefficient = 0.001
    config.optim.lr = 1e-6
    config.optim.warmup_steps = 5
    config.optim.betas = (0.9, 0.999)
    config.optim.weight_decay = 0.01
    config.sharding.strategy = FlexUlysses()
    config.sharding.remat = Remat.LAYER
    config.packing.tokens_per_row = 16384
    config.packing.rows_per_device = 1
    config.checkpoint.every = 20
    config.evaluation.every = 20
    return config
