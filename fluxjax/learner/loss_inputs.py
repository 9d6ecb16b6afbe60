"""Computes inputs of the loss before an optimizer step. These are log-probs under other weights, means over the tokens
of each response, and slopes of losses that couple responses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from sharding.walk import Params, own_rows

from ..algorithms import RLAlgorithm
from ..algorithms.loss import kl_estimate, log_ratio, log_weight
from ..algorithms.rl_algorithm import Key
from ..base.types import Group, TrainBatch
from ..batch.composer import Team
from ..batch.composition import Composition, PerToken
from ..batch.fill import span_cells
from ..config import AlgorithmConfig, Config, ImportanceConfig, ImportanceLevel, KlEstimator
from .gradients import Gradients

Arrays: TypeAlias = Mapping[str, np.ndarray]  # one-dimensional arrays, by name
# (responses, {name: a number for each response}) -> {name: a number for each response}
OfResponses: TypeAlias = Callable[[Sequence[Key], Arrays], Arrays]
# (responses, number of tokens of each response, {name: a number for each token}) -> {name: a number for each token}
OfTokens: TypeAlias = Callable[[Sequence[Key], np.ndarray, Arrays], Arrays]


def logprobs_of(composition: Composition, gradients: Gradients, weights: Params) -> list[np.ndarray]:
    """Returns the log-probs under these weights, `[B, T]` for each microbatch of this process."""
    found = gradients.scores(weights, composition.everywhere)[: len(composition.microbatches)]
    return [own_rows(scores[0]) for scores in found if scores is not None]


def shaped(batch: TrainBatch, config: Config, algorithm: RLAlgorithm) -> TrainBatch:
    """Returns the batch with meaningless values in all fields that `PolicyTrainer` fills in, to compile a program."""
    further = {
        "proximal_logprobs_BT": config.algorithm.updates > 1,
        "policy_log_ratios_BT": algorithm.response_ratios,
        "values_BT": algorithm.critic,
        "returns_BT": algorithm.critic,
    }
    like = {name: batch.reference_logprobs_BT for name, used in further.items() if used}
    return dataclasses.replace(batch, **like)


def token_kl(composition: Composition, logprobs_BT: Sequence[np.ndarray], estimator: KlEstimator) -> np.ndarray:
    """Returns KL(policy || reference) of each token in nats, response after response."""
    reference = composition.of_responses([b.reference_logprobs_BT for b in composition.batches], np.float64)
    return kl_estimate(reference - composition.of_responses(logprobs_BT, np.float64), estimator)


def only_taught(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups without their responses of advantage 0. A group that would lose all its tokens keeps them."""

    def taught(group: Group) -> Group:
        samples = tuple(sample for sample in group.samples if sample.advantage != 0.0)
        return dataclasses.replace(group, samples=samples) if any(s.response.num_trained for s in samples) else group

    return [taught(group) for group in groups]


def coupled(
    composition: Composition,
    logprobs_BT: PerToken,
    groups: Sequence[Group],
    algorithm: RLAlgorithm,
    settings: AlgorithmConfig,
    team: Team,
) -> tuple[Composition, Mapping[str, float]]:
    """Returns the composition with the negated slopes of the algorithm's loss as advantages, and the metrics of
    `couple`. `logprobs_BT` are those of the policy before the next optimizer step. Only process 0 calls `couple`, has
    `groups` (of all processes, with advantages) and returns metrics. Slopes are divided by the tokens' loss weights,
    which cancel in the loss. Collective."""
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


def with_logprobs(composition: Composition, field: str, logprobs_BT: PerToken) -> Composition:
    """Returns the composition with these log-probs in a `field` of `TrainBatch`, 0 at untrained tokens."""
    pairs = zip(composition.batches, logprobs_BT, strict=True)
    trained = [np.where(b.loss_weights_BT != 0, np.asarray(a, np.float32), np.float32(0)) for b, a in pairs]
    return composition.replaced({field: trained})


def with_policy_ratios(composition: Composition, logprobs_BT: PerToken, decoupled: bool, team: Team) -> Composition:
    """Returns the composition with each response's mean of log(policy / clipping centre) at all tokens of the response.
    `logprobs_BT` are those of the policy before the next optimizer step. The clipping centre is the behaviour policy
    or, if `decoupled`, the proximal policy. Without proximal log-probs, `logprobs_BT` serve. Collective."""
    batches = composition.batches
    around_BT = [batch.behaviour_logprobs_BT for batch in batches]
    if decoupled:
        stored = [batch.proximal_logprobs_BT for batch in batches]
        around_BT = [before if before is not None else now for before, now in zip(stored, logprobs_BT, strict=True)]
    around = composition.of_responses(around_BT, np.float64)
    means = _means(log_ratio(composition.of_responses(logprobs_BT, np.float64), around), composition, team)
    ratios_BT = composition.scattered(np.repeat(means, composition.lengths))
    return composition.replaced({"policy_log_ratios_BT": ratios_BT})


def with_importance(
    composition: Composition, logprobs_BT: PerToken, importance: ImportanceConfig, team: Team
) -> Composition:
    """Returns the composition prepared for importance weights that depend on other tokens (`ImportanceConfig.whole`).
    `logprobs_BT` are those of the weights to be trained, `[B, T]` for each microbatch. With the level `sequence`, every
    token gets the mean log-ratio of its response. With `normalize`, advantages are divided by the mean weight of all
    tokens, which scales every policy objective. Collective."""
    batches, lengths = composition.batches, composition.lengths
    behaviour = composition.of_responses([batch.behaviour_logprobs_BT for batch in batches], np.float64)
    ratios = log_ratio(composition.of_responses(logprobs_BT, np.float64), behaviour)
    ratios_BT, mean = [batch.response_log_ratios_BT for batch in batches], 1.0
    if importance.level is ImportanceLevel.SEQUENCE:
        ratios = np.repeat(_means(ratios, composition, team), lengths)
        ratios_BT = composition.scattered(ratios)
    if importance.normalize:
        lags = composition.of_responses([batch.lags_BT for batch in batches], np.int32)
        weights = np.exp(log_weight(ratios, lags, importance)[0])
        parts = team.exchange((float(weights.sum()), len(weights)))
        total, count = sum(part[0] for part in parts), sum(part[1] for part in parts)
        mean = np.float64(total / count) or 1.0  # 0 if all tokens are masked
    advantages_BT = [(batch.advantages_BT / mean).astype(np.float32) for batch in batches]
    return composition.replaced({"response_log_ratios_BT": ratios_BT, "advantages_BT": advantages_BT})


def _means(values: np.ndarray, composition: Composition, team: Team) -> np.ndarray:
    def mean(_: Sequence[Key], sums: Arrays) -> Arrays:
        return {"mean": sums["values"] / sums["tokens"]}

    sums = {"values": composition.summed(values), "tokens": composition.lengths}
    return by_response(team, [composition], [sums], mean)[0]["mean"]


def by_response(
    team: Team, compositions: Sequence[Composition], sums: Sequence[Arrays], decide: OfResponses
) -> list[dict[str, np.ndarray]]:
    """Returns, for each composition, a number for each response, which process 0 gets from `decide`. `sums` has, for
    each composition, sums over each response's tokens in this process. `decide` gets the sums over all processes. A
    response without a token in this process gets 0."""

    def of_tokens(keys: Sequence[Key], counts: np.ndarray, parts: Arrays) -> Arrays:
        which = np.repeat(np.arange(len(keys)), counts)
        totals = {name: np.bincount(which, values, len(keys)) for name, values in parts.items()}
        return {name: values[which] for name, values in decide(keys, totals).items()}

    here = [composition.lengths > 0 for composition in compositions]
    parts = [{name: values[some] for name, values in part.items()} for part, some in zip(sums, here, strict=True)]
    found = decided(team, compositions, [some.astype(np.int64) for some in here], parts, of_tokens)
    result: list[dict[str, np.ndarray]] = [{} for _ in found]
    for some, part, numbers in zip(here, found, result, strict=True):
        for name, values in part.items():
            numbers[name] = np.zeros(len(some))
            numbers[name][some] = values
    return result


def decided(
    team: Team,
    compositions: Sequence[Composition],
    counts: Sequence[np.ndarray],
    values: Sequence[Arrays],
    decide: OfTokens,
) -> list[dict[str, np.ndarray]]:
    """Returns, for each composition, the numbers that process 0 gets from `decide`, in the form of `values`. `counts`
    has the number of values of each response in this process. `decide` gets the values of all processes."""
    every = np.concatenate(counts)
    pairs = [(*key, view) for part in compositions for key, view in zip(part.keys, part.views, strict=True)]
    keys = np.array(pairs, np.int64).reshape(-1, 3)
    numbers = {name: np.concatenate([part[name] for part in values]) for name in values[0]}
    arrays = {"keys": keys[every > 0].reshape(-1), "counts": every[every > 0], **numbers}
    found = team.decided(arrays, lambda parts: _of_whole_responses(parts, decide))
    return _cut(found, [int(some.sum()) for some in counts])


def _of_whole_responses(parts: Sequence[Arrays], decide: OfTokens) -> list[dict[str, np.ndarray]]:
    """Joins each response's parts from all views and processes, calls `decide`, and splits the result into the same
    parts. Processes with higher numbers have later tokens of a response."""
    number: dict[Key, int] = {}
    keys = np.concatenate([part["keys"] for part in parts]).reshape(-1, 3)
    which = np.array([number.setdefault((draw, sample), len(number)) for draw, sample, _ in keys.tolist()], np.int64)
    counts = np.concatenate([part["counts"] for part in parts])
    order = np.lexsort((keys[:, 2], which))  # stable
    cells, _ = span_cells((np.cumsum(counts) - counts)[order], counts[order])
    names = [name for name in parts[0] if name not in ("keys", "counts")]
    values = {name: np.concatenate([part[name] for part in parts])[cells] for name in names}
    lengths = np.zeros(len(number), np.int64)
    np.add.at(lengths, which, counts)
    back = np.empty_like(cells)
    back[cells] = np.arange(len(cells))
    found = {name: numbers[back] for name, numbers in decide(list(number), lengths, values).items()}
    return _cut(found, [int(part["counts"].sum()) for part in parts])


def _cut(arrays: Arrays, sizes: Sequence[int]) -> list[dict[str, np.ndarray]]:
    ends = np.cumsum(sizes)
    return [
        {name: array[end - size : end] for name, array in arrays.items()} for size, end in zip(sizes, ends, strict=True)
    ]
