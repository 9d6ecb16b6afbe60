"""Small random clusters, each with a policy and with faults: what the seed of a fault history stands for."""

from __future__ import annotations

import random

from ..config import Order, Policy
from .options import Model, Rewards, SimulateConfig


def scenario(seed: int) -> SimulateConfig:
    """A cluster, a policy and faults: everything by chance. Policies take turns."""
    dice, config = random.Random(seed), SimulateConfig(seed=seed)
    sim, faults, policies = config.simulation, config.simulation.faults, list(Policy)
    config.policy.name = policies[seed % len(policies)]
    config.policy.dynamic_sampling = dice.random() < 0.25
    config.policy.max_num_gen_batches = 0  # a step of a single prompt may well need more than ten
    config.steps = dice.randint(1, 8)
    config.rollout.prompts_per_step = dice.randint(1, 5)
    config.rollout.group_size = dice.randint(2, 4)
    config.rollout.max_new_tokens = dice.choice((256, 1024, 4096))
    config.evaluation.every, config.checkpoint.every = dice.randint(0, 3), dice.randint(0, 3)
    config.tail_batching.prompts = dice.choice((1.0, 1.25, 2.0))
    config.tail_batching.responses = dice.choice((1.0, 1.25, 2.0))
    config.april.oversample, config.april.max_staleness = dice.choice((1.0, 1.5, 2.5)), dice.randint(0, 3)
    adaptive = config.adaptive_async
    adaptive.max_staleness, adaptive.interrupt = dice.randint(0, 4), dice.random() < 0.7
    adaptive.sync_interval = dice.choice((2, 5, 100))
    if dice.random() < 0.3:
        adaptive.ratio = adaptive.min_ratio = adaptive.max_ratio = dice.choice((0.0, 1.0))
    sim.model, sim.degree, sim.memory_fraction = Model.QWEN_7B, 1, dice.choice((0.25, 0.6))
    sim.train_gpus = dice.choice((0, 0, 1))
    sim.gpus = dice.randint(1, 4) + sim.train_gpus
    sim.median, sim.spread, sim.max_running = (
        dice.choice((30.0, 150.0)),
        dice.choice((0.5, 1.05)),
        dice.choice((2, 8, 64)),
    )
    sim.prompts, sim.epochs = dice.randint(3, 40), dice.randint(0, 2)
    sim.rewards, sim.recompute = dice.choice(list(Rewards)), dice.random() < 0.5
    sim.evaluation_seconds = sim.checkpoint_seconds = dice.choice((0.0, 5.0))
    sim.reply_limit = dice.choice((5.0, 60.0))
    rounds = config.policy.name is not Policy.ADAPTIVE_ASYNC
    config.parallelism.enabled = rounds and sim.rollout_gpus in (2, 4) and dice.random() < 0.4
    config.parallelism.calm, sim.degree = dice.randint(1, 3), dice.choice((1, 2)) if config.parallelism.enabled else 1
    config.stream_trainer.enabled = rounds and sim.engines > 1 and dice.random() < 0.5
    faults.crash_every, faults.down = dice.choice((0.0, 60.0, 300.0)), dice.choice((1.0, 40.0))
    faults.slow_every, faults.slow_for = dice.choice((0.0, 50.0)), 20.0
    faults.lost, faults.doubled, faults.late = (
        dice.choice((0.0, 0.02)),
        dice.choice((0.0, 0.1)),
        dice.choice((0.0, 0.1)),
    )
    faults.delay, faults.sync_delay = dice.choice((1.0, 30.0)), 10.0
    faults.slow_sync, faults.reward_hangs = dice.choice((0.0, 0.3)), dice.choice((0.0, 0.05))
    _more(random.Random(f"{seed} rest"), config)
    config.validate()
    return config


def _more(dice: random.Random, config: SimulateConfig) -> None:
    """Thrown apart from the rest, so that a seed keeps the faults and the lengths that it had before there was this."""
    name, schedules = config.policy.name, config.schedules
    if dice.random() < 0.2:
        config.rollout.prompts_per_step = dice.randint(6, 16)
    if dice.random() < 0.05:
        config.simulation.prompts = 1
    if name is not Policy.ADAPTIVE_ASYNC and dice.random() < 0.3:
        config.speculative_sync.enabled = True
        config.speculative_sync.confidence = dice.choice((0.1, 0.5))
    if dice.random() < 0.3:
        schedules.temperature = dice.choice(("linear(1.2, 0.8)", "success(1.3, 0.7)", "math: 1.0; *: cosine(1.2, 0.8)"))
    if name is Policy.TAIL_BATCHING and dice.random() < 0.3:
        schedules.tail_prompts, schedules.tail_responses = "phases(1.5@0, 1.0@0.4, 2.0@0.7)", "linear(2.0, 1.0)"
    if name is Policy.ADAPTIVE_ASYNC:
        composer = config.composer
        composer.order, composer.stratify = dice.choice(list(Order)), dice.random() < 0.3
        composer.curriculum, composer.diversity, composer.lengths = (dice.random() < 0.3 for _ in range(3))
        if dice.random() < 0.3:
            schedules.target_staleness = "linear(0.05, 0.3)"
