"""The part of the configuration that the coordinator needs, and the check that ends endless dynamic sampling."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from ..config import Config, DynamicSampling

_READ_AS = 128  # tokens whose computation takes as long as reading all weights (an H100 in bfloat16, half of its rate)
_NAMED = 3  # the number of a source's most frequent rewards that a complaint names


def prompt_work(batch: int) -> float:
    """Returns the work of computing a token of a prompt, in generated tokens. A round of decoding reads all weights, so
    that a generated token is the more work, the fewer (`batch`) share a round."""
    return batch / (batch + _READ_AS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The coordinator's settings. Raises `ValueError` for counts that allow no run."""

    steps: int  # training steps of the run
    prompts_per_step: int
    group_size: int  # responses to each prompt
    engines: int = 1  # engines at the start
    degree: int = 1  # devices of each engine, at the start
    max_new_tokens: int = 0  # the most tokens of a response; 0: unknown
    kv_tokens: int = 0  # tokens that an engine's cache holds at the start; 0: unknown
    kv_reserved: int = 0  # the least number of cache tokens for a running response
    prompt_work: float = 0.0  # the work of computing a token of a prompt, in generated tokens
    patch_tokens: float = 0.0  # the work of a patch of an image or a video, in tokens of a prompt
    evaluate_every: int = 0  # steps; 0: only at the start and the end
    checkpoint_every: int = 0  # steps; 0: only at the end
    max_attempts: int = 3  # generations of a prompt before it is given up
    # prompts in a row that can't be prepared, or have equal rewards, before the data counts as unusable
    max_skipped_in_a_row: int = 1000
    # The most prompts that dynamic sampling draws for a step, in multiples of `prompts_per_step`. 0: no bound.
    max_num_gen_batches: int = 0
    dynamic_sampling_by: DynamicSampling = DynamicSampling.CORRECT
    # the reward's name for each source, for messages
    rewards: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        least = min(self.prompts_per_step, self.group_size, self.engines, self.max_attempts)
        if least < 1 or self.max_attempts >= 100 or self.steps < 0:
            raise ValueError(
                "prompts_per_step, group_size and engines must be at least 1, max_attempts 1 to 99, steps at least 0: "
                f"{self}"
            )

    @classmethod
    def of(cls, config: Config) -> Settings:
        kv_tokens = config.rollout.kv_tokens or config.rollout.slots * config.rollout.max_sequence_tokens
        return cls(
            steps=config.steps,
            prompts_per_step=config.rollout.prompts_per_step,
            group_size=config.rollout.group_size,
            engines=config.rollout.engines or 1,
            degree=config.parallelism.degree,
            max_new_tokens=config.rollout.max_new_tokens,
            kv_tokens=kv_tokens,
            prompt_work=prompt_work(config.rollout.slots),
            kv_reserved=kv_tokens // config.rollout.slots,  # so that no more responses run than there are slots
            evaluate_every=config.evaluation.every,
            checkpoint_every=config.checkpoint.every,
            max_num_gen_batches=config.rollout.max_num_gen_batches,
            dynamic_sampling_by=config.rollout.dynamic_sampling or DynamicSampling.CORRECT,
            rewards={name: source.reward_names for name, source in config.data.sources.items()},
        )

    def complaint(self, step: int, kept: int, dropped: Counter[tuple[str, float]], in_a_row: int) -> str:
        """Returns why `step` will never be complete with its `kept` groups; empty while the step may become complete.
        `dropped` counts the step's dropped groups by source and reward, `in_a_row` the groups dropped in a row.

        If all responses of every group have equal rewards, because the verifier is broken or the prompts are far too
        easy or too hard, dynamic sampling would draw prompts for ever. As in verl, the kept and dropped groups of a
        step come from at most `max_num_gen_batches` batches of `prompts_per_step` prompts.
        """
        most, size, count = self.max_num_gen_batches, self.prompts_per_step, dropped.total()
        too_many = most and count > (most - 1) * size and kept < size
        if not too_many and in_a_row < self.max_skipped_in_a_row:
            return ""
        sources: dict[str, list[str]] = {}
        for (source, value), times in dropped.most_common():
            sources.setdefault(source, []).append(f"{value:g} ({times})")
        parts = []
        for source, values in sources.items():
            rule = f", reward {self.rewards[source]}," if source in self.rewards else ""
            more = ", ..." if len(values) > _NAMED else ""
            parts.append(f"source {source!r}{rule} has {', '.join(values[:_NAMED])}{more}")
        by = f"rollout.dynamic_sampling is {self.dynamic_sampling_by.value}"
        bound = f"rollout.max_num_gen_batches is {most}" if too_many else f"{in_a_row} dropped in a row"
        return (
            f"dynamic sampling dropped {count} groups of equal rewards ({by}) for step {step}, which needs {size} "
            f"groups of different rewards ({bound}): {'; '.join(parts)}; mend the reward, take prompts "
            "of another difficulty"
            + (", raise the bound (0: none)" if too_many else "")
            + ", or choose another rollout.dynamic_sampling (correct, value, off)"
        )
