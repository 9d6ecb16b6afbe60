"""Log-probs that a loss reads beside those of its own pass, each from a forward pass over whole minibatches, and what
is made of them: KL divergences, and the slopes of losses that couple responses."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from sharding.fsdp import own_rows
from sharding.walk import Params

from ..algorithms import RLAlgorithm
from ..algorithms.loss import kl_estimate
from ..algorithms.rl_algorithm import Key
from ..base.types import Group, TrainBatch
from ..batch.composition import Composition, PerToken
from ..batch.team import ALONE, Arrays, Team, by_response
from ..config import AlgorithmConfig, Config, ImportanceLevel, KlEstimator
from .gradients import Gradients


def logprobs_of(composition: Composition, gradients: Gradients, weights: Params) -> list[np.ndarray]:
    """The log-probs of these weights, `[B, T]` of each microbatch of this process."""
    found = gradients.scores(weights, composition.everywhere)[: len(composition.microbatches)]
    return [own_rows(scores[0]) for scores in found if scores is not None]


def needs_scores(config: Config, algorithm: RLAlgorithm) -> bool:
    """Says whether the log-probs of the weights to be trained are needed before they are trained."""
    settings = config.algorithm
    return (
        settings.importance.level is ImportanceLevel.SEQUENCE
        or settings.updates > 1
        or settings.kl_in_reward
        or algorithm.response_ratios
    )


def shaped(batch: TrainBatch, config: Config, algorithm: RLAlgorithm) -> TrainBatch:
    """The batch with all fields that `PolicyTrainer` fills in, for compiling a program; only their shapes are right."""
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


def only_taught(groups: Sequence[Group]) -> list[Group]:
    """The groups without their responses of advantage 0; a group where no other response is left stays whole."""

    def taught(group: Group) -> Group:
        samples = tuple(sample for sample in group.samples if sample.advantage != 0.0)
        return dataclasses.replace(group, samples=samples) if any(s.response.num_tokens for s in samples) else group

    return [taught(group) for group in groups]


def coupled(
    composition: Composition,
    logprobs_BT: PerToken,
    groups: Sequence[Group],
    algorithm: RLAlgorithm,
    settings: AlgorithmConfig,
    team: Team = ALONE,
) -> tuple[Composition, Mapping[str, float]]:
    """The composition whose advantages are minus the slopes of the algorithm's loss, and the metrics of `couple`.

    `logprobs_BT` are the policy's, with which the next optimizer step begins; `groups` are those of all processes, with
    their advantages, in process 0, which calls `couple` and has its metrics. Slopes are divided by the tokens' loss
    weights, which cancels these out of the loss. Collective."""
    metrics: dict[str, float] = {}

    def couple(keys: Sequence[Key], sums: Arrays) -> Arrays:
        slopes, found = algorithm.couple(groups, dict(zip(keys, sums["ratios"].tolist(), strict=True)), settings)
        metrics.update(found)
        return {"slopes": np.array([slopes.get(key, 0.0) for key in keys])}

    tokens = composition.of_responses(logprobs_BT, np.float64)
    tokens = tokens - composition.of_responses([b.reference_logprobs_BT for b in composition.batches], np.float64)
    [found] = by_response(team, [composition], [{"ratios": composition.summed(tokens)}], couple)
    token_slopes = np.repeat(found["slopes"], composition.lengths)
    weights = composition.of_responses([b.loss_weights_BT for b in composition.batches], np.float64)
    return composition.replaced({"advantages_BT": composition.scattered(-token_slopes / weights)}), metrics
