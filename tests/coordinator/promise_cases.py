"""A policy of a random configuration in a `PolicyWorld`, with its promises watched: a seed is a history."""

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from policy_cases import PolicyWorld
from promises import Promises, make_promises, misplaced

from fluxjax.config import POLICIES, Config, DynamicSampling
from fluxjax.config.learning import PREFERENCES, AdaptiveAsyncConfig, AprilConfig, TailBatchingConfig
from fluxjax.coordinator.factory import make_policy, make_schedules
from fluxjax.coordinator.messages import Event

SCHEDULES = {
    ("rollout", "temperature"): ("linear(1.2, 0.8)", "success(1.3, 0.7)", "phases(1.0@0, 0.5@0.5)"),
    ("policy", "target_staleness"): ("linear(0.1, 0.3)",),
    ("policy", "prompts"): ("linear(1.0, 2.0)", "phases(1.5@0, 1.0@0.4, 2.0@0.7)"),
    ("policy", "responses"): ("linear(2.0, 1.0)", "phases(1.0@0, 2.0@0.5)"),
}


class PromisedWorld(PolicyWorld):
    """A `PolicyWorld` with the policy of a configuration."""

    def __init__(
        self, config: Config, seed: int, constants: Mapping[str, Any] = MappingProxyType({}), **options: Any
    ) -> None:
        shape: dict[str, Any] = {
            "steps": config.steps,
            "prompts_per_step": config.rollout.prompts_per_step,
            "group_size": config.rollout.group_size,
            "engines": config.rollout.engines,
            "evaluate_every": config.evaluation.every,
            "checkpoint_every": config.checkpoint.every,
        }
        super().__init__(make_policy(config), seed, **(shape | options))
        self.coordinator.schedules = make_schedules(config)
        self.promises: Promises = make_promises(config, self.coordinator.settings)
        for told in (self.coordinator.policy, self.promises):
            for name, value in constants.items():
                holder = told if name in ("sync_interval", "tolerance") else getattr(told, "stream", None)
                if holder is not None:
                    setattr(holder, name, value)
        self.watch = self.promises.see

    def hear(self, event: Event) -> None:
        self.promises.see(event)
        super().hear(event)

    def kept(self) -> Self:
        """Runs to the end. Raises AssertionError for the first promise that was broken."""
        self.go()
        assert not self.promises.wrong, self.promises.wrong[0]
        steps = [groups for step, groups in self.steps.items() if step <= self.coordinator.step]
        assert not misplaced(self.coordinator, [group.prompt.draw for groups in steps for group in groups])
        return self


def configuration(seed: int, policy: str) -> tuple[Config, dict[str, Any]]:
    """Everything that decides what happens when, by chance: settings, and constants of the policy and its helpers."""
    dice, config = random.Random(f"{policy} {seed}"), Config()
    if dice.random() < 0.3:
        config.rollout.dynamic_sampling = DynamicSampling.CORRECT
    config.steps, config.seed = dice.randint(1, 10), seed
    config.rollout.prompts_per_step = dice.choice((1, 2, 3, 4, 6, 9, 16))
    config.rollout.group_size = dice.randint(2, 4)
    config.rollout.engines = dice.randint(1, 4)
    config.evaluation.every, config.checkpoint.every = dice.randint(0, 3), dice.randint(0, 3)
    config.policy = chosen = POLICIES[policy]()
    constants: dict[str, Any] = {}
    if isinstance(chosen, TailBatchingConfig):
        chosen.prompts, chosen.responses = dice.choice((1.0, 1.25, 1.5, 2.0)), dice.choice((1.0, 1.25, 2.0))
    if isinstance(chosen, AprilConfig):
        chosen.oversample, chosen.max_staleness = dice.choice((1.0, 1.5, 2.5)), dice.randint(0, 3)
    if isinstance(chosen, AdaptiveAsyncConfig):
        chosen.max_staleness, chosen.interrupt = dice.randint(0, 4), dice.random() < 0.6
        constants = {"sync_interval": dice.choice((1, 3, 1000)), "tolerance": dice.choice((0.02, 0.05, 1.0))}
        chosen.ratio = dice.choice((0.5, 1.0, 0.3))
        chosen.prefer = tuple(name for name in PREFERENCES if dice.random() < 0.3)
    for (section, field), texts in SCHEDULES.items():
        if hasattr(getattr(config, section), field) and dice.random() < 0.25:
            setattr(getattr(config, section), field, dice.choice(texts))
    if not isinstance(chosen, AdaptiveAsyncConfig):
        config.stream_trainer = config.rollout.engines > 1 and dice.random() < 0.3
        constants = {"chunk": dice.randint(0, 2), "every": dice.choice((0.01, 0.05, 0.2))}
        constants["first"], constants["last"] = dice.choice(((0.2, 0.5), (0.1, 0.9)))
        config.speculative_sync = 0.2 if dice.random() < 0.3 else 0.0
    if isinstance(chosen, TailBatchingConfig):
        early = config.stream_trainer or config.speculative_sync
        chosen.max_staleness = 0 if early else dice.choice((0, 1, 2, 5))
    return config, constants


def history(seed: int, policy: str) -> PromisedWorld:
    """The run of a seed: some have little data, some lose requests, some are stopped."""
    (config, constants), dice = configuration(seed, policy), random.Random(seed)
    prompts = dice.choice((0, 1, 7, 25, 1000, 1000, 1000, 1000))
    ends = dice.randint(1, 200) if dice.random() < 0.15 else 0
    options = {"prompts": prompts, "faults": dice.choice((0, 0, 2, 5)), "max_attempts": 20, "ends": ends}
    if config.stream_trainer and dice.random() < 0.3:
        options |= {"kv_tokens": dice.choice((200, 2000, 10**7))}
    return PromisedWorld(config, seed, constants, **options)
