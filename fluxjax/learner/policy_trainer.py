"""Training as the runtime calls it: one optimizer step over scored groups, or gradients of some of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from sharding.planner.plan import ShardPlan
from sharding.spread.buffers import SizedLayout
from sharding.strategy import Params

from ..algorithms import ALGORITHMS, AlgorithmModule
from ..algorithms.grpo import zero_variance_groups
from ..base.types import Group, PreparedPrompt, TrainedStep
from ..batch.composer import Composer, Composition, with_importance, with_reference
from ..config import Config
from .gradients import Gradients
from .learner import Learner
from .portions import Portion, has_gradient, joined, portion


@runtime_checkable
class OnDevices(Protocol):
    """What is known here of an engine."""

    @property
    def devices(self) -> Sequence[Any]:
        """The devices of this process that the engine computes on."""
        ...


@dataclasses.dataclass
class _Place:
    """Devices that gradients are computed on, with the weights that lie there."""

    gradients: Gradients
    composer: Composer
    params: Params
    version: int
    reference: Params | None

    def logprobs(self, composition: Composition, params: Params) -> list[jax.Array]:
        """`[B, T]` of each microbatch, under these parameters."""
        return [logprobs for logprobs, _ in self.gradients.scores(params, composition.microbatches)]


class PolicyTrainer:
    """One optimizer step over scored groups: advantages, packing, log-probs that the loss needs, learner.

    Gradients of some groups may be computed before, on the devices of `engines` that were lent."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        composer: Composer,
        reference: Params | None,
        engines: Sequence[OnDevices] = (),
        algorithm: AlgorithmModule | None = None,
    ) -> None:
        """`composer` is for the devices of the learner's mesh; `reference` are the weights of the KL term, if any;
        `algorithm` replaces the one that `config` names."""
        self._config, self._learner, self._composer, self._reference = config, learner, composer, reference
        self._engines = engines
        self._algorithm = algorithm or ALGORITHMS[config.algorithm.name]
        terms = config.algorithm.kl_coefficient or config.algorithm.entropy_coefficient
        # Groups without any advantage have no gradient; what an algorithm of a user's own does with them isn't known.
        self._skip_idle = not terms and self._algorithm in ALGORITHMS.values()
        self._early: list[Portion] = []  # of the step under way
        self._lent: dict[tuple[Any, ...], _Place] = {}  # by devices

    @property
    def version(self) -> int:
        return self._learner.version

    def weights(self) -> Params:
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
        latest = portion(self._algorithm.advantages(groups, self._config.algorithm), prepared, self._config)
        place = self._place(engines)
        if has_gradient(latest.groups, self._skip_idle):
            self._compute(latest, place)
        here = [early for early in self._early if early.gradients is place.gradients]
        elsewhere = [early for early in self._early if early.gradients is not place.gradients]
        self._early = [*elsewhere, joined(place.gradients, [*here, latest])]
        jax.block_until_ready(self._early[-1].outcome)

    def train(self, step: int, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt]) -> TrainedStep:
        """The groups are those of `accumulate`, too. Metrics are those of the learner, and of the rewards: see
        `reward_metrics`. `stream/groups`: how many groups of the step `accumulate` had, if any; metrics of packing and
        plans are then of what was left."""
        early, self._early = self._early, []
        learner, place = self._learner, self._place()
        rest = portion(self._algorithm.advantages(groups, self._config.algorithm), prepared, self._config)
        whole = joined(place.gradients, early)
        if whole.outcome is None:  # nothing was computed yet
            whole = joined(place.gradients, [whole, rest])
            composition = self._composed(whole, place)
            metrics = learner.step(composition.microbatches)
        else:
            if has_gradient(rest.groups, self._skip_idle):
                self._compute(rest, place)
            whole = joined(place.gradients, [whole, rest])
            assert whole.composition is not None and whole.outcome is not None
            composition = whole.composition
            metrics = learner.update(*whole.outcome)
        if early:
            metrics["stream/groups"] = float(len(whole.groups) - len(groups))
        tokens_fill, patches_fill = composition.fill()
        metrics |= reward_metrics(whole.groups) | {
            "packing/microbatches": float(len(composition.microbatches)),
            "packing/token_fill": tokens_fill,
            "packing/patch_fill": patches_fill,
        }
        if plans := plan_metrics(composition, learner.mesh.size):
            metrics |= plans | {"packing/shapes": float(len(self._composer.shapes))}
        return TrainedStep(tuple(whole.groups), metrics)

    def _compute(self, portion: Portion, place: _Place) -> None:
        """The gradients of a portion."""
        portion.gradients, portion.composition = place.gradients, self._composed(portion, place)
        portion.outcome = place.gradients.accumulate(place.params, portion.composition.microbatches)

    def _composed(self, portion: Portion, place: _Place) -> Composition:
        """The microbatches for the devices of `place`, with all that the loss reads."""
        composition = place.composer.compose(
            portion.groups, portion.prepared, skip_idle=self._skip_idle, version=place.version
        )
        importance = self._config.algorithm.importance
        if place.reference is not None:
            composition = with_reference(composition, place.logprobs(composition, place.reference))
        if importance.whole:
            composition = with_importance(composition, place.logprobs(composition, place.params), importance)
        return composition

    def _place(self, engines: Sequence[int] = ()) -> _Place:
        """The devices of these engines, with the newest weights; none given: the learner's."""
        learner = self._learner
        devices = tuple(dict.fromkeys(device for number in engines for device in self._engines[number].devices))
        if not devices or set(devices) == set(learner.mesh.devices.flat):
            return _Place(learner.gradients, self._composer, learner.params, learner.version, self._reference)
        if devices not in self._lent:
            lent = learner.gradients.on(devices)
            reference = self._reference and lent.on_mesh(self._reference)
            composer, params = self._composer.on(len(devices)), lent.on_mesh(learner.params)
            self._lent[devices] = _Place(lent, composer, params, learner.version, reference)
        place = self._lent[devices]
        if place.version != learner.version:
            place.params, place.version = place.gradients.on_mesh(learner.params), learner.version
        return place


def plan_metrics(composition: Composition, num_devices: int) -> dict[str, float]:
    """What the strategy's plans say of a step; nothing where sequences are packed without one."""
    if any(microbatch.layout is None for microbatch in composition.microbatches):
        return {}
    own_pace = composition.microbatches[0].work is not None
    return decoupled_metrics(composition, num_devices) if own_pace else spread_metrics(composition)


def decoupled_metrics(composition: Composition, num_devices: int) -> dict[str, float]:
    """How evenly a step's work is dealt to devices that keep their own pace.

    The share of all devices' time in which they are predicted to wait: at its end, and in collective microbatches for
    the busiest device; the most and fewest microbatches of a device, those included that it computes with all others;
    how many these are; the share of tokens in sequences on more than one device; padding of the rows.
    """
    layouts, loads, counts = _layouts(composition), np.zeros(num_devices), np.zeros(num_devices, int)
    busy = together = 0.0  # of collective microbatches, over all devices and of the busiest one
    for microbatch, layout in zip(composition.microbatches, layouts, strict=True):
        work = microbatch.work or 0.0
        if microbatch.owner is None:
            together += work
            busy += work * num_devices / layout.plan.balance
        else:
            loads[microbatch.owner] += work
            counts[microbatch.owner] += 1
    collective = len(layouts) - counts.sum()
    counts += collective
    return {
        "sharding/bubble": float(1 - (loads.sum() + busy) / (num_devices * (together + loads.max()))),
        "sharding/microbatches_max": float(counts.max()),
        "sharding/microbatches_min": float(counts.min()),
        "sharding/collective": float(collective),
        "sharding/sharded_tokens": _sharded([layout.plan for layout in layouts]),
        "sharding/mlp_padding": float(np.mean([layout.padding()["mlp"] for layout in layouts])),
    }


def spread_metrics(composition: Composition) -> dict[str, float]:
    """How evenly the plans spread a step's sequences: largest over mean attention work and tokens of a device, the
    share of tokens in sequences on more than one device, padding of the rows and of what all-to-alls send."""
    layouts = _layouts(composition)
    plans, padding = [layout.plan for layout in layouts], [layout.padding() for layout in layouts]
    return {
        "sharding/balance": max(plan.balance for plan in plans),
        "sharding/memory": max(plan.memory_ratio for plan in plans),
        "sharding/sharded_tokens": _sharded(plans),
        "sharding/mlp_padding": float(np.mean([share["mlp"] for share in padding])),
        "sharding/all_to_all_padding": float(np.mean([share["all_to_all"] for share in padding])),
    }


def _layouts(composition: Composition) -> list[SizedLayout]:
    return [microbatch.layout for microbatch in composition.microbatches if microbatch.layout is not None]


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
        rewards = [sample.reward for name, sample in samples if name == source]
        metrics[f"reward/{source}"] = float(np.mean([reward.value for reward in rewards]))
        metrics[f"accuracy/{source}"] = float(np.mean([reward.correct for reward in rewards]))
    return metrics
