"""Adds to compositions what losses read beside the tokens: log-probs of other weights, and facts of whole responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..algorithms.importance import log_ratio
from ..algorithms.rl_algorithm import Key
from .composition import Composition, PerToken
from .team import ALONE, Arrays, Team, by_response


def with_reference(composition: Composition, logprobs_BT: PerToken) -> Composition:
    """Returns the composition with these log-probs, one array `[B, T]` for each microbatch, as the reference
    model's."""
    return composition.replaced({"reference_logprobs_BT": _of_trained(composition, logprobs_BT)})


def with_proximal(composition: Composition, logprobs_BT: PerToken) -> Composition:
    """Returns the composition with these log-probs as those of the policy before the first of several optimizer
    steps."""
    return composition.replaced({"proximal_logprobs_BT": _of_trained(composition, logprobs_BT)})


def with_policy_ratios(
    composition: Composition, logprobs_BT: PerToken, decoupled: bool, team: Team = ALONE
) -> Composition:
    """Returns the composition with each response's mean of log(policy / clipping centre), for all of its tokens.

    `logprobs_BT` are those of the policy with which the next optimizer step begins. The clipping centre is the
    behaviour policy or, if `decoupled`, the proximal policy, which is this policy if the batches have no other.
    Collective.
    """
    batches = composition.batches
    around_BT = [batch.behaviour_logprobs_BT for batch in batches]
    if decoupled:
        stored = [batch.proximal_logprobs_BT for batch in batches]
        around_BT = [before if before is not None else now for before, now in zip(stored, logprobs_BT, strict=True)]
    around = composition.of_responses(around_BT, np.float64)
    means = _means(log_ratio(composition.of_responses(logprobs_BT, np.float64), around), composition, team)
    ratios_BT = composition.scattered(np.repeat(means, composition.lengths))
    return composition.replaced({"policy_log_ratios_BT": ratios_BT})


def with_advantages(composition: Composition, advantages: np.ndarray) -> Composition:
    """Returns the composition with other advantages, one a response."""
    return composition.replaced({"advantages_BT": composition.scattered(np.repeat(advantages, composition.lengths))})


def _of_trained(composition: Composition, logprobs_BT: PerToken) -> list[np.ndarray]:
    """Returns the log-probs of the tokens that are trained on, 0 elsewhere."""
    pairs = zip(composition.batches, logprobs_BT, strict=True)
    return [np.where(b.loss_weights_BT != 0, np.asarray(a, np.float32), np.float32(0)) for b, a in pairs]


def with_response_ratios(composition: Composition, logprobs_BT: PerToken, team: Team = ALONE) -> Composition:
    """Returns the composition with each response's mean of log(policy / behaviour policy), for all of its tokens.

    `logprobs_BT` are those of the weights to be trained, `[B, T]` for each microbatch. Collective.
    """
    behaviour = composition.of_responses([b.behaviour_logprobs_BT for b in composition.batches], np.float64)
    means = _means(log_ratio(composition.of_responses(logprobs_BT, np.float64), behaviour), composition, team)
    return composition.replaced(
        {"response_log_ratios_BT": composition.scattered(np.repeat(means, composition.lengths))}
    )


def _means(values: np.ndarray, composition: Composition, team: Team) -> np.ndarray:
    """Returns the mean of each response's values, of which there is one a token."""

    def mean(_: Sequence[Key], sums: Arrays) -> Arrays:
        return {"mean": sums["values"] / sums["tokens"]}

    sums = {"values": composition.summed(values), "tokens": composition.lengths}
    return by_response(team, [composition], [sums], mean)[0]["mean"]
