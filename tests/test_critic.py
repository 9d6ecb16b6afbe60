"""The critic: its loss against the formula in float64, its values, and whole steps. `test_layout_steps` has it under
every layout."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packing_cases import TEXT, compose
from step_cases import (
    ALGORITHM_CASES,
    VERSION,
    composed,
    config_for,
    critic_for,
    flat,
    key_of,
    near_policy,
    samples_of,
    trainer_of,
)
from test_algorithms import TOLERANCE, finite_differences, make_batch

import models
from fluxjax.algorithms import PPO, RLAlgorithm, grpo
from fluxjax.algorithms.ppo import value_loss
from fluxjax.batch.composition import unpack
from fluxjax.config import AlgorithmConfig, Config, ConfigError, ImportanceConfig, KlEstimator
from fluxjax.learner.learner import Learner
from fluxjax.learner.policy_trainer import Portion, check_algorithm
from models.decoder import hidden_states, merge, split
from sharding.mesh import make_mesh
from sharding.walk import Walk

# --- the loss --------------------------------------------------------------------------------------


def value_case(seed, shape=(4, 16)):
    """Values, old values and returns, far from where the clipped loss has its corners; half of the cells trained."""
    rng = np.random.default_rng(seed)
    trained = rng.uniform(size=shape) < 0.5
    old, returns = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    values = (old + rng.choice([-1, 1], shape) * rng.choice([0.1, 0.3, 0.9], shape)).astype(np.float32)
    batch = make_batch(rng, trained, rng.uniform(-1, 0, shape))
    batch = dataclasses.replace(batch, values_BT=old, returns_BT=returns)
    return values, jax.tree.map(jnp.asarray, batch)


def formula(values, batch, clip):
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 summed with the weights, cell by cell in float64."""
    total = 0.0
    old, returns, weights = (
        np.asarray(x, np.float64) for x in (batch.values_BT, batch.returns_BT, batch.loss_weights_BT)
    )
    for cell in np.ndindex(*weights.shape):
        plain = values[cell] - returns[cell]
        near = min(max(values[cell], old[cell] - clip), old[cell] + clip) - returns[cell]
        total += weights[cell] * max(plain**2, near**2) / 2
    return total


@pytest.mark.parametrize("clip", [math.inf, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(2))
def test_loss_and_gradient_are_the_formulas(seed, clip):
    values, batch = value_case(seed)

    def loss(values_BT):
        return jnp.sum(batch.loss_weights_BT * value_loss(values_BT, batch, clip)[0])

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(values))
    want = functools.partial(formula, batch=batch, clip=clip)
    np.testing.assert_allclose(value, want(np.float64(values)), atol=TOLERANCE)
    np.testing.assert_allclose(gradient, finite_differences(want, np.float64(values)), atol=TOLERANCE)
    _, metrics = value_loss(jnp.asarray(values), batch, clip)
    trained = np.asarray(batch.loss_weights_BT) != 0
    cut = trained & (np.asarray(gradient) == 0)
    np.testing.assert_array_equal(metrics["clip_fraction"], cut)
    assert cut.any() == (clip < math.inf) and not np.asarray(gradient)[~trained].any()


def test_what_is_not_trained_may_be_anything():
    values, batch = value_case(3)
    trained = batch.loss_weights_BT != 0
    wild = dataclasses.replace(batch, returns_BT=jnp.where(trained, batch.returns_BT, jnp.inf))
    gradient = jax.grad(lambda x: jnp.sum(wild.loss_weights_BT * value_loss(x, wild, 0.2)[0]))(jnp.asarray(values))
    assert np.isfinite(gradient).all() and np.asarray(gradient)[np.asarray(trained)].any()


# --- the model -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_value_is_the_row_times_the_state_before_the_token(tied):
    groups, prepared, _ = near_policy()
    config = config_for(ImportanceConfig(), tokens_per_row=128)
    sizes = dataclasses.replace(TEXT, text=dataclasses.replace(TEXT.text, tie_word_embeddings=tied))
    policy = models.create(sizes, seed=1)
    composition = compose(groups, prepared, config, version=VERSION)
    learner = Learner(config, policy, grpo.token_loss, mesh=make_mesh(1))
    critic = critic_for(config, policy, learner)
    got = unpack(composition, [critic.logprobs(batch.inputs)[0] for batch in composition.batches])
    row = np.asarray(critic.params["head"]["table"])[0]
    for batch in composition.batches:  # as the policy's hidden states have it
        whole = np.asarray(hidden_states(merge(*split(policy)), batch.inputs, Walk()))
        predecessor = np.asarray(batch.inputs.predecessor_BT)
        want = np.take_along_axis(whole @ row, np.maximum(predecessor, 0), axis=1)
    for key, value in unpack(composition, [want]).items():
        np.testing.assert_allclose(got[key], value, atol=1e-5)
    fresh = critic_for(config, policy, learner, None)
    assert not np.asarray(fresh.logprobs(composition.batches[0].inputs)[0]).any(), "it begins without an opinion"
    leaves, of_policy = (len(jax.tree.leaves(tree)) for tree in (critic.params, split(policy)[1]))
    assert "head" in critic.params and leaves == of_policy + int(tied)


# --- whole steps -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("in_reward", [False, True])
def test_advantages_are_those_of_the_values_before_the_step(in_reward):
    """Each response by itself, by the sums of their definition, then whitened over the step; KL token by token."""
    settings = {"kl_coefficient": 0.3, "kl_estimator": KlEstimator.K1, "kl_in_reward": in_reward}
    algorithm = AlgorithmConfig.of("ppo", minibatches=2, **settings)
    trainer, _ = trainer_of(algorithm, referred=True, critic={"gae_lambda": 0.8})
    critic = trainer._critic
    groups, prepared, own = near_policy()
    config = trainer._config
    halves = [PPO().advantages(some, config.algorithm) for some in (groups[::2], groups[1::2])]
    compositions = composed(trainer, [Portion(some, prepared) for some in halves])

    def stored(name):
        found = {}
        for composition in compositions:
            found |= unpack(composition, [getattr(batch, name) for batch in composition.batches])
        return found

    values, reference = {}, stored("reference_logprobs_BT")
    for composition in compositions:
        values |= unpack(composition, [critic.logprobs(batch.inputs)[0] for batch in composition.batches])
    want = {}
    for sample in samples_of(groups):
        key = key_of(sample)
        v, rewards = [*values[key].astype(np.float64), 0.0], np.zeros(len(values[key]))
        rewards[-1] = sample.reward.value
        if in_reward:
            rewards -= 0.3 * (own[key] - reference[key])
        deltas = [rewards[t] + v[t + 1] - v[t] for t in range(len(rewards))]
        count = len(rewards)
        want[key] = np.array([sum(0.8 ** (u - t) * deltas[u] for u in range(t, count)) for t in range(count)])
    everything = np.concatenate(list(want.values()))
    mean, std = everything.mean(), everything.std(ddof=1)
    advantages, returns, before = stored("advantages_BT"), stored("returns_BT"), stored("values_BT")
    assert advantages.keys() == want.keys()
    for key, value in want.items():
        np.testing.assert_allclose(advantages[key], (value - mean) / std, atol=1e-4)
        np.testing.assert_allclose(returns[key], value + values[key], atol=1e-4)
        np.testing.assert_array_equal(before[key], values[key])
    step = trainer.train(0, groups, prepared)
    reported = {key_of(s): s.advantage for g in step.groups for s in g.samples}
    means = {key: ((want[key] - mean) / std).mean() if key in want else 0.0 for key in reported}
    assert reported == pytest.approx(means, abs=1e-4)
    assert step.metrics["critic/return_mean"] == pytest.approx(np.concatenate([*returns.values()]).mean(), abs=1e-5)
    rewards = np.mean([s.reward.value for g in groups for s in g.samples])
    assert step.metrics["reward/mean"] == pytest.approx(rewards), "rewards are reported as they were given"


@pytest.mark.slow
def test_the_policy_rests_while_the_critic_warms_up():
    trainer, learner = trainer_of(ALGORITHM_CASES["ppo twice"], falling=20, critic={"warmup_steps": VERSION + 2})
    critic = trainer._critic
    groups, prepared, _ = near_policy()
    first, value = flat(learner), flat(critic)
    for step in range(2):
        metrics = trainer.train(step, groups, prepared).metrics
        assert "loss" not in metrics and metrics["critic/loss"] > 0 and metrics["reward/mean"]
        np.testing.assert_array_equal(flat(learner), first)
        assert (flat(critic) != value).any()
        value = flat(critic)
    assert (learner.version, critic.version) == (VERSION + 2, 2)
    metrics = trainer.train(2, groups, prepared).metrics
    assert (flat(learner) != first).any() and learner.version == VERSION + 3
    assert metrics["lr"] == pytest.approx(1e-3 * (1 - 3 / (7 * 4))), "the policy's schedule begins after them"
    assert metrics["critic/lr"] == pytest.approx(1e-3 * (1 - 11 / (20 * 4)))


class Centred(RLAlgorithm):
    """One of somebody's own: the outcome is the reward relative to its group."""

    critic = True

    def advantages(self, groups, cfg):
        return grpo.advantages(groups, cfg)

    def token_loss(self, logprobs_BT, entropies_BT, batch, cfg):
        return grpo.token_loss(logprobs_BT, entropies_BT, batch, cfg)


@pytest.mark.slow
def test_own_algorithms_may_have_a_critic():
    algorithm = AlgorithmConfig(name=Centred())
    trainer, _ = trainer_of(algorithm, critic={"gae_lambda": 1.0})
    groups, prepared, _ = near_policy()
    groups = grpo.advantages(groups, AlgorithmConfig())
    [composition] = composed(trainer, [Portion(groups, prepared)])
    wanted = {key_of(s): s.advantage for s in samples_of(groups)}
    for key, values in unpack(composition, [np.asarray(batch.returns_BT) for batch in composition.batches]).items():
        np.testing.assert_allclose(values, wanted[key], atol=1e-5)


# --- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stream_trainer", "speculative_sync"])
@pytest.mark.parametrize("algorithm", [PPO(), Centred()])
def test_gradients_before_a_step_is_complete_are_refused(name, algorithm):
    config = Config(algorithm=AlgorithmConfig(name=algorithm))
    setattr(config, name, True if name == "stream_trainer" else 0.5)
    with pytest.raises(ConfigError, match=f"{name} computes gradients before a step is complete"):
        check_algorithm(config, algorithm)


def test_a_rest_without_a_critic_is_refused():
    check_algorithm(Config(algorithm=AlgorithmConfig.of("ppo")), PPO())
    config = Config()
    config.critic.warmup_steps = 3
    with pytest.raises(ConfigError, match=r"critic.warmup_steps is 3, but algorithm.name = grpo has no critic"):
        check_algorithm(config, grpo.GRPO())
