"""Group sequence policy optimisation (Zheng et al., arXiv:2507.18071): ratio and clipping of entire responses.

    -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i),     s_i = (policy(o_i) / behaviour(o_i))**(1 / |o_i|)

(equations 5 and 7), averaged over responses. The gradient of s_i is `s_i mean_t grad log policy(o_t)` (equation 10). A
token can compute its part of that gradient alone, from `sg(s_i) policy(o_t) / sg(policy(o_t))` (GSPO-token, equation
14). So a response's tokens may lie in several microbatches. A forward pass before each optimizer step computes s_i.
Advantages are GRPO's. The clip bounds are narrow (3e-4 and 4e-4, section 5.1), because means of logs vary little.
"""

import jax
import jax.numpy as jnp

from ..base.types import TrainBatch
from ..config import AlgorithmConfig
from .grpo import GRPO
from .loss import clipped_surrogate, correction, masked, regularised
from .rl_algorithm import LossAndMetrics, TokenValues


class GSPO(GRPO):
    response_ratios = True

    def token_loss(
        self, logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
    ) -> LossAndMetrics:
        """Returns this file's loss, times the importance weight, with the terms of `regularised`. Metrics: `ratio`,
        s_i; `clip_fraction`, 1 if the bound cuts the gradient off; and the metrics of `regularised`."""
        assert batch.policy_log_ratios_BT is not None, (
            "batch.policy_log_ratios_BT must be filled in by fluxjax.learner.loss_inputs.with_policy_ratios"
        )
        trained_BT = batch.loss_weights_BT != 0.0
        _, weight_BT = correction(logprobs_BT, batch, cfg.importance)
        change_BT = masked(logprobs_BT - jax.lax.stop_gradient(logprobs_BT), trained_BT)  # 0, but its gradient is not
        ratio_BT = jnp.exp(batch.policy_log_ratios_BT + change_BT)
        objective_BT, clipped_BT = clipped_surrogate(ratio_BT, batch.advantages_BT, cfg.clip_low, cfg.clip_high)
        metrics = {"ratio": masked(ratio_BT, trained_BT), "clip_fraction": masked(clipped_BT, trained_BT)}
        return regularised(-weight_BT * objective_BT, metrics, logprobs_BT, entropies_BT, batch, cfg)
