"""Training as the runtime calls it: one optimizer step over scored groups, or gradients of some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from models.config import VisionConfig
from sharding.planner.plan import ShardPlan

from ..algorithms import ALGORITHMS
from ..algorithms.grpo import zero_variance_groups
from ..base.types import Group, PreparedPrompt
from ..batch.composer import Composition, compose, with_importance, with_reference
from ..batch.fill import COLLECTIVE
from ..config import Config
from .learner import Learner
from .portions import Portion, has_gradient, joined, portion


@runtime_checkable
class OnDevices(Protocol):
    """What is known here of an engine."""

    @property
    def devices(self) -> Sequence[Any]:
        """Those that it computes on, of this process."""
        ...


class PolicyTrainer:
    """One optimizer step over scored groups: advantages, packing, log-probs that the loss needs, learner.

    Gradients of some groups may be computed before, on the devices of `engines` that were lent."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        vision: VisionConfig | None,
        reference: dict[str, Any] | None,
        engines: Sequence[OnDevices] = (),
    ) -> None:
        self._config = config
        self._engines = engines
        self._elsewhere: dict[tuple[Any, ...], tuple[Learner, dict[str, Any] | None]] = {}  # by devices; and reference
        self._early: list[Portion] = []  # of the step under way
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

    def accumulate(
        self,
        step: int,
        groups: Sequence[Group],
        prepared: Mapping[int, PreparedPrompt],
        engines: Sequence[int] = (),
    ) -> None:
        """Computes gradients of these groups for the `train` of this step, on the devices of these engines (none given:
        on the learner's). What teaches nothing is left to `train`."""
        one = portion(self._algorithm.advantages(groups, self._config.algorithm), prepared, self._config)
        learner, reference = self._workplace(engines)
        if has_gradient(one.groups, self._skip_idle):
            self._compute(one, learner, reference)
        same = [other for other in self._early if other.learner is learner]
        others = [other for other in self._early if other.learner is not learner]
        self._early = [*others, joined(learner, [*same, one])]
        jax.block_until_ready(self._early[-1].outcome)

    def train(self, step: int, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt]) -> dict[str, float]:
        """Metrics are those of the learner, and of the rewards: see `reward_metrics`. `stream/groups`: how many groups
        of the step `accumulate` had, if any; metrics of packing and plans are then of what was left."""
        early, self._early = self._early, []
        learner, reference = self._learner, self._reference
        rest = portion(self._algorithm.advantages(groups, self._config.algorithm), prepared, self._config)
        whole = joined(learner, early)
        if whole.outcome is None:  # nothing was computed yet
            whole = joined(learner, [whole, rest])
            composition = self._composed(whole, learner, reference)
            metrics = learner.step(composition.batches, composition.devices, composition.work)
        else:
            if has_gradient(rest.groups, self._skip_idle):
                self._compute(rest, learner, reference)
            whole = joined(learner, [whole, rest])
            assert whole.composition is not None and whole.outcome is not None
            composition = whole.composition
            metrics = learner.update(*whole.outcome)
        if early:
            metrics["stream/groups"] = float(len(whole.groups) - len(rest.groups))
        self.last_groups = list(whole.groups)
        tokens_fill, patches_fill = composition.fill()
        return (
            metrics
            | reward_metrics(self.last_groups)
            | {
                "packing/microbatches": float(len(composition.batches)),
                "packing/token_fill": tokens_fill,
                "packing/patch_fill": patches_fill,
            }
            | plan_metrics(composition, learner.mesh.size)
            | ({"packing/shapes": float(len(learner.shapes))} if composition.layouts else {})
        )

    @property
    def _skip_idle(self) -> bool:
        return not (self._config.algorithm.kl_coefficient or self._config.algorithm.entropy_coefficient)

    def _compute(self, one: Portion, learner: Learner, reference: dict[str, Any] | None) -> None:
        """The gradients of a portion."""
        one.composition = composition = self._composed(one, learner, reference)
        one.outcome = learner.accumulate(composition.batches, composition.devices, composition.work)

    def _composed(self, one: Portion, learner: Learner, reference: dict[str, Any] | None) -> Composition:
        """The microbatches for `learner`'s mesh, with all that the loss reads."""
        composition = compose(
            one.groups,
            one.prepared,
            self._config,
            learner.mesh.size,
            vision=self._vision,
            text=learner.text,
            shapes=learner.shapes,
            skip_idle=self._skip_idle,
            version=learner.version,
        )
        if reference is not None:
            composition = with_reference(composition, _logprobs(learner, composition, reference))
        importance = self._config.algorithm.importance
        if importance.whole:
            composition = with_importance(composition, _logprobs(learner, composition), importance)
        return composition

    def _workplace(self, engines: Sequence[int]) -> tuple[Learner, dict[str, Any] | None]:
        """A learner on the devices of these engines with the newest weights, and the reference's weights there."""
        devices = tuple(dict.fromkeys(device for number in engines for device in self._engines[number].devices))
        if not devices or set(devices) == set(self._learner.mesh.devices.flat):
            return self._learner, self._reference
        if devices not in self._elsewhere:
            learner = self._learner.on(devices)
            self._elsewhere[devices] = learner, self._reference and learner.on_mesh(self._reference)
        learner, reference = self._elsewhere[devices]
        if learner.version != self._learner.version:
            learner.follow(self._learner)
        return learner, reference


def _logprobs(learner: Learner, composition: Composition, params: dict[str, Any] | None = None) -> list[Any]:
    inputs = [batch.inputs for batch in composition.batches]
    return [logprobs for logprobs, _ in learner.scores(inputs, composition.devices, params)]


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
