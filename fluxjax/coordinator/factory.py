"""From the configuration to the coordinator, with its policy and its schedules."""

from __future__ import annotations

from typing import Any

from rollout.throughput import Profile, ProfileError

from ..config import Config, ConfigError
from ..config import Policy as Name
from ..config.schedules import make_schedules
from . import (
    AdaptiveAsync,
    April,
    Coordinator,
    SchedulingPolicy,
    Settings,
    SpeculativeSync,
    StreamTrainer,
    Synchronous,
    TailBatching,
)
from .parallelism import ParallelismPlanner


def make_coordinator(config: Config) -> Coordinator:
    """With the policy and the schedules of `config`. Raises `ConfigError` for a schedule that can't be read."""
    return Coordinator(
        Settings.of(config), make_policy(config), make_schedules(config.schedules), make_parallelism(config)
    )


def make_parallelism(config: Config) -> ParallelismPlanner | None:
    """The planner of `config.parallelism`, if it is enabled. Raises `ConfigError` for a profile that can't be used."""
    settings, rollout = config.parallelism, config.rollout
    if not settings.enabled:
        return None
    devices, start = config.policy.engines * settings.degree, 0
    if settings.profile:
        samples = rollout.prompts_per_step * rollout.group_size
        try:
            start = Profile.load(settings.profile).best_degree(samples, rollout.max_sequence_tokens, devices)
        except ProfileError as error:
            raise ConfigError(f"parallelism.profile: {error}") from error
    return ParallelismPlanner(settings, devices, start)


def make_policy(config: Config) -> SchedulingPolicy:
    """The policy of `config.policy`, with the settings of its own section."""
    dynamic = config.policy.dynamic_sampling
    stream = StreamTrainer(config.stream_trainer) if config.stream_trainer.enabled else None
    speculative = SpeculativeSync(config.speculative_sync) if config.speculative_sync.enabled else None
    early: Any = {"stream": stream, "speculative": speculative}
    match config.policy.name:
        case Name.SYNCHRONOUS:
            return Synchronous(**early, dynamic_sampling=dynamic)
        case Name.TAIL_BATCHING:
            tail = config.tail_batching
            return TailBatching(tail.prompts, tail.responses, **early, dynamic_sampling=dynamic)
        case Name.APRIL:
            april = config.april
            return April(april.oversample, april.max_staleness, **early, dynamic_sampling=dynamic)
        case Name.ADAPTIVE_ASYNC:
            return AdaptiveAsync(
                config.adaptive_async, composition=config.composer, seed=config.seed, dynamic_sampling=dynamic
            )
