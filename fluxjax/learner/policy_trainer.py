"""Training as the runtime calls it: complete training steps over scored groups, or gradients of some groups of a step.

A training step has one optimizer step or several (`algorithm.minibatches`, `algorithm.epochs`; PPO, arXiv:1707.06347,
algorithm 1). Each optimizer step has a minibatch with loss weights of its own. The policy before the first optimizer
step is the training step's proximal policy, whose log-probs are computed once. Engines get the weights after the last
optimizer step, so that a training step counts as one version.

A step's gradient may be computed in portions, at different times and on different devices, with the same weights. The
loss weights of a portion are normalised over the portion. A portion's gradient is therefore weighted by the portion's
share of the step's normaliser, a number of tokens or responses (Flexes, section 4.4, "Preserving On-Policy Semantics").
The weighted sum of the portions' gradients equals the gradient computed at once.

Every process of a run has a trainer, and makes the same steps. Only process 0 has the groups. Process 0 calculates
advantages, plans, and hands every process its share of the step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding.walk import Params, Tally

from ..algorithms import RLAlgorithm
from ..algorithms.grpo import zero_variance_groups
from ..algorithms.loss import normaliser
from ..algorithms.rl_algorithm import Key
from ..base.types import Group, PreparedPrompt, Sample, TrainedStep
from ..batch.composer import Composer, Team
from ..batch.composition import Composition, packing_metrics
from ..batch.share import Share
from ..config import Config, ConfigError
from .gradients import Gradients, Outcome
from .learner import of_all_updates
from .loss_inputs import (
    Arrays,
    by_response,
    coupled,
    logprobs_of,
    only_taught,
    shaped,
    token_kl,
    with_importance,
    with_logprobs,
    with_policy_ratios,
)
from .run_models import RunModels

if TYPE_CHECKING:
    from .replay import ReplayBuffer


@dataclasses.dataclass
class _Place:
    gradients: Gradients
    composer: Composer
    params: Params
    version: int
    reference: Params | None


@dataclasses.dataclass
class Portion:
    """Some groups of a step with their advantages and, once computed, gradients. Only process 0 has groups."""

    groups: Sequence[Group] = ()
    prepared: Mapping[int, PreparedPrompt] = dataclasses.field(default_factory=dict)
    size: int = 0  # the portion's part of the step's normaliser, set only if there are several portions
    compositions: Sequence[Composition] = ()  # the compositions that were computed last
    outcome: Outcome | None = None


class PolicyTrainer:
    """Makes training steps over scored groups. Some gradients may be computed early, also on the devices of engines."""

    def __init__(
        self,
        config: Config,
        models: RunModels,
        composer: Composer,
        engines: Sequence[Any] = (),
        weights: Callable[[], Params] | None = None,
        replay: ReplayBuffer | None = None,
        team: Team | None = None,
    ) -> None:
        """`composer` is for the devices of the learner's mesh. Of `engines`, which are in this process, the trainer
        uses only the attribute `devices`. `weights` returns the weights for engines (None: the learner's parameters).
        `replay` has groups that steps train on again. `team` are the processes that make the same steps. Raises
        ConfigError for settings under which the algorithm can't be computed."""
        self._config, self._models, self._learner, self._composer = config, models, models.learner, composer
        self._engines, self._weights, self._replay, self._team = engines, weights, replay, team or Team()
        self._algorithm = models.algorithm
        check_algorithm(config, self._algorithm)
        idle = self._algorithm.idle_without_advantage(config.algorithm)
        # Groups with advantage 0 are needed if the KL term changes advantages, or if a critic learns from these groups.
        self._skip_idle = idle and not config.algorithm.kl_in_reward and not self._algorithm.critic
        settings = config.algorithm
        self._needs_scores = (
            settings.importance.whole
            or settings.updates > 1
            or settings.kl_in_reward
            or self._algorithm.response_ratios
        )
        self._critic = models.critic if self._algorithm.critic else None
        self._judged: dict[str, float] = {}  # metrics of `_judge` in the step under way
        self._early: dict[Gradients, Portion] = {}  # portions of the step under way, by the object that computes them
        self._lent: dict[tuple[Any, ...], _Place] = {}  # by devices

    @property
    def version(self) -> int:
        return self._learner.version

    def weights(self) -> Params:
        return self._learner.params if self._weights is None else self._weights()

    def accumulate(
        self, step: int, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt], engines: Sequence[int] = ()
    ) -> None:
        """Computes gradients of these groups, to be used by `train`. The devices are those of `engines`, or the
        learner's if `engines` is empty. Groups without a gradient count only for the normaliser."""
        latest = self._sized(Portion(self._algorithm.advantages(groups, self._config.algorithm), prepared))
        place = self._place(engines)
        parts = [latest] if has_gradient(latest.groups, self._skip_idle) else []
        self._keep(latest, self._composed(parts, place, latest.size, update=False), place)

    def train(self, step: int, groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt]) -> TrainedStep:
        """Trains as `Trainer.train` says. `TrainedStep.groups` has no replayed groups. Metrics are those of the
        learner, `reward_metrics`, `packing_metrics` and `ReplayBuffer.metrics`. `stream/groups` counts the groups of
        the step that `accumulate` got, if any; metrics of packing are then those of the portion computed last."""
        learner, place, settings = self._learner, self._place(), self._config.algorithm
        early = self._joined_early(place)
        replayed: list[Group] = []
        again: dict[int, PreparedPrompt] = {}  # the prompts of replayed groups
        if self._replay is not None:
            count = len(groups) + len(early.groups)
            replayed, again = self._replay.choose(count, learner.version)
        scored = self._algorithm.advantages([*groups, *replayed], settings)
        rest = Portion(scored, {**prepared, **again})
        if early.outcome is None:  # no gradient was computed early
            whole = joined(place.gradients, [early, rest])
            dealt = minibatches(whole.groups, settings.minibatches) or [whole.groups]
            parts = [Portion(part, whole.prepared) for part in dealt]
        else:
            rest = self._sized(rest)
            parts = [rest] if has_gradient(rest.groups, self._skip_idle) else []
        compositions = self._composed(parts, place, rest.size, update=True)
        whole, metrics = self._finish(early, rest, parts, compositions, place)
        fresh = [group for group in whole.groups if group.prompt.draw not in again]
        if early.groups:
            metrics["stream/groups"] = float(len(fresh) - len(groups))
        if self._replay is not None:
            self._replay.keep(fresh, whole.prepared, learner.version)
            metrics |= self._replay.metrics(fresh, replayed, place.version)
        metrics |= reward_metrics(fresh) | packing_metrics(whole.compositions, learner.mesh.size)
        metrics["packing/shapes"] = float(self._composer.num_shapes)
        return TrainedStep(tuple(fresh), metrics)

    def follow(self, shares: Sequence[Share], size: int, update: bool) -> None:
        """Takes part, in a process other than process 0, in `accumulate` or, with `update`, in `train`. `shares` are
        this process's shares of the minibatches. `size` is the `Portion.size` of process 0."""
        place, rest = self._place(), Portion(size=size)
        compositions = self._team.laid_out(self._composer, shares)
        if update:
            self._finish(self._joined_early(place), rest, [Portion() for _ in compositions], compositions, place)
        else:
            self._keep(rest, compositions, place)

    def _keep(self, latest: Portion, compositions: Sequence[Composition], place: _Place) -> None:
        self._compute(latest, compositions, place)
        here = self._early.pop(place.gradients, Portion())
        self._early[place.gradients] = joined(place.gradients, [here, latest])  # the newest portion is the last entry
        jax.block_until_ready(self._early[place.gradients].outcome)

    def _joined_early(self, place: _Place) -> Portion:
        early, self._early = list(self._early.values()), {}
        return joined(place.gradients, early)

    def _finish(
        self, early: Portion, rest: Portion, parts: Sequence[Portion], composed: Sequence[Composition], place: _Place
    ) -> tuple[Portion, dict[str, float]]:
        """Makes the optimizer steps of a training step. Returns the joined portions of the step, and metrics. `parts`
        are all minibatches or, with early gradients, `rest` or nothing, each with a composition."""
        if early.outcome is None:
            metrics = self._update(parts, composed, place)
            whole = joined(place.gradients, [early, rest])
            new = {group.prompt.draw: group for part in parts for group in part.groups}
            whole.groups = [new.get(group.prompt.draw, group) for group in whole.groups]
            whole.compositions = composed
        else:
            self._compute(rest, composed, place)
            whole = joined(place.gradients, [early, rest])
            assert whole.outcome is not None
            metrics = self._learner.update(*whole.outcome)
        if self._config.algorithm.reference_every and self._models.renew_reference():
            for lent in self._lent.values():
                lent.reference = lent.gradients.strategy.shard(self._learner.params)
        return whole, metrics

    def _update(self, parts: Sequence[Portion], compositions: Sequence[Composition], place: _Place) -> dict[str, float]:
        """Makes all optimizer steps of a training step, after `_scored` has filled in the inputs of all minibatches."""
        settings, learner = self._config.algorithm, self._learner
        scored = self._scored(parts, compositions, place)
        resting = self._critic is not None and learner.version < self._config.critic.warmup_steps
        metrics: list[dict[str, float]] = []
        of_critic: list[dict[str, float]] = []
        updates = list(zip(parts, scored, strict=True)) * settings.epochs
        for number, (part, composition) in enumerate(updates, 1):
            last = number == len(updates)
            if number > 1 and self._algorithm.response_ratios:
                now = logprobs_of(composition, place.gradients, learner.params)
                composition = with_policy_ratios(composition, now, settings.importance.decoupled, self._team)
            found: Mapping[str, float] = {}
            if self._critic is not None:
                of_critic.append(self._critic.step(composition.everywhere, last=last))
            if resting:
                continue
            if self._algorithm.coupled:
                now = logprobs_of(composition, place.gradients, learner.params)
                composition, found = coupled(composition, now, part.groups, self._algorithm, settings, self._team)
            metrics.append({**learner.step(composition.everywhere, last=last), **found})
        if resting:
            learner.version += 1  # a training step that leaves the policy's weights unchanged
        of_policy = of_all_updates(metrics) if metrics else {}
        if of_critic:
            from .critic import critic_metrics

            of_policy |= self._judged | critic_metrics(of_critic)
        return of_policy

    def _compute(self, portion: Portion, compositions: Sequence[Composition], place: _Place) -> None:
        for composition in self._scored([portion] * len(compositions), compositions, place):
            portion.compositions = [composition]
            portion.outcome = place.gradients.accumulate(place.params, composition.everywhere)

    def _composed(
        self, parts: Sequence[Portion], place: _Place, size: int = 0, update: bool = True
    ) -> list[Composition]:
        chosen = only_taught if self._algorithm.coupled else list
        some = [(chosen(part.groups), part.prepared) for part in parts]
        told: Any = {"size": size, "update": update, "skip_idle": self._skip_idle, "version": place.version}
        return self._team.composed(place.composer, some, **told)

    def _scored(
        self, parts: Sequence[Portion], compositions: Sequence[Composition], place: _Place
    ) -> list[Composition]:
        """Returns the compositions with all inputs of the loss. Log-probs of the reference are added, and log-probs of
        the present policy if importance weights, ratios of complete responses or several optimizer steps need them. If
        advantages depend on log-probs or on the critic, the groups of the parts get new advantages."""
        settings, algorithm, scored = self._config.algorithm, self._algorithm, list(compositions)
        needed = self._needs_scores
        for composition in filter(lambda composition: composition.coming, compositions):  # empty for most steps
            coming = [shaped(batch, self._config, algorithm) for batch in composition.coming]
            place.gradients.compile_ahead(place.params, coming, scores=needed or place.reference is not None)
            if self._critic is not None:
                self._critic.gradients.compile_ahead(self._critic.params, coming, scores=True)
        gradients, reference = place.gradients, place.reference
        if reference is not None:
            scored = [with_logprobs(c, "reference_logprobs_BT", logprobs_of(c, gradients, reference)) for c in scored]
        proximal = [logprobs_of(composition, gradients, place.params) for composition in scored] if needed else []
        kl: list[np.ndarray] = []  # KL of each token in nats, if it is subtracted from rewards
        if settings.kl_in_reward:
            kl = [token_kl(c, now, settings.kl_estimator) for c, now in zip(scored, proximal, strict=True)]
        if self._critic is not None:
            scored = self._judge(parts, scored, kl)
        elif settings.kl_in_reward:
            sums = [{"kl": minibatch.summed(tokens)} for minibatch, tokens in zip(scored, kl, strict=True)]
            found = by_response(self._team, scored, sums, functools.partial(self._rewarded, parts))
            for number, (composition, values) in enumerate(zip(scored, found, strict=True)):
                tokens = np.repeat(values["advantages"], composition.lengths)
                scored[number] = composition.replaced({"advantages_BT": composition.scattered(tokens)})
        for number, now in enumerate(proximal):
            composition = scored[number]
            if settings.importance.whole:
                composition = with_importance(composition, now, settings.importance, self._team)
            if settings.updates > 1:
                composition = with_logprobs(composition, "proximal_logprobs_BT", now)
            if algorithm.response_ratios:
                composition = with_policy_ratios(composition, now, settings.importance.decoupled, self._team)
            scored[number] = composition
        return scored

    def _judge(
        self, portions: Sequence[Portion], compositions: Sequence[Composition], kl: Sequence[np.ndarray]
    ) -> list[Composition]:
        """Gives each sample of the portions the mean advantage of its tokens."""
        assert self._critic is not None
        samples = [sample for part in portions for group in part.groups for sample in group.samples]
        outcomes = {(sample.response.draw, sample.response.sample): sample for sample in samples}
        costs = [self._config.algorithm.kl_coefficient * token_kls for token_kls in kl]
        judged, means, self._judged = self._critic.judge(compositions, outcomes, costs, self._team)
        for part in portions:
            part.groups = [advantaged(group, dict.fromkeys(outcomes, 0.0) | means) for group in part.groups]
        return judged

    def _rewarded(self, portions: Sequence[Portion], keys: Sequence[Key], sums: Arrays) -> Arrays:
        """Subtracts the KL term from the rewards of `portions`, and sets the new advantages in their groups. Returns
        the advantages of the responses `keys`. `sums["kl"]` has the KL of each response."""
        settings, kl = self._config.algorithm, dict(zip(keys, sums["kl"].tolist(), strict=True))
        groups = [group for part in portions for group in part.groups]
        paid = [less_kl(group, kl, settings.kl_coefficient) for group in groups]
        advantages = {
            (sample.response.draw, sample.response.sample): sample.advantage
            for group in self._algorithm.advantages(paid, settings)
            for sample in group.samples
        }
        for part in portions:
            part.groups = [advantaged(group, advantages) for group in part.groups]
        return {"advantages": np.array([advantages[key] for key in keys])}

    def _sized(self, portion: Portion) -> Portion:
        lengths = np.array([s.response.num_trained for group in portion.groups for s in group.samples], np.int64)
        settings = self._config.algorithm
        portion.size = normaliser(lengths, settings.loss_aggregation, self._config.rollout.max_new_tokens)
        return portion

    def _place(self, engines: Sequence[int] = ()) -> _Place:
        learner = self._learner
        devices = tuple(dict.fromkeys(device for number in engines for device in self._engines[number].devices))
        if not devices or set(devices) == set(learner.mesh.devices.flat):
            return _Place(learner.gradients, self._composer, learner.params, learner.version, self._models.reference)
        if devices not in self._lent:
            lent = learner.gradients.on(devices)
            reference = self._models.reference and lent.strategy.shard(self._models.reference)
            composer, params = self._composer.on(len(devices)), lent.strategy.shard(learner.params)
            self._lent[devices] = _Place(lent, composer, params, learner.version, reference)
        place = self._lent[devices]
        if place.version != learner.version:
            place.params, place.version = place.gradients.strategy.shard(learner.params), learner.version
        return place


def check_algorithm(config: Config, algorithm: RLAlgorithm) -> None:
    """Raises ConfigError for settings under which the algorithm can't be computed."""
    if algorithm.coupled and not config.algorithm.kl_coefficient:
        raise ConfigError(
            f"algorithm.name = {config.algorithm.label} compares with a reference: algorithm.kl_coefficient must be "
            "above 0"
        )
    if config.critic.warmup_steps and not algorithm.critic:
        raise ConfigError(
            f"critic.warmup_steps is {config.critic.warmup_steps}, but algorithm.name = {config.algorithm.label} has "
            "no critic; set critic.warmup_steps to 0"
        )
    whole_step = algorithm.whole_step or algorithm.coupled or algorithm.critic
    for name in ("stream_trainer", "speculative_sync"):
        if whole_step and getattr(config, name):
            raise ConfigError(
                f"{name} computes gradients before a step is complete, but advantages of algorithm.name = "
                f"{config.algorithm.label} depend on all responses of the step; unset {name} or choose another "
                "algorithm"
            )


def less_kl(group: Group, kl: Mapping[Key, float], coefficient: float) -> Group:
    """Subtracts `coefficient` times the KL of each response from the response's reward. An empty response has no KL."""

    def paid(sample: Sample) -> Sample:
        cost = coefficient * kl.get((sample.response.draw, sample.response.sample), 0.0)
        return dataclasses.replace(sample, reward=dataclasses.replace(sample.reward, value=sample.reward.value - cost))

    return dataclasses.replace(group, samples=tuple(map(paid, group.samples)))


def advantaged(group: Group, advantages: Mapping[Key, float]) -> Group:
    """Returns the group with these advantages, which are named by (draw, sample)."""
    return group.with_advantages([advantages[s.response.draw, s.response.sample] for s in group.samples])


def minibatches(groups: Sequence[Group], count: int) -> list[list[Group]]:
    """Deals groups, in the order of draws, to `count` minibatches in turn. Leaves out minibatches without tokens."""
    ordered = sorted(groups, key=lambda group: group.prompt.draw)
    dealt = [ordered[first::count] for first in range(count)]
    return [part for part in dealt if any(s.response.num_trained for group in part for s in group.samples)]


def has_gradient(groups: Iterable[Group], skip_idle: bool) -> bool:
    """Says whether there is a token to train on. With `skip_idle`, the advantage of the token must not be 0."""
    trained = (g.columns.advantages_GU[g.columns.numbers_G4[:, 3] > 0] for g in groups)
    return any(len(some) and (not skip_idle or some.any()) for some in trained)


def joined(gradients: Gradients, portions: Sequence[Portion]) -> Portion:
    """Joins portions into one portion, whose outcome is on the mesh of `gradients`. The outcomes of `portions` may be
    donated. A portion without an outcome counts only for the normaliser."""
    size = sum(portion.size for portion in portions)
    compositions: Sequence[Composition] = ()
    total: Outcome | None = None
    for portion in portions:
        if portion.outcome is not None:
            share = np.float32(portion.size / size)
            brought = gradients.bring(portion.outcome if portion.size == size else _scaled(portion.outcome, share))
            total = brought if total is None else gradients.add(total, brought)
            compositions = portion.compositions
    groups = sorted((group for portion in portions for group in portion.groups), key=lambda group: group.prompt.draw)
    prepared = {draw: prompt for portion in portions for draw, prompt in portion.prepared.items()}
    return Portion(groups, prepared, size, compositions, total)


@functools.partial(jax.jit, donate_argnums=0)
def _scaled(outcome: Outcome, share: jax.Array | np.float32) -> Outcome:
    """Scales the gradients and the loss. Other sums over tokens stay as they are."""
    grads, tally = outcome
    sums = tally.sums | {"loss": tally.sums["loss"] * share}
    return jax.tree.map(lambda grad: grad * jnp.asarray(share, grad.dtype), grads), Tally(sums, tally.maxima)


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns mean rewards (over all groups, and by source), accuracies by source, response lengths in tokens, the
    share of responses that were cut off, and the share of groups with equal rewards."""
    samples = [(group.prompt.source, sample) for group in groups for sample in group.samples]
    lengths = [sample.response.num_trained for _, sample in samples]
    metrics = {
        "reward/mean": float(np.mean([sample.reward.value for _, sample in samples])),
        "response/mean_tokens": float(np.mean(lengths)),
        "response/max_tokens": float(np.max(lengths)),
        "response/cut_off": float(np.mean([sample.response.finish == "length" for _, sample in samples])),
        "groups/zero_variance": zero_variance_groups(groups) / len(groups),
    }
    if any(group.prompt.environment for group in groups):
        metrics["response/mean_turns"] = float(np.mean([max(len(s.response.rewards), 1) for _, s in samples]))
    for source in sorted({source for source, _ in samples}):
        rewards = [sample.reward for name, sample in samples if name == source]
        metrics[f"reward/{source}"] = float(np.mean([reward.value for reward in rewards]))
        metrics[f"accuracy/{source}"] = float(np.mean([reward.correct for reward in rewards]))
    return metrics
