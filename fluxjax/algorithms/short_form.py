"""An algorithm that is given by its loss alone: `compute_loss(batch, weights_BT)`, as in Flux's published API."""

from typing import Any

import jax.numpy as jnp

from ..base.types import TrainBatch
from ..config import AlgorithmConfig
from .grpo import GRPO
from .loss import correction, masked, regularised
from .rl_algorithm import LossAndMetrics, TokenValues


class ShortForm(GRPO):
    """GRPO's advantages, and the loss of an object's `compute_loss`: from the batch, with `advantages_BT`, and the
    importance weights policy / behaviour of each token, by which it is differentiated, to the loss of each token.
    Entropy and KL terms are added as the configuration says."""

    def __init__(self, implementation: Any) -> None:
        self._compute_loss = implementation.compute_loss

    def token_loss(
        self, logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
    ) -> LossAndMetrics:
        log_ratio_BT, weight_BT = correction(logprobs_BT, batch, cfg.importance)
        ratio_BT = jnp.exp(log_ratio_BT)
        loss_BT = jnp.asarray(self._compute_loss(batch, ratio_BT))
        if loss_BT.shape != ratio_BT.shape:
            raise ValueError(
                f"compute_loss returned the shape {loss_BT.shape}, not a loss of each token {ratio_BT.shape}"
            )
        metrics = {"ratio": masked(ratio_BT, batch.loss_weights_BT != 0.0)}
        return regularised(weight_BT * loss_BT, metrics, logprobs_BT, entropies_BT, batch, cfg)
