"""CISPO: clipped importance weights (MiniMax, "MiniMax-M1", arXiv:2506.13585, equations 4 and 5).

    -sg(w clip(r, 1 - clip_low, 1 + clip_high)) A_i log policy(o_t),     r = policy(o_t) / behaviour(o_t)

The bound cuts the weight of a token, not its gradient. Rare tokens that change the course of reasoning are therefore
still learned, while PPO's clipping drops them. There is no lower bound (`clip_low` is 1). The paper gives no number for
the upper bound; 5 is from ScaleRL (arXiv:2510.13786). Advantages are GRPO's; the loss is a mean over tokens.
"""

import jax
import jax.numpy as jnp

from ..base.types import TrainBatch
from ..config import AlgorithmConfig
from .grpo import GRPO
from .loss import correction, masked, regularised
from .rl_algorithm import LossAndMetrics, TokenValues


class CISPO(GRPO):
    def token_loss(
        self, logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
    ) -> LossAndMetrics:
        """Returns the loss of the module's docstring, with the terms of `regularised`. The metrics are r (`ratio`), 1
        for a token whose r is cut (`clip_fraction`), and those of `regularised`."""
        trained_BT = batch.loss_weights_BT != 0.0
        log_ratio_BT, weight_BT = correction(logprobs_BT, batch, cfg.importance)
        ratio_BT = jnp.exp(log_ratio_BT)
        bounded_BT = jnp.clip(ratio_BT, 1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
        cut_BT = jnp.where(bounded_BT != ratio_BT, 1.0, 0.0)
        metrics = {"ratio": masked(ratio_BT, trained_BT), "clip_fraction": masked(cut_BT, trained_BT)}
        factor_BT = jax.lax.stop_gradient(weight_BT * bounded_BT) * batch.advantages_BT
        loss_BT = -factor_BT * masked(logprobs_BT, trained_BT)
        return regularised(loss_BT, metrics, logprobs_BT, entropies_BT, batch, cfg)
