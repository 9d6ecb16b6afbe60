"""Advantages from values against the sum that defines them; what is made of them by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.algorithms.ppo import explained_variance, gae, terminal_rewards, whitened

cases = st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 2**20))


def numbers(case):
    lengths, seed = case
    rng = np.random.default_rng(seed)
    factors = rng.choice([0.0, rng.uniform(), 1.0], 2)
    return np.array(lengths), rng.normal(size=sum(lengths)), rng.normal(size=sum(lengths)), factors


@given(cases)
def test_they_are_the_sum_of_discounted_temporal_differences(case):
    """Equation 16 of arXiv:1506.02438, each token's sum for itself."""
    lengths, rewards, values, (gamma, decay) = numbers(case)
    want, first = [], 0
    for length in lengths:
        r, v = rewards[first : first + length], [*values[first : first + length], 0.0]
        for t in range(length):
            deltas = [r[u] + gamma * v[u + 1] - v[u] for u in range(length)]
            want.append(sum((gamma * decay) ** (u - t) * deltas[u] for u in range(t, length)))
        first += length
    np.testing.assert_allclose(gae(rewards, values, lengths, gamma, decay), np.array(want), atol=1e-12)


def test_whitening_and_explained_variance_by_hand():
    np.testing.assert_allclose(whitened(np.array([1.0, 2.0, 3.0])), [-1.0, 0.0, 1.0], atol=1e-7)
    np.testing.assert_array_equal(whitened(np.array([3.0])), [0.0])
    assert whitened(np.zeros(0)).shape == (0,)
    returns = np.array([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(returns + 5.0, returns) == 1.0  # a constant error is no variance
    assert explained_variance(np.full(4, 0.5), returns) == 0.0
    assert explained_variance(1.0 - returns, returns) == -3.0
    assert explained_variance(returns, np.ones(4)) == 0.0 == explained_variance(np.zeros(0), np.zeros(0))


def test_a_reward_is_that_of_the_last_token():
    np.testing.assert_array_equal(terminal_rewards(np.array([1.0, 5.0, 2.0]), np.array([3, 0, 1])), [0, 0, 1, 2])


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="3 rewards, 2 values and 2 tokens"):
        gae(np.zeros(3), np.zeros(2), np.array([2]), np.ones(1), 1.0)
