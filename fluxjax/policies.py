"""From the configuration to the policy that the coordinator follows."""

from __future__ import annotations

from .config import Config
from .coordinator import AdaptiveAsync, April, Policy, Synchronous, TailBatching
from .policy_config import Policy as Name


def make_policy(config: Config) -> Policy:
    """The policy of `config.policy`, with the settings of its own section."""
    dynamic = config.policy.dynamic_sampling
    match config.policy.name:
        case Name.SYNCHRONOUS:
            return Synchronous(dynamic_sampling=dynamic)
        case Name.TAIL_BATCHING:
            tail = config.tail_batching
            return TailBatching(tail.prompts, tail.responses, dynamic_sampling=dynamic)
        case Name.APRIL:
            april = config.april
            return April(april.oversample, april.max_staleness, dynamic_sampling=dynamic)
        case Name.ADAPTIVE_ASYNC:
            return AdaptiveAsync(
                config.adaptive_async, composition=config.composer, seed=config.seed, dynamic_sampling=dynamic
            )
