"""Supervised fine-tuning on given answers: the negative log-likelihood of each answer token, given the tokens before.

Warm starts use this algorithm. Advantages, behaviour and reference log-probs play no part.
"""

from collections.abc import Sequence

from ..base.types import Group, TrainBatch
from ..config import AlgorithmConfig
from .loss import masked
from .rl_algorithm import LossAndMetrics, TokenValues


def advantages(groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
    """Returns the advantage 1 for every answer, whatever its reward."""
    return [group.with_advantages([1.0] * len(group.samples)) for group in groups]


def token_loss(
    logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
) -> LossAndMetrics:
    """Returns the loss `-log p(token)` in nats, also as the metric `nll`, whose mean has no loss weights."""
    trained_BT = batch.loss_weights_BT != 0.0
    loss_BT = masked(-logprobs_BT, trained_BT)
    return loss_BT, {"nll": loss_BT}
