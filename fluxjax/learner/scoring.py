"""Log-probs that a loss reads beside those of its own pass, each from a forward pass over whole minibatches."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from sharding.fsdp import own_rows
from sharding.walk import Params

from ..algorithms import RLAlgorithm
from ..algorithms.loss import kl_estimate
from ..algorithms.rl_algorithm import Key
from ..base.types import TrainBatch
from ..batch.composition import Composition
from ..batch.loss_inputs import with_advantages, with_importance, with_policy_ratios, with_proximal, with_reference
from ..config import Config, KlEstimator
from .gradients import Gradients
from .learner import Learner

Rewarded: TypeAlias = Callable[[Mapping[Key, float]], Mapping[Key, float]]
# (minibatches, the KL in nats of each token that is taken off its reward, if any) -> minibatches with advantages
Judging: TypeAlias = Callable[[Sequence[Composition], Sequence[np.ndarray] | None], Sequence[Composition]]


def logprobs_of(composition: Composition, gradients: Gradients, weights: Params) -> list[np.ndarray]:
    """The log-probs of these weights, `[B, T]` of each microbatch of this process."""
    found = gradients.scores(weights, composition.everywhere)[: len(composition.microbatches)]
    return [own_rows(scores[0]) for scores in found if scores is not None]


def needs_scores(config: Config, algorithm: RLAlgorithm) -> bool:
    """Says whether the log-probs of the weights to be trained are needed before they are trained."""
    settings = config.algorithm
    return settings.importance.whole or settings.updates > 1 or settings.kl_in_reward or algorithm.response_ratios


def with_scores(
    compositions: Sequence[Composition],
    gradients: Gradients,
    params: Params,
    reference: Params | None,
    config: Config,
    algorithm: RLAlgorithm,
    rewarded: Rewarded | None = None,
    judging: Judging | None = None,
) -> list[Composition]:
    """Returns the minibatches of a step with the log-probs that their loss reads: those of the reference weights, if
    there are any; and those of `params`, for importance weights and ratios of whole responses, and where these
    parameters will have changed before the last optimizer step. `rewarded` returns the advantages of responses whose
    KL, in nats, is taken off their reward; with a critic, `judging` sets the advantages instead."""
    settings, scored = config.algorithm, list(compositions)
    if reference is not None:
        scored = [with_reference(composition, logprobs_of(composition, gradients, reference)) for composition in scored]
    needed = needs_scores(config, algorithm)
    proximal = [logprobs_of(composition, gradients, params) for composition in scored] if needed else []
    if judging is not None:
        paired = zip(scored, proximal, strict=True) if settings.kl_in_reward else None
        scored = list(judging(scored, paired and [token_kl(*pair, settings.kl_estimator) for pair in paired]))
    if not needed:
        return scored
    if settings.kl_in_reward and rewarded is not None and judging is None:
        kl: dict[Key, float] = {}
        for composition, logprobs in zip(scored, proximal, strict=True):
            kl |= response_kl(composition, logprobs, settings.kl_estimator)
        advantages = rewarded(kl)
        scored = [with_advantages(composition, advantages) for composition in scored]
    done = []
    for composition, logprobs in zip(scored, proximal, strict=True):
        if settings.importance.whole:
            composition = with_importance(composition, logprobs, settings.importance)
        if settings.updates > 1:
            composition = with_proximal(composition, logprobs)
        if algorithm.response_ratios:
            composition = with_policy_ratios(composition, logprobs, settings.importance.decoupled)
        done.append(composition)
    return done


def in_turn(
    compositions: Sequence[Composition], learner: Learner, config: Config, algorithm: RLAlgorithm
) -> Iterator[tuple[Composition, bool]]:
    """Yields the scored minibatches of a training step in the order of its optimizer steps, each with whether it is the
    last. Where the loss has ratios of whole responses, they are those of the policy when the minibatch is yielded."""
    settings = config.algorithm
    updates = list(compositions) * settings.epochs
    for number, composition in enumerate(updates, 1):
        if number > 1 and algorithm.response_ratios:
            now = logprobs_of(composition, learner.gradients, learner.params)
            composition = with_policy_ratios(composition, now, settings.importance.decoupled)
        yield composition, number == len(updates)


def shaped(batch: TrainBatch, config: Config, algorithm: RLAlgorithm) -> TrainBatch:
    """The batch with all fields that `with_scores` fills in, for compiling a program; only their shapes are right."""
    further = {
        "proximal_logprobs_BT": config.algorithm.updates > 1,
        "policy_log_ratios_BT": algorithm.response_ratios,
        "values_BT": algorithm.critic,
        "returns_BT": algorithm.critic,
    }
    like = {name: batch.reference_logprobs_BT for name, used in further.items() if used}
    return dataclasses.replace(batch, **like)


def token_kl(composition: Composition, logprobs_BT: Sequence[np.ndarray], estimator: KlEstimator) -> np.ndarray:
    """KL(policy || reference) of each token in nats, response after response."""
    reference = composition.of_responses([b.reference_logprobs_BT for b in composition.batches], np.float64)
    return kl_estimate(reference - composition.of_responses(logprobs_BT, np.float64), estimator)


def response_kl(
    composition: Composition, logprobs_BT: Sequence[np.ndarray], estimator: KlEstimator
) -> dict[Key, float]:
    """KL(policy || reference) of each response in nats, summed over its tokens, by (draw, sample)."""
    kl = token_kl(composition, logprobs_BT, estimator)
    responses = np.repeat(np.arange(len(composition.keys)), composition.lengths)
    sums = np.bincount(responses, kl, minlength=len(composition.keys))
    return dict(zip(composition.keys, sums.tolist(), strict=True))
