"""On-policy distillation from another model, by the reverse KL divergence (Agarwal et al., arXiv:2306.13649).

The policy generates, and each of its tokens is scored by a teacher: the reference (`algorithm.reference`, a checkpoint
of the same sizes). Minimising KL(policy || teacher) of each token by policy gradients gives the advantage

    A_t = log teacher(o_t) - log policy(o_t),     loss -w min(r A_t, clip(r) A_t)

in nats; the policy in A_t is the proximal policy (`loss.py`), and `kl_coefficient` (default 1) multiplies A_t. The loss
ignores rewards, which are only reported.
"""

from collections.abc import Sequence

from ..base.types import Group, TrainBatch
from ..config import AlgorithmConfig
from .grpo import clipped_loss
from .loss import masked, proximal
from .rl_algorithm import LossAndMetrics, RLAlgorithm, TokenValues


class Distillation(RLAlgorithm):
    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """Returns the groups with the advantage 1 for every response: `token_loss` weighs the tokens."""
        return [group.with_advantages([1.0] * len(group.samples)) for group in groups]

    def token_loss(
        self, logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
    ) -> LossAndMetrics:
        """Returns `clipped_loss` for the advantages in the head of this file. Its metrics get `teacher_kl`, the
        estimate k1 of KL(policy || teacher) in nats."""
        trained_BT = batch.loss_weights_BT != 0.0
        behind_BT = masked(batch.reference_logprobs_BT - proximal(logprobs_BT, batch), trained_BT)
        advantages_BT = cfg.kl_coefficient * batch.advantages_BT * behind_BT
        loss_BT, metrics = clipped_loss(logprobs_BT, advantages_BT, batch, cfg)
        return masked(loss_BT, trained_BT), metrics | {"teacher_kl": -behind_BT}
