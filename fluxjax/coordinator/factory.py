"""Builds the coordinator, with its policy and its schedules, from the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ..config import AprilConfig, Config, ConfigError, SynchronousConfig, TailBatchingConfig
from ..config.bounds import as_config_error
from ..config.schedules import make_schedules
from .engine_states import ParallelismPlanner
from .machine import Coordinator, SchedulingPolicy, Settings
from .policies.rounds import Synchronous


def make_coordinator(
    config: Config, policy: Callable[[], SchedulingPolicy] | None = None, **changes: Any
) -> Coordinator:
    """Builds the coordinator of `config`, with the user's `policy` if it is given, and with `changes` of `Settings`.
    Raises `ConfigError` for a schedule or a profile that can't be read. With a `policy`, raises `ConfigError` also for
    settings that only built-in policies read."""
    switches = ("rollout.dynamic_sampling", "stream_trainer", "speculative_sync")
    if policy and (names := " and ".join(name for name in switches if attrgetter(name)(config))):
        raise ConfigError(
            f"{names} would do nothing with a policy of your own, because only built-in policies read such settings; "
            "unset them, and pass your policy what it needs"
        )
    settings, chosen = dataclasses.replace(Settings.of(config), **changes), policy() if policy else make_policy(config)
    return Coordinator(settings, chosen, make_schedules(config), make_parallelism(config))


def make_parallelism(config: Config) -> ParallelismPlanner | None:
    """Builds the planner of `config.parallelism`, if enabled. Raises `ConfigError` for a profile that can't be used."""
    settings, rollout = config.parallelism, config.rollout
    if not settings.enabled:
        return None
    from rollout.throughput import Profile, ProfileError

    devices, start = (config.rollout.engines or 1) * settings.degree, 0
    if settings.profile:
        samples = rollout.prompts_per_step * rollout.group_size
        with as_config_error("parallelism.profile", ProfileError):
            start = Profile.load(settings.profile).best_degree(samples, rollout.max_sequence_tokens, devices)
    return ParallelismPlanner(settings, devices, start)


def make_policy(config: Config) -> SchedulingPolicy:
    """Builds the policy that `config.policy` chooses."""
    chosen, dynamic = config.policy, bool(config.rollout.dynamic_sampling)
    rounds: dict[str, Any] = {"dynamic_sampling": dynamic}
    if config.stream_trainer:
        from .policies.early_training import StreamTrainer

        rounds["stream"] = StreamTrainer()
    if config.speculative_sync:
        from .policies.early_training import SpeculativeSync

        rounds["speculative"] = SpeculativeSync(config.speculative_sync)
    match chosen:
        case SynchronousConfig():
            return Synchronous(**rounds)
        case TailBatchingConfig():
            from .policies.tail_batching import TailBatching

            return TailBatching(chosen.prompts, chosen.responses, chosen.max_staleness, **rounds)
        case AprilConfig():
            from .policies.april import April

            return April(chosen.oversample, chosen.max_staleness, **rounds)
    from .policies.adaptive_async import AdaptiveAsync

    return AdaptiveAsync(chosen, config.seed, dynamic_sampling=dynamic)
