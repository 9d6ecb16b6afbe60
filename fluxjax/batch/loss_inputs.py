"""Adds the further inputs of losses to compositions: log-probs of other weights, and statistics of responses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jax.experimental import multihost_utils

from ..algorithms.importance import log_ratio, log_weight
from ..config import ImportanceConfig, ImportanceLevel
from .composition import Composition, PerToken


def with_reference(composition: Composition, logprobs_BT: PerToken) -> Composition:
    """Returns the composition with these reference log-probs, one array `[B, T]` for each microbatch."""
    return composition.replaced({"reference_logprobs_BT": _of_trained(composition, logprobs_BT)})


def with_proximal(composition: Composition, logprobs_BT: PerToken) -> Composition:
    """Returns the composition with these log-probs of the policy before the first of several optimizer steps."""
    return composition.replaced({"proximal_logprobs_BT": _of_trained(composition, logprobs_BT)})


def with_policy_ratios(composition: Composition, logprobs_BT: PerToken, decoupled: bool) -> Composition:
    """Returns the composition with each response's mean of log(policy / clipping centre), for all of its tokens.

    `logprobs_BT` are those of the policy at the start of the next optimizer step. The clipping centre is the behaviour
    policy. If `decoupled`, it is the proximal policy, or `logprobs_BT` themselves where batches have no proximal
    log-probs. A collective call if the composition says that responses lie on several processes.
    """
    batches = composition.batches
    if not batches:  # the devices of this process have no microbatch
        return composition
    around_BT = [batch.behaviour_logprobs_BT for batch in batches]
    if decoupled:
        stored = [batch.proximal_logprobs_BT for batch in batches]
        around_BT = [before if before is not None else now for before, now in zip(stored, logprobs_BT, strict=True)]
    around = composition.of_responses(around_BT, np.float64)
    means = _means(log_ratio(composition.of_responses(logprobs_BT, np.float64), around), composition)
    ratios_BT = composition.scattered(np.repeat(means, composition.lengths))
    return composition.replaced({"policy_log_ratios_BT": ratios_BT})


def with_advantages(composition: Composition, advantages: Mapping[tuple[int, int], float]) -> Composition:
    """Returns the composition with other advantages, by (draw, sample). Every response must lie on this process
    entirely."""
    values = np.repeat([advantages[key] for key in composition.keys], composition.lengths)
    return composition.replaced({"advantages_BT": composition.scattered(values)})


def _of_trained(composition: Composition, logprobs_BT: PerToken) -> list[np.ndarray]:
    """Returns the log-probs of the tokens that are trained on, 0 for the others."""
    pairs = zip(composition.batches, logprobs_BT, strict=True)
    return [np.where(b.loss_weights_BT != 0, np.asarray(a, np.float32), np.float32(0)) for b, a in pairs]


def with_importance(composition: Composition, logprobs_BT: PerToken, importance: ImportanceConfig) -> Composition:
    """Returns the composition with the inputs of importance weights that depend on entire responses or on all of them:
    see `importance.whole`.

    `logprobs_BT` are those of the weights to be trained, `[B, T]` for each microbatch. Responses get the means of their
    tokens' log-ratios. To normalise the weights, advantages are divided by the tokens' mean weight, because every
    policy objective is proportional to the advantages. A collective call if responses lie on several processes.
    """
    batches, lengths = composition.batches, composition.lengths
    if not batches:  # the devices of this process have no microbatch
        return composition
    behaviour = composition.of_responses([batch.behaviour_logprobs_BT for batch in batches], np.float64)
    ratios = log_ratio(composition.of_responses(logprobs_BT, np.float64), behaviour)
    ratios_BT, mean = [batch.response_log_ratios_BT for batch in batches], 1.0
    if importance.level is ImportanceLevel.SEQUENCE:
        ratios = np.repeat(_means(ratios, composition), lengths)
        ratios_BT = composition.scattered(ratios)
    if importance.normalize:
        lags = composition.of_responses([batch.lags_BT for batch in batches], np.int32)
        mean = np.exp(log_weight(ratios, lags, importance)[0]).mean() or 1.0  # 0 if all tokens are masked
    advantages_BT = [(batch.advantages_BT / mean).astype(np.float32) for batch in batches]
    return composition.replaced({"response_log_ratios_BT": ratios_BT, "advantages_BT": advantages_BT})


def _means(values: np.ndarray, composition: Composition) -> np.ndarray:
    """Returns the mean of each response's values; there is one value for each token."""
    lengths, whole = composition.lengths, composition.whole
    sums = np.bincount(np.repeat(np.arange(len(lengths)), lengths), values, minlength=len(lengths))
    if whole is None or not len(whole):
        return sums / lengths
    parts = multihost_utils.process_allgather(sums[: len(whole)].astype(np.float32))
    sums[: len(whole)] = np.sum(parts, axis=0, dtype=np.float64)
    return sums / np.concatenate([whole, lengths[len(whole) :]])
