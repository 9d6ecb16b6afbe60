"""Training as the runtime calls it: one optimizer step over scored groups, or gradients of some of them.

A step's gradients may be computed in portions, at different times and on different devices, and are in the end as if
computed at once. The loss weights of a portion are normalised over the portion, so its gradient is that of a mean over
it. In the step's mean a portion counts as much as its share of the step's normaliser: tokens, or responses (Flexes,
section 4.4, "Preserving On-Policy Semantics"). Nothing is updated in between: all portions are of the same weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from sharding.fsdp import own_rows
from sharding.walk import Params, Tally

from ..algorithms import ALGORITHMS, AlgorithmModule
from ..algorithms.grpo import zero_variance_groups
from ..algorithms.loss import normaliser
from ..base.types import Group, PreparedPrompt, TrainedStep
from ..batch.composer import Composer
from ..batch.composition import Composition, plan_metrics, with_importance, with_reference
from ..config import Config
from .gradients import Gradients, Outcome
from .learner import Learner


@runtime_checkable
class OnDevices(Protocol):
    """An engine, as far as training knows it."""

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


@dataclasses.dataclass
class Portion:
    """Some groups of a step with their advantages, and their gradients where they have been computed."""

    groups: Sequence[Group]
    prepared: Mapping[int, PreparedPrompt]
    size: int  # of the step's normaliser
    gradients: Gradients | None = None  # whose mesh the outcome is on
    composition: Composition | None = None  # the last one that was computed
    outcome: Outcome | None = None


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
        weights: Callable[[], Params] | None = None,
    ) -> None:
        """`composer` is for the devices of the learner's mesh; `reference` are the weights of the KL term, if any;
        `algorithm` replaces the one that `config` names; `weights` returns what engines are given, where that is not
        what the learner has."""
        self._config, self._learner, self._composer, self._reference = config, learner, composer, reference
        self._engines, self._weights = engines, weights
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
        return self._learner.params if self._weights is None else self._weights()

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
            metrics = learner.step(composition.everywhere)
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
            "packing/microbatches": float(len(composition.everywhere)),
            "packing/token_fill": tokens_fill,
            "packing/patch_fill": patches_fill,
            "packing/shapes": float(len(self._composer.shapes)),
        }
        metrics |= plan_metrics(composition, learner.mesh.size)
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
        scores = place.reference is not None or self._config.algorithm.importance.whole
        place.gradients.compile_ahead(place.params, composition.coming, scores=scores)
        return with_scores(composition, place.gradients, place.params, place.reference, self._config)

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


def with_scores(
    composition: Composition, gradients: Gradients, params: Params, reference: Params | None, config: Config
) -> Composition:
    """The composition with the log-probs that the loss reads beside those of its own pass: of the reference weights, if
    there are any, and of `params`, for importance weights of whole responses."""

    def logprobs(weights: Params) -> list[np.ndarray]:
        own = gradients.scores(weights, composition.everywhere)[: len(composition.microbatches)]
        return [own_rows(scores[0]) for scores in own if scores is not None]

    if reference is not None:
        composition = with_reference(composition, logprobs(reference))
    if config.algorithm.importance.whole:
        composition = with_importance(composition, logprobs(params), config.algorithm.importance)
    return composition


def portion(groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt], config: Config) -> Portion:
    """A portion without gradients yet."""
    lengths = np.array([len(sample.response.token_ids) for group in groups for sample in group.samples], np.int64)
    size = normaliser(lengths, config.algorithm.loss_aggregation, config.rollout.max_new_tokens)
    return Portion(groups, prepared, size)


def has_gradient(groups: Iterable[Group], skip_idle: bool) -> bool:
    """Returns whether there is a token to train on; with `skip_idle`, one with an advantage."""
    samples = (sample for group in groups for sample in group.samples if sample.response.token_ids)
    return any(not skip_idle or sample.advantage != 0.0 for sample in samples)


def joined(gradients: Gradients, portions: Sequence[Portion]) -> Portion:
    """One portion of all of their groups. Its outcome, if any of them has one, is on the mesh of `gradients`; theirs
    are donated. Those without an outcome count for the normaliser only."""
    size = sum(portion.size for portion in portions)
    composition: Composition | None = None
    total: Outcome | None = None
    for portion in portions:
        if portion.outcome is not None:
            share = np.float32(portion.size / size)
            brought = gradients.bring(portion.outcome if portion.size == size else _scaled(portion.outcome, share))
            total = brought if total is None else gradients.add(total, brought)
            composition = portion.composition
    groups = sorted((group for portion in portions for group in portion.groups), key=lambda group: group.prompt.draw)
    prepared = {draw: prompt for portion in portions for draw, prompt in portion.prepared.items()}
    return Portion(groups, prepared, size, gradients, composition, total)


@functools.partial(jax.jit, donate_argnums=0)
def _scaled(outcome: Outcome, share: jax.Array | np.float32) -> Outcome:
    """Scales everything that the loss weights weight; counts and sums over tokens stay."""
    grads, tally = outcome
    sums = tally.sums | {"loss": tally.sums["loss"] * share}
    return jax.tree.map(lambda grad: grad * jnp.asarray(share, grad.dtype), grads), Tally(sums, tally.maxima)


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
