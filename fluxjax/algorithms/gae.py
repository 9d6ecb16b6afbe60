"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438, equations 11 to 16), on the host.

A response is an episode and its tokens are the actions: r_t is the reward of token t and V_t the critic's value of the
state in which t was chosen. Nothing comes after the last token, so its next value is 0.

    delta_t = r_t + gamma V_{t+1} - V_t,     A_t = delta_t + gamma lambda A_{t+1}

The critic learns the returns A_t + V_t (TD(lambda)). Arrays are flat, response after response, in float64.
"""

import numpy as np

VARIANCE_EPSILON = 1e-8  # under the root, where advantages are normalised over all tokens of a step


def gae(rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: float, decay: float) -> np.ndarray:
    """Returns the advantage of each token. `lengths` are the tokens of each response; `decay` is lambda."""
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    lengths = np.asarray(lengths, np.int64)
    if not len(rewards) == len(values) == lengths.sum():
        raise ValueError(f"{len(rewards)} rewards and {len(values)} values of {lengths.sum()} tokens")
    ends = np.cumsum(lengths)
    advantages = np.zeros(len(values))
    following, value_after = np.zeros(len(lengths)), np.zeros(len(lengths))  # A and V of each response's next token
    for back in range(1, int(lengths.max(initial=0)) + 1):  # the tokens at the distance `back` from the end
        having = np.flatnonzero(lengths >= back)
        at = ends[having] - back
        delta = rewards[at] + gamma * value_after[having] - values[at]
        following[having] = advantages[at] = delta + gamma * decay * following[having]
        value_after[having] = values[at]
    return advantages


def terminal_rewards(outcomes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the rewards of tokens: a response's outcome at its last token, 0 at the others."""
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
