"""From the configuration to the coordinator, with its policy and its schedules."""

from __future__ import annotations

from .config import Config
from .coordinator import AdaptiveAsync, April, Coordinator, Policy, Settings, StreamTrainer, Synchronous, TailBatching
from .policy_config import Policy as Name
from .schedules import Schedule, parse

_BOUNDS = {  # of what a schedule may say
    "temperature": (1e-3, 100.0),
    "target_staleness": (0.0, 1.0),
    "tail_prompts": (1.0, 8.0),
    "tail_responses": (1.0, 8.0),
}


def make_coordinator(config: Config) -> Coordinator:
    """With the policy and the schedules of `config`. Raises `ConfigError` for a schedule that can't be read."""
    return Coordinator(Settings.of(config), make_policy(config), make_schedules(config))


def make_schedules(config: Config) -> dict[str, Schedule]:
    """The schedules that `config.schedules` has, by the names of its fields."""
    return {
        name: parse(text, f"schedules.{name}", *bounds, per_source=name == "temperature")
        for name, bounds in _BOUNDS.items()
        if (text := getattr(config.schedules, name))
    }


def make_policy(config: Config) -> Policy:
    """The policy of `config.policy`, with the settings of its own section."""
    dynamic = config.policy.dynamic_sampling
    stream = StreamTrainer(config.stream_trainer) if config.stream_trainer.enabled else None
    match config.policy.name:
        case Name.SYNCHRONOUS:
            return Synchronous(stream=stream, dynamic_sampling=dynamic)
        case Name.TAIL_BATCHING:
            tail = config.tail_batching
            return TailBatching(tail.prompts, tail.responses, stream=stream, dynamic_sampling=dynamic)
        case Name.APRIL:
            april = config.april
            return April(april.oversample, april.max_staleness, stream=stream, dynamic_sampling=dynamic)
        case Name.ADAPTIVE_ASYNC:
            return AdaptiveAsync(
                config.adaptive_async, composition=config.composer, seed=config.seed, dynamic_sampling=dynamic
            )
