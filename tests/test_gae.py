"""Advantages from values: by hand, against the sum that defines them, and what must not change them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxjax.algorithms.gae import explained_variance, gae, terminal_rewards, whitened


def test_by_hand():
    # Two responses of 3 tokens and 1. gamma 1, lambda 1/2; rewards at their ends 1 and 2.
    values = np.array([0.5, 0.25, 0.75, 1.0])
    rewards = terminal_rewards(np.array([1.0, 2.0]), np.array([3, 1]))
    np.testing.assert_array_equal(rewards, [0.0, 0.0, 1.0, 2.0])
    # deltas: 0.25 - 0.5 = -0.25, 0.75 - 0.25 = 0.5, 1 - 0.75 = 0.25 and 2 - 1 = 1.
    got = gae(rewards, values, np.array([3, 1]), 1.0, 0.5)
    np.testing.assert_allclose(got, [-0.25 + 0.5 * (0.5 + 0.5 * 0.25), 0.5 + 0.5 * 0.25, 0.25, 1.0], rtol=1e-15)
    # gamma 1/2: deltas -0.375, 0.125, 0.25.
    got = gae(rewards, values, np.array([3, 1]), 0.5, 0.5)
    np.testing.assert_allclose(got, [-0.375 + 0.25 * (0.125 + 0.25 * 0.25), 0.125 + 0.25 * 0.25, 0.25, 1.0], rtol=1e-15)


cases = st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 2**20))


def numbers(case):
    lengths, seed = case
    rng = np.random.default_rng(seed)
    return np.array(lengths), rng.normal(size=sum(lengths)), rng.normal(size=sum(lengths)), rng.uniform(size=2)


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


@given(cases)
def test_without_decay_returns_are_those_of_the_rewards_alone(case):
    """lambda 1 (equation 18): A + V is the discounted sum of what comes, whatever the critic says. lambda 0 (17): one
    temporal difference."""
    lengths, rewards, values, (gamma, _) = numbers(case)
    returns = gae(rewards, values, lengths, gamma, 1.0) + values
    np.testing.assert_allclose(returns, gae(rewards, np.zeros_like(values), lengths, gamma, 1.0), atol=1e-12)
    after = np.zeros_like(values)
    ends = set(np.cumsum(lengths) - 1)
    for t in range(len(values) - 1):
        after[t] = 0.0 if t in ends else values[t + 1]
    np.testing.assert_allclose(gae(rewards, values, lengths, gamma, 0.0), rewards + gamma * after - values, atol=1e-12)


@given(cases, st.randoms())
def test_the_order_of_responses_does_not_count(case, random):
    lengths, rewards, values, (gamma, decay) = numbers(case)
    order = random.sample(range(len(lengths)), len(lengths))
    cut = np.cumsum(lengths)[:-1]
    split = [np.split(array, cut) for array in (rewards, values, gae(rewards, values, lengths, gamma, decay))]
    moved = [np.concatenate([parts[i] for i in order]) for parts in split]
    np.testing.assert_array_equal(gae(moved[0], moved[1], lengths[order], gamma, decay), moved[2])


def test_whitening_and_explained_variance_by_hand():
    np.testing.assert_allclose(whitened(np.array([1.0, 2.0, 3.0])), [-1.0, 0.0, 1.0], atol=1e-7)
    np.testing.assert_array_equal(whitened(np.array([3.0])), [0.0])
    assert whitened(np.zeros(0)).shape == (0,)
    returns = np.array([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(returns + 5.0, returns) == 1.0  # a constant error is no variance
    assert explained_variance(np.full(4, 0.5), returns) == 0.0
    assert explained_variance(1.0 - returns, returns) == -3.0
    assert explained_variance(returns, np.ones(4)) == 0.0 == explained_variance(np.zeros(0), np.zeros(0))


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="3 rewards and 2 values of 2 tokens"):
        gae(np.zeros(3), np.zeros(2), np.array([2]), 1.0, 1.0)
