"""Training and evaluating as the runtime calls them: small adapters around learner and held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.config import VisionConfig
from rollout.engine import Engine
from sharding.plan import ShardPlan

from .algorithms import ALGORITHMS
from .algorithms.grpo import zero_variance_groups
from .batching import Composition, compose, with_importance, with_reference
from .config import Config
from .held_out import HeldOut
from .layout import COLLECTIVE
from .learner import Learner
from .report.summary import Summary
from .types import Group, PreparedPrompt


class PolicyTrainer:
    """One optimizer step over scored groups: advantages, packing, log-probs that the loss needs, learner."""

    def __init__(
        self, config: Config, learner: Learner, vision: VisionConfig | None, reference: dict[str, Any] | None
    ) -> None:
        self._config = config
        self._algorithm = ALGORITHMS[config.algorithm.name]
        self._learner = learner
        self._vision = vision
        self._reference = reference
        self.last_groups: list[Group] = []  # of the last step, with their advantages

    @property
    def version(self) -> int:
        return self._learner.version

    def weights(self) -> Mapping[str, Any]:
        return self._learner.params

    def train(self, step: int, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt]) -> dict[str, float]:
        """Metrics are those of the learner, and of the rewards: see `reward_metrics`."""
        scored = self._algorithm.advantages(groups, self._config.algorithm)
        composition = compose(
            scored,
            prepared,
            self._config,
            self._learner.mesh.size,
            vision=self._vision,
            text=self._learner.text,
            shapes=self._learner.shapes,
            skip_idle=not (self._config.algorithm.kl_coefficient or self._config.algorithm.entropy_coefficient),
            version=self._learner.version,
        )
        if self._reference is not None:
            composition = with_reference(composition, self._logprobs(composition, self._reference))
        importance = self._config.algorithm.importance
        if importance.whole:
            composition = with_importance(composition, self._logprobs(composition), importance)
        metrics = self._learner.step(composition.batches, composition.devices, composition.work)
        self.last_groups = scored
        tokens_fill, patches_fill = composition.fill()
        return (
            metrics
            | reward_metrics(scored)
            | {
                "packing/microbatches": float(len(composition.batches)),
                "packing/token_fill": tokens_fill,
                "packing/patch_fill": patches_fill,
            }
            | plan_metrics(composition, self._learner.mesh.size)
            | ({"packing/shapes": float(len(self._learner.shapes))} if composition.layouts else {})
        )

    def _logprobs(self, composition: Composition, params: dict[str, Any] | None = None) -> list[Any]:
        inputs = [batch.inputs for batch in composition.batches]
        return [logprobs for logprobs, _ in self._learner.scores(inputs, composition.devices, params)]


def plan_metrics(composition: Composition, num_devices: int) -> dict[str, float]:
    """What the strategy's plans say of a step; nothing where sequences are packed without one."""
    if composition.devices:
        return decoupled_metrics(composition, num_devices)
    return spread_metrics(composition) if composition.layouts else {}


def decoupled_metrics(composition: Composition, num_devices: int) -> dict[str, float]:
    """How evenly a step's work is dealt to devices that keep their own pace.

    The share of all devices' time in which they are predicted to wait: at its end, and in collective microbatches for
    the busiest device; the most and fewest microbatches of a device, those included that it computes with all others;
    how many these are; the share of tokens in sequences on more than one device; padding of the rows.
    """
    devices, work = np.array(composition.devices), np.array(composition.work)
    alone, plans = devices != COLLECTIVE, [layout.plan for layout in composition.layouts]
    loads = np.bincount(devices[alone], work[alone], num_devices)
    counts = np.bincount(devices[alone], minlength=num_devices) + np.count_nonzero(~alone)
    busy = loads.sum() + sum(work[i] * num_devices / plans[i].balance for i in np.flatnonzero(~alone))
    return {
        "sharding/bubble": float(1 - busy / (num_devices * (work[~alone].sum() + loads.max()))),
        "sharding/microbatches_max": float(counts.max()),
        "sharding/microbatches_min": float(counts.min()),
        "sharding/collective": float(np.count_nonzero(~alone)),
        "sharding/sharded_tokens": _sharded(plans),
        "sharding/mlp_padding": float(np.mean([layout.padding()["mlp"] for layout in composition.layouts])),
    }


def spread_metrics(composition: Composition) -> dict[str, float]:
    """How evenly the plans spread a step's sequences: largest over mean attention work and tokens of a device, the
    share of tokens in sequences on more than one device, padding of the rows and of what all-to-alls send."""
    plans = [layout.plan for layout in composition.layouts]
    padding = [layout.padding() for layout in composition.layouts]
    return {
        "sharding/balance": max(plan.balance for plan in plans),
        "sharding/memory": max(plan.memory_ratio for plan in plans),
        "sharding/sharded_tokens": _sharded(plans),
        "sharding/mlp_padding": float(np.mean([one["mlp"] for one in padding])),
        "sharding/all_to_all_padding": float(np.mean([one["all_to_all"] for one in padding])),
    }


def _sharded(plans: Sequence[ShardPlan]) -> float:
    """The share of tokens in sequences on more than one device."""
    degrees = [(n, degree) for plan in plans for n, degree in zip(plan.lengths, plan.degrees, strict=True)]
    return sum(n for n, degree in degrees if degree > 1) / sum(n for n, _ in degrees)


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Mean rewards and sampled accuracies, over all and a source; response lengths in tokens; groups that teach
    nothing."""
    samples = [(group.prompt.source, sample) for group in groups for sample in group.samples]
    lengths = [len(sample.response.token_ids) for _, sample in samples]
    metrics = {
        "reward/mean": float(np.mean([sample.reward.value for _, sample in samples])),
        "response/mean_tokens": float(np.mean(lengths)),
        "response/max_tokens": float(np.max(lengths)),
        "response/cut_off": float(np.mean([sample.response.finish == "length" for _, sample in samples])),
        "groups/zero_variance": zero_variance_groups(groups) / len(groups),
        "rewards/failed": float(sum(bool(sample.reward.reason) for _, sample in samples)),
    }
    for source in sorted({source for source, _ in samples}):
        own = [sample.reward for name, sample in samples if name == source]
        metrics[f"reward/{source}"] = float(np.mean([reward.value for reward in own]))
        metrics[f"accuracy/{source}"] = float(np.mean([reward.correct for reward in own]))
    return metrics


class HeldOutEvaluator:
    """Held-out accuracy of what the engine serves: all prompts at the start and the end, some in between."""

    def __init__(self, config: Config, held_out: HeldOut, engine: Engine, summary: Summary) -> None:
        self._settings = config.evaluation
        self._summary = summary
        self._held_out = held_out
        self._engine = engine

    async def evaluate(self, step: int, full: bool) -> Mapping[str, float]:
        limit = self._settings.samples if full else self._settings.samples_during
        with self._summary.stage("eval"):
            return await self._held_out.accuracy(self._engine, limit)
