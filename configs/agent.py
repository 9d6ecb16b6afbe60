"""A tiny vision-language model learns to act in environments by reinforcement learning: episodes of several turns.

    pip install -e '.[environments]'
    python -m fluxjax.train --config=configs/agent.py              (all three)
    python -m fluxjax.train --config=configs/agent.py:frozenlake   (walks over lakes that it has not seen, by pictures)
    python -m fluxjax.train --config=configs/agent.py:zoom         (reads a digit that only an enlarged part shows)
    python -m fluxjax.train --config=configs/agent.py:tools        (computes by a calculator)
    python -m fluxjax.train --config=configs/agent.py:debug        (the whole loop in a few minutes)
    python -m fluxjax.train --config=configs/agent.py:no_tool      (the digits without the tool, for comparison)

Expect of `:frozenlake` 85 of 100 walks over lakes that it has not seen, of `:zoom` 90 and of `:tools` 95 of 100 answers
(docs/log.md), within half an hour each on one core.

Nothing is downloaded: photographs and digits are in scikit-image and scikit-learn, and Gymnasium draws the lakes.
"""

from fluxjax.config import Config, ConfigError, LossAggregation, Schedule, SourceConfig

LAKES = SourceConfig(
    environment="gymnasium",
    environment_arguments={
        "id": "FrozenLake-v1",
        "arguments": {"is_slippery": False},
        "pixels": 64,
        "max_turns": 8,
        "demonstration": "fluxjax.tasks.agents:told_way",
    },
    context="turn",  # the newest picture has all that a move needs
    reward="environment",
)


def with_tool(tool: str, demonstration: str, reward: str) -> SourceConfig:
    arguments = {"tools": [tool], "max_turns": 4, "demonstration": f"fluxjax.tasks.agents:{demonstration}"}
    return SourceConfig(environment="tools", environment_arguments=arguments, reward=reward)


TAGS = with_tool("zoom", "found_digit", "number")
SUMS = with_tool("calculator", "computed", "exact")
VARIANTS = {
    "": {"lakes": LAKES, "tags": TAGS, "sums": SUMS},
    "frozenlake": {"lakes": LAKES},
    "zoom": {"tags": TAGS},
    "tools": {"sums": SUMS},
    "debug": {"lakes": LAKES, "tags": TAGS, "sums": SUMS},
    "no_tool": {"tags": SourceConfig(reward="number")},
}


def get_config(variant: str = "") -> Config:
    if variant not in VARIANTS:
        raise ConfigError(f"configs/agent.py has the variants {', '.join(map(repr, VARIANTS))}, not {variant!r}")
    config = Config(name=f"agent-{variant}" if variant else "agent")
    config.data.sources = dict(VARIANTS[variant])
    config.data.max_pixels = 64 * 64
    config.data.environments.concurrency = 32
    config.data.environments.memory_gib = 1.0
    config.steps = 100
    config.warm_start.steps = 1000
    config.warm_start.lr = "cosine(3e-3, 1e-4)"  # a constant rate ended between 70 and 82 % of the lakes, by chance
    config.warm_start.batch_size = 32
    config.rollout.prompts_per_step = 16
    config.rollout.group_size = 8
    config.rollout.max_new_tokens = 432
    config.rollout.max_sequence_tokens = 528
    config.rollout.slots = 128
    config.packing.tokens_per_row = 640
    config.packing.rows_per_device = 4
    config.packing.patches_per_device = 2048
    config.algorithm.loss_aggregation = LossAggregation.SEQUENCE_MEAN
    config.optim.lr = 3e-4
    config.optim.schedule = Schedule.LINEAR
    config.optim.betas = (0.9, 0.95)
    config.optim.warmup_steps = 10
    config.evaluation.samples = 200
    config.evaluation.every = 25
    config.model.tiny |= {"architecture": "qwen3_vl", "num_heads": 2, "mrope_section": (6, 5, 5)}
    config.model.tiny |= {"vision_depth": 3, "vision_intermediate_size": 256}
    if variant == "debug":
        config.model.tiny["num_layers"] = 1  # most of a short run is compiling
        config.steps = 3
        config.warm_start.steps = 10
        config.rollout.prompts_per_step = 6
        config.evaluation.samples = 12
        config.report.dump_samples_every = 1
    return config
