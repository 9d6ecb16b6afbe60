"""Training as the runtime calls it: a training step over scored groups, or gradients of some of them.

A training step is one optimizer step, or several (`algorithm.minibatches`, `algorithm.epochs`), each over a minibatch
with loss weights of its own. The policy before the first of them is the step's proximal policy, whose log-probs are
computed once. Engines get the weights after the last, so a training step counts as one version, whatever it is made of.

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

from sharding.walk import Params, Tally

from ..algorithms import RLAlgorithm, find_algorithm
from ..algorithms.advantages import with_advantages
from ..algorithms.grpo import zero_variance_groups
from ..algorithms.loss import normaliser
from ..algorithms.rl_algorithm import Key
from ..base.types import Group, PreparedPrompt, Sample, TrainedStep
from ..batch.composer import Composer
from ..batch.composition import Composition, plan_metrics, together
from ..config import Config, ConfigError
from .coupling import coupled, only_taught
from .critic import Critic, critic_metrics
from .gradients import Gradients, Outcome
from .learner import Learner
from .minibatches import minibatches, of_all_updates
from .replay import ReplayBuffer, replay_metrics
from .scoring import in_turn, logprobs_of, needs_scores, shaped, with_scores


@runtime_checkable
class OnDevices(Protocol):
    """An engine as training knows it: only its devices matter."""

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
    """Makes training steps over scored groups: advantages, packing, log-probs that the loss needs, optimizer steps.

    Gradients of some groups may be computed before, on the devices of `engines` that were lent."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        composer: Composer,
        reference: Params | None,
        engines: Sequence[OnDevices] = (),
        algorithm: RLAlgorithm | None = None,
        weights: Callable[[], Params] | None = None,
        on_reference: Callable[[Params], None] | None = None,
        replay: ReplayBuffer | None = None,
        critic: Critic | None = None,
    ) -> None:
        """`composer` is for the devices of the learner's mesh; `reference` are the weights of the KL term, if any, and
        `on_reference` is called with the weights that take their place; `algorithm` replaces the one that `config`
        names; `weights` returns the weights for engines, where these are not the learner's parameters; `replay` has
        groups that steps train on again; `critic` is for algorithms that have one. Raises ConfigError for an algorithm
        that can't have what `config` asks for."""
        self._config, self._learner, self._composer, self._reference = config, learner, composer, reference
        self._engines, self._weights = engines, weights
        self._algorithm = algorithm or find_algorithm(config.algorithm)
        check_algorithm(config, self._algorithm)
        self._on_reference, self._replay = on_reference, replay
        idle = self._algorithm.idle_without_advantage(config.algorithm)
        # The KL term is an advantage, too, and critics learn from all.
        self._skip_idle = idle and not config.algorithm.kl_in_reward and not self._algorithm.critic
        if self._algorithm.critic and critic is None:
            raise ValueError(f"{config.algorithm.label} needs a critic")
        self._critic = critic if self._algorithm.critic else None
        self._judged: dict[str, float] = {}  # metrics of the step under way
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
        """The groups are those of `accumulate`, too; not those that are replayed, which neither `TrainedStep.groups`
        has. Metrics are those of the learner, and of the rewards: see `reward_metrics` and `replay_metrics`.
        `stream/groups`: how many groups of the step `accumulate` had, if any; metrics of packing and plans are then of
        what was left."""
        early, self._early = self._early, []
        learner, place = self._learner, self._place()
        replayed: list[Group] = []
        again: dict[int, PreparedPrompt] = {}  # the prompts of these
        if self._replay is not None:
            count = len(groups) + sum(len(portion.groups) for portion in early)
            replayed, again = self._replay.choose(count, learner.version)
        scored = self._algorithm.advantages([*groups, *replayed], self._config.algorithm)
        rest = portion(scored, {**prepared, **again}, self._config)
        whole = joined(place.gradients, early)
        if whole.outcome is None:  # nothing was computed yet
            whole = joined(place.gradients, [whole, rest])
            composition, metrics = self._update(whole, place)
        else:
            if has_gradient(rest.groups, self._skip_idle):
                self._compute(rest, place)
            whole = joined(place.gradients, [whole, rest])
            assert whole.composition is not None and whole.outcome is not None
            composition = whole.composition
            metrics = learner.update(*whole.outcome)
        fresh = [group for group in whole.groups if group.prompt.draw not in again]
        if early:
            metrics["stream/groups"] = float(len(fresh) - len(groups))
        if self._replay is not None:
            self._replay.keep(fresh, whole.prepared, learner.version)
            metrics |= replay_metrics(fresh, replayed, place.version, len(self._replay))
        tokens_fill, patches_fill = composition.fill()
        metrics |= reward_metrics(fresh) | {
            "packing/microbatches": float(len(composition.everywhere)),
            "packing/token_fill": tokens_fill,
            "packing/patch_fill": patches_fill,
            "packing/shapes": float(len(self._composer.shapes)),
        }
        metrics |= plan_metrics(composition, learner.mesh.size)
        self._renew_reference()
        return TrainedStep(tuple(fresh), metrics)

    def _update(self, step: Portion, place: _Place) -> tuple[Composition, dict[str, float]]:
        """All optimizer steps of a training step. Every minibatch is laid out and scored before the first of them."""
        settings, learner = self._config.algorithm, self._learner
        parts = minibatches(step.groups, settings.minibatches) or [step.groups]
        portions = [portion(part, step.prepared, self._config) for part in parts]
        compositions = self._composed(portions, place)
        if settings.kl_in_reward or self._critic is not None:
            new = {group.prompt.draw: group for part in portions for group in part.groups}
            step.groups = [new.get(group.prompt.draw, group) for group in step.groups]
        resting = self._critic is not None and learner.version < self._config.critic.warmup_steps
        metrics: list[dict[str, float]] = []
        of_critic: list[dict[str, float]] = []
        updates = in_turn(compositions, learner, self._config, self._algorithm)
        for part, (composition, last) in zip(portions * settings.epochs, updates, strict=True):
            found: Mapping[str, float] = {}
            if self._critic is not None:
                of_critic.append(self._critic.step(composition.everywhere, last=last))
            if resting:
                continue
            if self._algorithm.coupled:
                now = logprobs_of(composition, place.gradients, learner.params)
                composition, found = coupled(composition, now, part.groups, self._algorithm, settings)
            metrics.append({**learner.step(composition.everywhere, last=last), **found})
        if resting:
            learner.rest()
        of_policy = of_all_updates(metrics) if metrics else {}
        return together(compositions), of_policy | (self._judged | critic_metrics(of_critic) if of_critic else {})

    def _compute(self, portion: Portion, place: _Place) -> None:
        """The gradients of a portion."""
        [portion.composition] = self._composed([portion], place)
        portion.gradients = place.gradients
        portion.outcome = place.gradients.accumulate(place.params, portion.composition.microbatches)

    def _composed(self, portions: Sequence[Portion], place: _Place) -> list[Composition]:
        """The microbatches of each portion for the devices of `place`, with all that the loss reads. Where advantages
        depend on log-probs or on the critic, the portions' groups get new ones."""
        chosen = only_taught if self._algorithm.coupled else list
        options = {"skip_idle": self._skip_idle, "version": place.version}
        compositions = [
            place.composer.compose(chosen(part.groups), part.prepared, **options, last=part is portions[-1])
            for part in portions
        ]
        scores = place.reference is not None or needs_scores(self._config, self._algorithm)
        for composition in compositions:
            coming = [shaped(batch, self._config, self._algorithm) for batch in composition.coming]
            place.gradients.compile_ahead(place.params, coming, scores=scores)
            if self._critic is not None:
                self._critic.gradients.compile_ahead(self._critic.params, coming, scores=True)

        def rewarded(kl: Mapping[Key, float]) -> Mapping[Key, float]:
            return self._rewarded(portions, kl)

        judging = functools.partial(self._judge, portions) if self._critic is not None else None
        weights = place.params, place.reference
        return with_scores(compositions, place.gradients, *weights, self._config, self._algorithm, rewarded, judging)

    def _judge(
        self,
        portions: Sequence[Portion],
        compositions: Sequence[Composition],
        kl: Sequence[np.ndarray] | None,
    ) -> Sequence[Composition]:
        """Returns the minibatches with the critic's advantages. The samples of the portions get the mean advantage of
        their tokens."""
        assert self._critic is not None
        samples = [sample for part in portions for group in part.groups for sample in group.samples]
        outcomes = {(sample.response.draw, sample.response.sample): sample.advantage for sample in samples}
        costs = None if kl is None else [self._config.algorithm.kl_coefficient * token_kls for token_kls in kl]
        judged = self._critic.judge(compositions, outcomes, costs)
        self._judged = judged.metrics
        for part in portions:
            part.groups = [advantaged(group, dict.fromkeys(outcomes, 0.0) | judged.means) for group in part.groups]
        return judged.compositions

    def _rewarded(self, portions: Sequence[Portion], kl: Mapping[Key, float]) -> Mapping[Key, float]:
        """The advantages of all responses of the portions, whose KL is taken off their rewards."""
        settings = self._config.algorithm
        groups = [group for part in portions for group in part.groups]
        paid = [less_kl(group, kl, settings.kl_coefficient) for group in groups]
        advantages = {
            (sample.response.draw, sample.response.sample): sample.advantage
            for group in self._algorithm.advantages(paid, settings)
            for sample in group.samples
        }
        for part in portions:
            part.groups = [advantaged(group, advantages) for group in part.groups]
        return advantages

    def _renew_reference(self) -> None:
        """Makes the current policy the reference, where the configuration says so for this version."""
        learner = self._learner
        if self._config.algorithm.renews_reference(learner.version):
            self._reference = learner.params
            for place in self._lent.values():
                place.reference = place.gradients.on_mesh(learner.params)
            if self._on_reference is not None:
                self._on_reference(learner.params)

    def _place(self, engines: Sequence[int] = ()) -> _Place:
        """The devices of these engines, with the newest weights; without engines, the learner's devices."""
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


def check_algorithm(config: Config, algorithm: RLAlgorithm, processes: int = 1) -> None:
    """Raises ConfigError for settings, or a number of processes, under which the algorithm can't be computed."""
    if algorithm.coupled and not config.algorithm.kl_coefficient:
        raise ConfigError(
            f"algorithm.name = {config.algorithm.label} compares with a reference: algorithm.kl_coefficient must be "
            "above 0"
        )
    if algorithm.coupled and processes > 1:
        raise ConfigError(
            f"algorithm.name = {config.algorithm.label} scores whole groups before each optimizer step: not over "
            "several processes (distributed.processes) yet"
        )
    if algorithm.critic and processes > 1:
        raise ConfigError(
            f"algorithm.name = {config.algorithm.label} has a critic: not over several processes "
            "(distributed.processes) yet"
        )
    if config.critic.warmup_steps and not algorithm.critic:
        raise ConfigError(
            f"critic.warmup_steps is {config.critic.warmup_steps}, but algorithm.name = {config.algorithm.label} has "
            "no critic; set it to 0"
        )
    whole_step = algorithm.whole_step or algorithm.coupled or algorithm.critic
    for name in ("stream_trainer", "speculative_sync"):
        if whole_step and getattr(config, name).enabled:
            raise ConfigError(
                f"{name}.enabled computes gradients before a step is complete, but advantages of algorithm.name = "
                f"{config.algorithm.label} depend on all of it; unset the one or choose another"
            )


def less_kl(group: Group, kl: Mapping[Key, float], coefficient: float) -> Group:
    """The group with rewards from which `coefficient` times their response's KL is taken; empty responses have none."""

    def paid(sample: Sample) -> Sample:
        cost = coefficient * kl.get((sample.response.draw, sample.response.sample), 0.0)
        return dataclasses.replace(sample, reward=dataclasses.replace(sample.reward, value=sample.reward.value - cost))

    return dataclasses.replace(group, samples=tuple(map(paid, group.samples)))


def advantaged(group: Group, advantages: Mapping[Key, float]) -> Group:
    """The group with these advantages, given by (draw, sample)."""
    return with_advantages(group, [advantages[s.response.draw, s.response.sample] for s in group.samples])


def portion(groups: Sequence[Group], prepared: Mapping[int, PreparedPrompt], config: Config) -> Portion:
    """A portion without gradients yet."""
    lengths = np.array([sample.response.num_tokens for group in groups for sample in group.samples], np.int64)
    size = normaliser(lengths, config.algorithm.loss_aggregation, config.rollout.max_new_tokens)
    return Portion(groups, prepared, size)


def has_gradient(groups: Iterable[Group], skip_idle: bool) -> bool:
    """Returns whether there is a token to train on; with `skip_idle`, one with an advantage."""
    samples = (sample for group in groups for sample in group.samples if sample.response.num_tokens)
    return any(not skip_idle or sample.advantage != 0.0 for sample in samples)


def joined(gradients: Gradients, portions: Sequence[Portion]) -> Portion:
    """Joins portions into one. Its outcome, if any portion has one, is on the mesh of `gradients`; the portions'
    outcomes are donated. A portion without an outcome counts for the normaliser only."""
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
    lengths = [sample.response.num_tokens for _, sample in samples]
    metrics = {
        "reward/mean": float(np.mean([sample.reward.value for _, sample in samples])),
        "response/mean_tokens": float(np.mean(lengths)),
        "response/max_tokens": float(np.max(lengths)),
        "response/cut_off": float(np.mean([sample.response.finish == "length" for _, sample in samples])),
        "groups/zero_variance": zero_variance_groups(groups) / len(groups),
    }
    for source in sorted({source for source, _ in samples}):
        rewards = [sample.reward for name, sample in samples if name == source]
        metrics[f"reward/{source}"] = float(np.mean([reward.value for reward in rewards]))
        metrics[f"accuracy/{source}"] = float(np.mean([reward.correct for reward in rewards]))
    return metrics
