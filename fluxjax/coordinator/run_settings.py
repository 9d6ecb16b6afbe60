"""The part of the configuration that the coordinator needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..config import Config, SampledBy


@dataclasses.dataclass(frozen=True)
class Settings:
    """See the fields. Raises `ValueError` for counts with which no run is possible."""

    steps: int  # optimizer steps of the run
    prompts_per_step: int
    group_size: int  # responses a prompt
    engines: int = 1  # at the start
    degree: int = 1  # devices of each, at the start
    max_new_tokens: int = 0  # of a response; 0: not known
    kv_tokens: int = 0  # that the cache of an engine holds at the start; 0: not known
    kv_reserved: int = 0  # of them, what a running response takes at least
    evaluate_every: int = 0  # steps; 0: only at the start and the end
    checkpoint_every: int = 0  # steps; 0: only at the end
    snapshot_every: int = 0  # steps; 0: never
    max_attempts: int = 3  # generations of a prompt before it is given up
    max_skipped_in_a_row: int = 1000  # prompts that can't be prepared, or teach nothing: the data is unusable
    max_num_gen_batches: int = 0  # of `prompts_per_step`, generated for a step with dynamic sampling; 0: no bound
    dynamic_sampling_by: SampledBy = SampledBy.CORRECT
    rewards: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name of each source's, for messages

    def __post_init__(self) -> None:
        least = min(self.prompts_per_step, self.group_size, self.engines, self.max_attempts)
        if least < 1 or self.max_attempts >= 100 or self.steps < 0:
            raise ValueError(f"no run is possible with {self}")

    @classmethod
    def of(cls, config: Config) -> Settings:
        kv_tokens = config.rollout.kv_tokens or config.rollout.slots * config.rollout.max_sequence_tokens
        return cls(
            steps=config.steps,
            prompts_per_step=config.rollout.prompts_per_step,
            group_size=config.rollout.group_size,
            engines=config.policy.engines or 1,
            degree=config.parallelism.degree,
            max_new_tokens=config.rollout.max_new_tokens,
            kv_tokens=kv_tokens,
            kv_reserved=kv_tokens // config.rollout.slots,  # so that no more responses run than there are slots
            evaluate_every=config.evaluation.every,
            checkpoint_every=config.checkpoint.every,
            snapshot_every=config.checkpoint.snapshot_every,
            max_num_gen_batches=config.policy.max_num_gen_batches,
            dynamic_sampling_by=config.policy.dynamic_sampling_by,
            rewards={name: source.reward_names for name, source in config.data.sources.items()},
        )
