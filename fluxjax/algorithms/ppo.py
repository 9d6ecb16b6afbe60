"""Proximal policy optimisation with a critic (Schulman et al., arXiv:1707.06347; advantages: arXiv:1506.02438).

The policy's loss is GRPO's clipped one (equation 7 of the paper), with an advantage for each token: generalised
advantage estimation (`gae`) from the values of a critic, whitened over the step. A response gets its reward at its last
token. The critic has its own weights and optimizer, and trains on the same minibatches by

    L_V = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

with returns R = A + V_old of the advantages before whitening, V_old the values before the step's first optimizer step,
and c = `value_clip`. The paper's equation 9 has the plain square; the clipped square is that of its authors'
code (OpenAI baselines, ppo2) and of verl. The values belong to the policy that generated the tokens. So the importance
correction, which concerns the trained policy, does not weigh the critic's loss.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from ..base.types import Group, TrainBatch
from ..config import AlgorithmConfig
from .grpo import GRPO, rewards_of
from .loss import masked
from .rl_algorithm import LossAndMetrics, TokenValues

VALUE_CLIP = 0.5  # as in verl


class PPO(GRPO):
    whole_step = True
    critic = True

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """Returns the rewards unchanged: the estimation of advantages (`gae`) begins with them."""
        return [group.with_advantages(rewards_of(group)) for group in groups]


def value_loss(values_BT: TokenValues, batch: TrainBatch, value_clip: float = VALUE_CLIP) -> LossAndMetrics:
    """Returns the critic's loss in the head of this file, 0 for tokens that are not trained on. Metrics: `value`, V;
    `clip_fraction`, 1 where the bound cuts the gradient off."""
    assert batch.values_BT is not None and batch.returns_BT is not None, "filled in by fluxjax.learner.critic"
    trained_BT = batch.loss_weights_BT != 0.0
    error_BT = masked(values_BT - batch.returns_BT, trained_BT)
    square_BT = jnp.square(error_BT)
    near_BT = jnp.clip(values_BT, batch.values_BT - value_clip, batch.values_BT + value_clip)
    bounded_BT = jnp.square(masked(near_BT - batch.returns_BT, trained_BT))
    clipped_BT = (bounded_BT > square_BT).astype(square_BT.dtype)
    square_BT = jnp.maximum(square_BT, bounded_BT)
    return 0.5 * square_BT, {"value": masked(values_BT, trained_BT), "clip_fraction": clipped_BT}
