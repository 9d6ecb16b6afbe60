"""Qwen3-VL-8B learns geometry, or to act in environments, by reinforcement learning on one host of eight H100 (80 GB).

    hf download Qwen/Qwen3-VL-8B-Instruct --local-dir Qwen3-VL-8B-Instruct
    hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    python -m fluxjax.preflight --config=configs/qwen3_vl_8b.py --topology 1x8xh100
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/qwen3_vl_8b.py

    pip install -e '.[environments]' minigrid miniwob && apt-get install chromium chromium-driver
    python scripts/agent_manifests.py agent
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m fluxjax.train --config=configs/qwen3_vl_8b.py:agent

With `agent`, episodes of up to 16 turns by pictures: lakes of Gymnasium, rooms of BabyAI, and web pages of MiniWoB in
Chromium (`examples/browser_environment.py`); docs/environments.md says what each costs.

Expected memory, by the pre-flight: 69 of 75 GiB that JAX may use of a device (accumulate; with `agent` 57, in prefill,
since engines sleep while training computes), 5 GiB of host memory while weights are loaded (docs/preflight.md).

Never measured: no step of it has run on a GPU, and no published checkpoint was loaded (the sizes are those of its
config.json; models of these layers with random weights are compared with transformers, `models/qwen3_vl/README.md`).
Speed, stability of the learning rate, and the final accuracy are not known. The reward `math` needs `pip install
'fluxjax[math]'`.
"""

import pathlib
import runpy

from fluxjax.config import Config, ConfigError, SourceConfig

_QWEN = pathlib.Path(__file__).parent / "qwen2_5_vl_7b.py"  # the same run but for what is set below

PLAYED: dict[str, SourceConfig] = {
    "lakes": SourceConfig(  # the embedded data set
        reward="environment",
        environment="gymnasium",
        environment_arguments={
            "id": "FrozenLake-v1",
            "arguments": {"is_slippery": False},
            "pixels": 256,
            "max_turns": 12,
        },
    ),
    "babyai": SourceConfig(
        path="agent/babyai/train.jsonl",
        eval_path="agent/babyai/eval.jsonl",  # rooms with more things than in training
        reward="environment",
        environment="gymnasium",
        environment_arguments={
            "id": "BabyAI-GoToLocal-v0",
            "imports": ["minigrid"],
            "actions": ["left", "right", "forward"],
            "pixels": 256,
            "moves": 3,
            "max_turns": 16,
        },
    ),
    "miniwob": SourceConfig(
        path="agent/miniwob/train.jsonl",
        eval_path="agent/miniwob/eval.jsonl",  # pages of other seeds than in training
        reward="environment",
        environment="examples.browser_environment:MiniWob",
        environment_arguments={"max_turns": 8},
    ),
}


def get_config(variant: str = "") -> Config:
    if variant not in ("", "agent"):
        raise ConfigError(f"configs/qwen3_vl_8b.py has the variants '' and 'agent', not {variant!r}")
    config: Config = runpy.run_path(str(_QWEN))["get_config"]()
    config.name = "qwen3_vl_8b"
    config.model.path = "Qwen3-VL-8B-Instruct"
    config.data.max_pixels = 1280 * 32 * 32  # 1,280 features of an image at most
    config.rollout.slots = 24  # of each engine: a token's keys and values are 2.6 times as large as in Qwen2.5-VL-7B
    if variant == "agent":
        config.name = "qwen3_vl_8b-agent"
        config.data.sources = dict(PLAYED)
        config.data.max_pixels = 256 * 32 * 32  # 256 features of an image at most; a turn's image has 64 to 130
        config.data.environments.concurrency = 64  # of the 512 episodes of a step: Chromium needs a core while it acts
        config.data.environments.turns = 16
        config.rollout.max_new_tokens = 5120  # of an episode, observations included
        config.rollout.max_sequence_tokens = 6144
        config.rollout.slots = 32
    return config
