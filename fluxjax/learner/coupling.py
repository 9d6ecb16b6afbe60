"""Losses that couple responses: their slopes, response by response, as the advantages of an optimizer step."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ..algorithms import RLAlgorithm
from ..base.types import Group
from ..batch.composition import Composition, PerToken
from ..config import AlgorithmConfig


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
) -> tuple[Composition, Mapping[str, float]]:
    """The composition whose advantages are minus the slopes of the algorithm's loss, and the metrics of `couple`.

    `logprobs_BT` are the policy's, with which the next optimizer step begins; `groups` are those of the composition,
    with their advantages. Slopes are divided by the tokens' loss weights, which cancels these out of the loss. Every
    response must be of this process, as a whole."""
    lengths = composition.lengths
    tokens = composition.of_responses(logprobs_BT, np.float64)
    tokens = tokens - composition.of_responses([b.reference_logprobs_BT for b in composition.batches], np.float64)
    sums = np.bincount(np.repeat(np.arange(len(lengths)), lengths), tokens, minlength=len(lengths))
    ratios = dict(zip(composition.keys, sums.tolist(), strict=True))
    slopes, metrics = algorithm.couple(groups, ratios, settings)
    token_slopes = np.repeat([slopes.get(key, 0.0) for key in composition.keys], lengths)
    weights = composition.of_responses([b.loss_weights_BT for b in composition.batches], np.float64)
    return composition.replaced({"advantages_BT": composition.scattered(-token_slopes / weights)}), metrics
