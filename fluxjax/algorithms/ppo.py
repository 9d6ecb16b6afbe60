"""Proximal policy optimisation with a critic (Schulman et al., arXiv:1707.06347; advantages: arXiv:1506.02438).

The policy's loss is GRPO's clipped loss (equation 7 of the paper), with an advantage for each token. Advantages are
estimated from the values of a critic (GAE, equations 11 to 16), and whitened over the step. The tokens of the model
are the actions: t counts them through all turns of a response, without the observations between the turns. r_t is the
reward of token t: that of a turn (`Response.turn_rewards`) for its last token, 0 for other tokens. Under
`kl_in_reward`, the token's KL term is subtracted. V_t is the critic's value of the state in which token t was chosen; V
is 0 after the last token. gamma_t is `discount` for the last token of a turn, else 1.

    delta_t = r_t + gamma_t V_{t+1} - V_t,     A_t = delta_t + gamma_t lambda A_{t+1}

The critic has its own weights and optimizer, and trains on the same minibatches by

    L_V = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

The returns are R = A + V_old, with the advantages A before whitening, and the values V_old before the step's first
optimizer step; c is `value_clip`. The paper's equation 9 has the plain square; its authors' code (OpenAI baselines,
ppo2) and verl have the clipped square. The importance correction does not weigh the critic's loss, since the values
belong to the policy that generated the tokens.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..base.types import Group, TrainBatch
from ..config import AlgorithmConfig
from .grpo import GRPO, rewards_of
from .loss import masked
from .rl_algorithm import LossAndMetrics, TokenValues

VALUE_CLIP = 0.5  # as in verl
VARIANCE_EPSILON = 1e-8  # under the root of the standard deviation over all tokens of a step


class PPO(GRPO):
    whole_step = True
    critic = True

    def advantages(self, groups: Sequence[Group], cfg: AlgorithmConfig) -> list[Group]:
        """Returns the groups with rewards as advantages: `gae` computes the true advantages from them later."""
        return [group.with_advantages(rewards_of(group)) for group in groups]


def value_loss(values_BT: TokenValues, batch: TrainBatch, value_clip: float = VALUE_CLIP) -> LossAndMetrics:
    """Returns the loss L_V (head of this file) of each token, 0 for tokens that are not trained on. The metrics of a
    token are `value`, which is V, and `clip_fraction`, which is 1 if the clip makes its gradient zero."""
    assert batch.values_BT is not None and batch.returns_BT is not None, (
        "batch.values_BT and batch.returns_BT must be filled in by fluxjax.learner.critic"
    )
    trained_BT = batch.loss_weights_BT != 0.0
    error_BT = masked(values_BT - batch.returns_BT, trained_BT)
    square_BT = jnp.square(error_BT)
    near_BT = jnp.clip(values_BT, batch.values_BT - value_clip, batch.values_BT + value_clip)
    bounded_BT = jnp.square(masked(near_BT - batch.returns_BT, trained_BT))
    clipped_BT = (bounded_BT > square_BT).astype(square_BT.dtype)
    square_BT = jnp.maximum(square_BT, bounded_BT)
    return 0.5 * square_BT, {"value": masked(values_BT, trained_BT), "clip_fraction": clipped_BT}


# --- generalised advantage estimation: flat arrays, response after response, in float64 ---------------


def gae(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: np.ndarray | float, decay: float
) -> np.ndarray:
    """Returns the advantage of each token. `lengths` are the responses' numbers of tokens; `gamma` is one for each
    token, or one for all; `decay` is lambda. Raises ValueError if rewards, values and tokens differ in number."""
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    lengths = np.asarray(lengths, np.int64)
    if not len(rewards) == len(values) == lengths.sum():
        raise ValueError(f"{len(rewards)} rewards, {len(values)} values and {lengths.sum()} tokens; they must be equal")
    ends, gamma = np.cumsum(lengths), np.broadcast_to(gamma, len(values))
    advantages = np.zeros(len(values))
    following, value_after = np.zeros(len(lengths)), np.zeros(len(lengths))  # A and V of the next token, by response
    for back in range(1, int(lengths.max(initial=0)) + 1):  # back = 1: the last token of each response
        having = np.flatnonzero(lengths >= back)
        at = ends[having] - back
        delta = rewards[at] + gamma[at] * value_after[having] - values[at]
        following[having] = advantages[at] = delta + gamma[at] * decay * following[having]
        value_after[having] = values[at]
    return advantages


def terminal_rewards(outcomes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the rewards of tokens: the outcome of a response or a turn at its last token, 0 at its other tokens."""
    lengths = np.asarray(lengths, np.int64)
    rewards = np.zeros(int(lengths.sum()))
    ends = np.cumsum(lengths)[lengths > 0]
    rewards[ends - 1] = np.asarray(outcomes, np.float64)[lengths > 0]
    return rewards


def whitened(advantages: np.ndarray) -> np.ndarray:
    """Returns `(A - mean) / sqrt(variance + 1e-8)` over all tokens, with the divisor n - 1; 0 for a single token."""
    if len(advantages) < 2:
        return np.zeros_like(advantages)
    return (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + VARIANCE_EPSILON)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """Returns `1 - Var(returns - values) / Var(returns)`: 1 for exact values, 0 for values as good as a constant, below
    0 for values worse than a constant. Returns 0 if all returns are equal."""
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1.0 - float(np.var(returns - values)) / variance if variance else 0.0
