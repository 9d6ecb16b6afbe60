"""On-policy distillation from another model, by the reverse KL divergence (Agarwal et al., arXiv:2306.13649).

The policy generates, and each of its tokens is scored by a teacher: the reference (`algorithm.reference`, a checkpoint
of the same sizes). Minimising KL(policy || teacher) of each token by
policy gradients has the advantage

    A_t = log teacher(o_t) - log policy(o_t),     loss -w min(r A_t, clip(r) A_t)

in `kl_coefficient` (1) nats. The loss ignores rewards; they are only reported.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.types import Group, TrainBatch
from ..config import AlgorithmConfig
from .advantages import all_ones
from .importance import correction, proximal
from .loss import clipped_surrogate, dual_clipped, masked
from .rl_algorithm import RLAlgorithm


class Distillation(RLAlgorithm):
    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """Returns the advantage 1 for every response: the teacher says what its tokens are worth."""
        return all_ones(groups)

    def token_loss(
        self,
        logprobs_BT: Float[Array, "B T"],
        entropies_BT: Float[Array, "B T"],
        batch: TrainBatch,
        cfg: AlgorithmConfig,
    ) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
        """The loss in the head of this file. Metrics: `ratio`, `clip_fraction`, and `teacher_kl`, the estimate k1 of
        KL(policy || teacher) in nats."""
        trained_BT = batch.loss_weights_BT != 0.0
        log_ratio_BT, weight_BT = correction(logprobs_BT, batch, cfg.importance)
        ratio_BT = jnp.exp(log_ratio_BT)
        behind_BT = masked(batch.reference_logprobs_BT - proximal(logprobs_BT, batch), trained_BT)
        advantages_BT = cfg.kl_coefficient * batch.advantages_BT * behind_BT
        objective_BT, clipped_BT = clipped_surrogate(ratio_BT, advantages_BT, cfg.clip_low, cfg.clip_high)
        metrics = {"ratio": masked(ratio_BT, trained_BT), "clip_fraction": masked(clipped_BT, trained_BT)}
        if cfg.dual_clip > 0.0:
            objective_BT, beyond_BT = dual_clipped(objective_BT, ratio_BT, advantages_BT, cfg.dual_clip)
            metrics["dual_clip_fraction"] = masked(beyond_BT, trained_BT)
        return masked(-weight_BT * objective_BT, trained_BT), metrics | {"teacher_kl": -behind_BT}
