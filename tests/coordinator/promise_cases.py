"""A policy of a random configuration in a `PolicyWorld`, with its promises watched: a seed is a history."""

import random
from typing import Any, Self

from policy_cases import PolicyWorld
from promises import Promises, make_promises

from fluxjax.config import Config, Order, Policy
from fluxjax.coordinator.factory import make_policy, make_schedules
from fluxjax.coordinator.messages import Event

SCHEDULES = {
    "temperature": ("linear(1.2, 0.8)", "success(1.3, 0.7)", "phases(1.0@0, 0.5@0.5)"),
    "target_staleness": ("linear(0.1, 0.3)",),
    "tail_prompts": ("linear(1.0, 2.0)", "phases(1.5@0, 1.0@0.4, 2.0@0.7)"),
    "tail_responses": ("linear(2.0, 1.0)", "phases(1.0@0, 2.0@0.5)"),
}


class PromisedWorld(PolicyWorld):
    """A `PolicyWorld` with the policy of a configuration."""

    def __init__(self, config: Config, seed: int, **options: Any) -> None:
        shape: dict[str, Any] = {
            "steps": config.steps,
            "prompts_per_step": config.rollout.prompts_per_step,
            "group_size": config.rollout.group_size,
            "engines": config.policy.engines,
            "evaluate_every": config.evaluation.every,
            "checkpoint_every": config.checkpoint.every,
        }
        super().__init__(make_policy(config), seed, **(shape | options))
        self.coordinator.schedules = make_schedules(config.schedules)
        self.promises: Promises = make_promises(config, self.coordinator.settings)
        self.watch = self.promises.see

    def hear(self, event: Event) -> None:
        self.promises.see(event)
        super().hear(event)

    def kept(self) -> Self:
        """Runs to the end. Raises AssertionError for the first promise that was broken."""
        self.go()
        assert not self.promises.wrong, self.promises.wrong[0]
        return self


def configuration(seed: int, policy: Policy) -> Config:
    """Everything that decides what happens when, by chance."""
    dice, config = random.Random(f"{seed} {policy.value}"), Config()
    config.policy.name, config.policy.dynamic_sampling = policy, dice.random() < 0.3
    config.steps, config.seed = dice.randint(1, 10), seed
    config.rollout.prompts_per_step = dice.choice((1, 2, 3, 4, 6, 9, 16))
    config.rollout.group_size = dice.randint(2, 4)
    config.policy.engines = dice.randint(1, 4)
    config.evaluation.every, config.checkpoint.every = dice.randint(0, 3), dice.randint(0, 3)
    tail, april, adaptive = config.tail_batching, config.april, config.adaptive_async
    tail.prompts, tail.responses = dice.choice((1.0, 1.25, 1.5, 2.0)), dice.choice((1.0, 1.25, 2.0))
    april.oversample, april.max_staleness = dice.choice((1.0, 1.5, 2.5)), dice.randint(0, 3)
    adaptive.max_staleness, adaptive.interrupt = dice.randint(0, 4), dice.random() < 0.6
    adaptive.sync_interval = dice.choice((1, 3, 1000))
    adaptive.tolerance = dice.choice((0.02, 0.05, 1.0))
    adaptive.ratio, adaptive.max_ratio = dice.choice(((0.5, 0.9), (1.0, 1.0), (0.3, 0.3)))
    composer = config.composer
    composer.order, composer.stratify = dice.choice(list(Order)), dice.random() < 0.3
    composer.curriculum, composer.diversity, composer.lengths = (dice.random() < 0.3 for _ in range(3))
    for name, texts in SCHEDULES.items():
        if dice.random() < 0.25:
            setattr(config.schedules, name, dice.choice(texts))
    if policy is not Policy.ADAPTIVE_ASYNC:
        stream = config.stream_trainer
        stream.enabled = config.policy.engines > 1 and dice.random() < 0.3
        stream.chunk, stream.every = dice.randint(0, 2), dice.choice((0.01, 0.05, 0.2))
        stream.first, stream.last = dice.choice(((0.2, 0.5), (0.1, 0.9)))
        config.speculative_sync.enabled, config.speculative_sync.confidence = dice.random() < 0.3, 0.2
        early = stream.enabled or config.speculative_sync.enabled
        tail.max_staleness = dice.choice((0, 1, 2, 5)) if policy is Policy.TAIL_BATCHING and not early else 0
    return config


def history(seed: int, policy: Policy) -> PromisedWorld:
    """The run of a seed: some have little data, some lose requests, some are stopped."""
    config, dice = configuration(seed, policy), random.Random(seed)
    prompts = dice.choice((0, 1, 7, 25, 1000, 1000, 1000, 1000))
    ends = dice.randint(1, 200) if dice.random() < 0.15 else 0
    options = {"prompts": prompts, "faults": dice.choice((0, 0, 2, 5)), "max_attempts": 20, "ends": ends}
    if config.stream_trainer.enabled and dice.random() < 0.3:
        options |= {"kv_tokens": dice.choice((200, 2000, 10**7))}
    return PromisedWorld(config, seed, **options)
