"""A simulated cluster: the real coordinator and its policies on virtual time. No GPU is needed, and no model.

python -m fluxjax.simulate --config=configs/simulation.py:14b-tail
python -m fluxjax.simulate --config=configs/simulation.py:1024-tail --gantt gantt.png
python -m fluxjax.simulate --config=configs/simulation.py:faults --seeds 1000

Variants: with -tail at the end, tail batching has the settings of Flexes. Of 7b, 14b (the default) and 32b the settings
are those of Flexes' evaluation (section 6), Qwen2.5 on 16, 32 and 64 H800; 1024 is 14b on 1,024 GPUs, with
512 prompts a step; faults is a small cluster on which everything goes wrong.

Expect of 14b: about 217 simulated seconds a step with policy=synchronous, 117 with tail_batching.
"""

from fluxjax.config import ConfigError, TailBatchingConfig
from fluxjax.simulation.options import Model, SimulateConfig

# GPUs, GPUs of an engine, most tokens of a response, their median. Nothing is published about the lengths of 32B's
# responses but their limit. Twice the median of the others makes the longest of a step reach it, as those of the others
# do; and makes a step last 11 minutes, of which a sandbox's time-out is the part that Table 2 says rewards are (2.48
# for 2.21 times).
SETTINGS = {
    "7b": (16, 1, 8_192, 550.0),
    "14b": (32, 2, 16_384, 550.0),
    "32b": (64, 2, 32_768, 1_100.0),
}


def get_config(variant: str = "") -> SimulateConfig:
    config = SimulateConfig(steps=40)
    variant, tail, _ = variant.partition("-tail")
    model = variant if variant in SETTINGS else "14b"
    sim = config.simulation
    sim.model = Model(model)
    sim.gpus, sim.degree, config.rollout.max_new_tokens, sim.median = SETTINGS[model]
    if tail:
        config.policy = TailBatchingConfig(1.25, 1.25, max_staleness=0)  # Flexes, section 3, strictly on-policy
    config.rollout.prompts_per_step = 128
    config.rollout.group_size = 8
    config.evaluation.every = 0
    config.checkpoint.every = 0
    if variant == "1024":
        config.steps = 100
        config.rollout.prompts_per_step = 512
        sim.gpus = 1_024
        sim.prompts = 102_400
        sim.rules, sim.sandboxes, sim.judges = 4, 2_048, 32
    elif variant == "faults":
        config.steps = 20
        config.rollout.prompts_per_step = 16
        config.rollout.group_size = 4
        config.rollout.max_new_tokens = 4_096
        sim.gpus = 8
        faults = sim.faults
        faults.crash_every, faults.slow_every = 1_000.0, 1_000.0
        faults.lost, faults.doubled, faults.late = 0.002, 0.01, 0.01
        faults.slow_sync, faults.reward_hangs = 0.1, 0.01
    elif variant not in ("", *SETTINGS):
        raise ConfigError(
            f"configs/simulation.py has the variants '', {', '.join(map(repr, SETTINGS))}, '1024' and 'faults', "
            f"not {variant!r}"
        )
    return config
