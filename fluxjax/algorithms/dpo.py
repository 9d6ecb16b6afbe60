"""Direct preference optimisation over pairs that the policy generates itself (Rafailov et al., arXiv:2305.18290).

    -log sigmoid(beta (d(chosen) - d(rejected))),     d(o) = log policy(o) / reference(o), a sum over tokens

(equation 7), averaged over pairs. `kl_coefficient` is beta: the weight of the KL divergence in the objective that the
paper starts from (equation 3). A group's response with the highest reward is chosen, and its response with the lowest
reward is rejected (the first of several equals). A group of equal rewards has no pair. The responses are sampled from
the current policy, as in online DPO (Guo et al., OAIF, arXiv:2402.04792), with the reward in the judge's role.

The gradient is `-beta sigmoid(-z) (grad log policy(chosen) - grad log policy(rejected))` (equation 8), with z = beta
(d(chosen) - d(rejected)). A forward pass before each optimizer step computes z, so that a microbatch can hold one
response of a pair alone. The loss corrects neither for the policy that generated the responses nor for their age.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from ..base.types import Group, TrainBatch, has_variance, without_rounding
from ..config import AlgorithmConfig
from .grpo import rewards_of
from .loss import kl_estimate, masked
from .rl_algorithm import Key, LossAndMetrics, RLAlgorithm, TokenValues


class DPO(RLAlgorithm):
    coupled = True

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """Returns the advantages: 1 for a group's chosen response, -1 for its rejected response, 0 for all others."""

        def preferred(group: Group) -> np.ndarray:
            rewards_G, signs_G = np.array(without_rounding(rewards_of(group).tolist())), np.zeros(len(group.samples))
            if has_variance(group):
                order = np.array([sample.response.sample for sample in group.samples])
                signs_G[np.lexsort((order, -rewards_G))[0]] = 1.0
                signs_G[np.lexsort((order, rewards_G))[0]] = -1.0
            return signs_G

        return [group.with_advantages(preferred(group)) for group in groups]

    def couple(
        self, groups: Sequence[Group], log_ratios: Mapping[Key, float], cfg: AlgorithmConfig
    ) -> tuple[Mapping[Key, float], Mapping[str, float]]:
        """Returns the loss's derivative by the log-ratio of each response, and metrics: `loss`, as in the head of this
        file, and `dpo/pairs`, the number of pairs. If there are pairs, `dpo/accuracy` is the share of pairs whose
        chosen response has the higher implicit reward `beta d` (section 5.1). `dpo/chosen` and `dpo/rejected` are the
        mean implicit rewards, and `dpo/margin` is the difference of these means."""
        pairs = [pair for group in groups if (pair := _pair(group)) is not None]
        metrics = {"loss": 0.0, "dpo/pairs": float(len(pairs))}
        if not pairs:
            return {}, metrics
        beta = cfg.kl_coefficient
        rewards_P2 = beta * np.array([[log_ratios.get(key, 0.0) for key in pair] for pair in pairs], np.float64)
        margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        losses_P = np.logaddexp(0.0, -margins_P)
        slopes_P = beta * np.exp(-np.logaddexp(0.0, margins_P)) / len(pairs)
        slopes: dict[Key, float] = {}
        for (chosen, rejected), slope in zip(pairs, slopes_P.tolist(), strict=True):
            slopes |= {chosen: -slope, rejected: slope}
        return slopes, metrics | {
            "loss": float(losses_P.mean()),
            "dpo/accuracy": float(np.mean(margins_P > 0.0)),
            "dpo/margin": float(margins_P.mean()),
            "dpo/chosen": float(rewards_P2[:, 0].mean()),
            "dpo/rejected": float(rewards_P2[:, 1].mean()),
        }

    def token_loss(
        self, logprobs_BT: TokenValues, entropies_BT: TokenValues, batch: TrainBatch, cfg: AlgorithmConfig
    ) -> LossAndMetrics:
        """Returns the value 0, with the gradient of the loss in the head of this file; `couple` returns the value of
        that loss. The metric `reference_kl` is the estimate of KL(policy || reference) in nats."""
        trained_BT = batch.loss_weights_BT != 0.0
        change_BT = masked(logprobs_BT - jax.lax.stop_gradient(logprobs_BT), trained_BT)  # 0, with a gradient
        behind_BT = masked(batch.reference_logprobs_BT - logprobs_BT, trained_BT)
        return -batch.advantages_BT * change_BT, {"reference_kl": kl_estimate(behind_BT, cfg.kl_estimator)}

    def idle_without_advantage(self, cfg: AlgorithmConfig) -> bool:
        """Returns True: a response outside all pairs has no gradient."""
        return True


def _pair(group: Group) -> tuple[Key, Key] | None:
    keys = {s.advantage: (s.response.draw, s.response.sample) for s in group.samples}
    return (keys[1.0], keys[-1.0]) if 1.0 in keys and -1.0 in keys else None
