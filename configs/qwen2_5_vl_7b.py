"""Qwen2.5-VL-7B learns geometry by reinforcement learning on one host of eight H100 (80 GB).

    hf download Qwen/Qwen2.5-VL-7B-Instruct --local-dir Qwen2.5-VL-7B-Instruct
    hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    python -m fluxjax.preflight --config=configs/qwen2_5_vl_7b.py --topology 1x8xh100
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/qwen2_5_vl_7b.py

    python -m fluxjax.train --config=configs/qwen2_5_vl_7b.py:fleet

With `fleet`, SGLang servers on two more hosts generate (docs/servers.md says how they are started); /shared is a folder
that all three hosts see.

Expected memory, by the pre-flight: 45 of 75 GiB that JAX may use of a device (prefill; 36 in accumulate, while engines
sleep), 4 GiB of host memory while weights are loaded (docs/preflight.md).

Never measured: no step of it has run on a GPU. Speed, stability of the learning rate, and the final accuracy are not
known. The reward `math` needs `pip install 'fluxjax[math]'`.
"""

from fluxjax.config import Config, ConfigError, DType, FlexUlysses, Remat, RewardTerm, RolloutEngine, SourceConfig


def get_config(variant: str = "") -> Config:
    if variant not in ("", "fleet"):
        raise ConfigError(f"configs/qwen2_5_vl_7b.py has the variants '' and 'fleet', not {variant!r}")
    config = Config(name="qwen2_5_vl_7b")
    config.steps = 200
    config.model.path = "Qwen2.5-VL-7B-Instruct"
    config.model.compute_dtype = DType.BFLOAT16
    config.data.sources = {
        "geometry3k": SourceConfig(
            path="geometry3k/data/train-00000-of-00001.parquet",
            eval_path="geometry3k/data/test-00000-of-00001.parquet",
            rewards={"math": RewardTerm(arguments={"tolerance": 1e-3})},  # 17.32 is the root of 300
        )
    }
    config.data.chat_template = True
    config.data.max_pixels = 1280 * 28 * 28  # 1,280 features of an image at most
    config.rollout.prompts_per_step = 64
    config.rollout.max_new_tokens = 2048
    config.rollout.max_sequence_tokens = 4096
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
    config.packing.patches_per_device = 16384
    config.checkpoint.every = 20
    config.evaluation.every = 20
    if variant == "fleet":
        config.name = "qwen2_5_vl_7b-fleet"
        config.rollout.engine = RolloutEngine.SGLANG
        config.rollout.engines = 0  # one a server
        config.servers.addresses = ("http://rollout-0:30000", "http://rollout-1:30000")
        config.weights.folder = "/shared/fluxjax-weights"
        config.weights.agents = ("http://rollout-0:30100", "http://rollout-1:30100")
    return config
