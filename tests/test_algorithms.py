"""GRPO and SFT against numbers worked out by hand; `test_objectives` has GRPO's loss against its formula."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxjax.algorithms import ALGORITHMS, grpo, sft
from fluxjax.algorithms.loss import response_weights
from fluxjax.base.types import Group, Prompt, Response, Reward, Sample, TrainBatch, has_variance
from fluxjax.config import OWN_SETTINGS, AlgorithmConfig, LossAggregation
from models.inputs import PackedTokens

ROWS, TOKENS = 2, 12
TOLERANCE = 1e-5  # float32 against float64, values of order one

F32 = [float(np.float32(0.1) + np.float32(0.2)), float(np.float32(0.3)), 0.3]  # as rewards out of JAX are


def group(rewards, draw=0):
    samples = tuple(
        Sample(Response(f"{draw}/{i}", draw, i, (1,), (-1.0,), (0,), "stop"), Reward(value, value > 0.5))
        for i, value in enumerate(rewards)
    )
    return Group(Prompt(f"prompt-{draw}", "test", "?", "!", draw=draw), samples)


def advantages_of(groups):
    return [[sample.advantage for sample in one.samples] for one in groups]


# --- advantages ---------------------------------------------------------------------------------


def test_every_algorithm_of_the_config_has_a_module():
    assert set(ALGORITHMS) == set(OWN_SETTINGS)


def test_advantages_by_hand():
    # Rewards 1, 0, 0, 1: mean 1/2, sample variance (4 * 1/4) / 3 = 1/3.
    [got] = advantages_of(grpo.advantages([group([1.0, 0.0, 0.0, 1.0])], AlgorithmConfig()))
    np.testing.assert_allclose(got, 0.5 * math.sqrt(3.0) * np.array([1, -1, -1, 1]), rtol=1e-5)
    [undivided] = advantages_of(grpo.advantages([group([1.0, 0.0, 0.0, 0.0])], AlgorithmConfig(normalize_std=False)))
    np.testing.assert_allclose(undivided, [0.75, -0.25, -0.25, -0.25], rtol=1e-12)


def test_groups_do_not_influence_each_other():
    alone = grpo.advantages([group([3.0, 1.0])], AlgorithmConfig())
    together = grpo.advantages([group([9.0, -9.0], draw=1), group([3.0, 1.0])], AlgorithmConfig())
    assert together[1] == alone[0]


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.0] * 4, [1.0], [], [0.3, 0.1 + 0.2], [0.0, 0.3 - 0.1 - 0.2], F32])
def test_equal_rewards_give_exactly_zero(rewards, normalize_std):
    # 0.1 has no exact binary form: the mean of seven is not 0.1.
    groups = [group(rewards), group([1.0, 0.0], draw=1)]
    cfg = AlgorithmConfig(normalize_std=normalize_std)
    assert advantages_of(grpo.advantages(groups, cfg))[0] == [0.0] * len(rewards)
    assert [has_variance(group) for group in groups] == [False, True]
    for name in ("dr_grpo", "rloo", "reinforce_plus_plus_baseline"):
        [got] = advantages_of(ALGORITHMS[name].advantages(groups[:1], AlgorithmConfig.of(name)))
        assert got == [0.0] * len(rewards)


def test_small_rewards_that_differ_are_told_apart():
    assert all(map(has_variance, [group([1e-6, 2e-6]), group([1000.0, 1000.01], 1), group([-1.0, 1.0], 2)]))


def test_advantages_refuse_a_reward_that_is_not_finite():
    with pytest.raises(ValueError, match=r"prompt-3.*finite"):
        grpo.advantages([group([1.0, math.nan], draw=3)], AlgorithmConfig())


def test_sft_weighs_every_answer_the_same():
    assert advantages_of(sft.advantages([group([0.0, 5.0])], AlgorithmConfig())) == [[1.0, 1.0]]


# --- loss weights -------------------------------------------------------------------------------


def test_loss_weights_refuse_a_step_without_tokens():
    with pytest.raises(ValueError, match="nothing to train on"):
        response_weights(np.array([0, 0]), LossAggregation.TOKEN_MEAN, 16)


# --- token losses -------------------------------------------------------------------------------


def make_batch(rng, trained_BT, behaviour_BT, reference_BT=None, advantages_BT=None):
    shape = trained_BT.shape
    zeros = np.zeros(shape, np.int32)
    weights = np.where(trained_BT, rng.uniform(0.01, 0.1, shape), 0.0)
    return TrainBatch(
        inputs=PackedTokens(zeros, zeros, zeros, np.zeros((3, *shape), np.int32), zeros, zeros - 1, None),
        loss_weights_BT=weights.astype(np.float32),
        advantages_BT=(rng.normal(size=shape) if advantages_BT is None else advantages_BT).astype(np.float32),
        behaviour_logprobs_BT=behaviour_BT.astype(np.float32),
        reference_logprobs_BT=(np.zeros(shape) if reference_BT is None else reference_BT).astype(np.float32),
        response_log_ratios_BT=np.zeros(shape, np.float32),
        lags_BT=zeros,
    )


def loss_of(module, logprobs_BT, entropies_BT, batch, cfg):
    batch = jax.tree.map(jnp.asarray, batch)  # as inside `jit`
    loss_BT, metrics = module.token_loss(logprobs_BT, entropies_BT, batch, cfg)
    return jnp.sum(batch.loss_weights_BT * loss_BT), metrics


def finite_differences(function, x, step=1e-6):
    gradient = np.zeros_like(x)
    for cell in np.ndindex(x.shape):
        shift = np.zeros_like(x)
        shift[cell] = step
        gradient[cell] = (function(x + shift) - function(x - shift)) / (2 * step)
    return gradient


def random_case(seed):
    """Ratios from about 0.4 to 2.5, so that both bounds cut for both signs of the advantage."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, TOKENS)
    behaviour = -rng.uniform(0.1, 4.0, shape)
    logprobs = (behaviour + rng.uniform(-0.9, 0.9, shape)).astype(np.float32)
    trained = rng.uniform(size=shape) < 0.8
    batch = make_batch(rng, trained, behaviour, behaviour + rng.normal(size=shape) * 0.5)
    return logprobs, jnp.asarray(rng.uniform(0, 3, shape), jnp.float32), batch


def test_grpo_by_hand():
    # One token a case: ratio 2 and 1/2, advantage +1 and -1, bounds 0.8 and 1.3.
    ratios = np.array([[2.0, 2.0, 0.5, 0.5]])
    behaviour = np.full((1, 4), -1.0)
    advantages = np.array([[1.0, -1.0, 1.0, -1.0]])
    batch = make_batch(np.random.default_rng(0), np.ones((1, 4), bool), behaviour, behaviour, advantages)
    logprobs = jnp.asarray(behaviour + np.log(ratios), jnp.float32)
    cfg = AlgorithmConfig(clip_low=0.2, clip_high=0.3)
    batch = jax.tree.map(jnp.asarray, batch)
    loss, metrics = grpo.token_loss(logprobs, jnp.ones_like(logprobs), batch, cfg)
    np.testing.assert_allclose(loss, [[-1.3, 2.0, -0.5, 0.8]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction"], [[1.0, 0.0, 0.0, 1.0]])
    np.testing.assert_allclose(metrics["ratio"], ratios, rtol=1e-6)
    assert "reference_kl" not in metrics

    # k3 of reference over policy 1/2 and 2: 1/2 + log 2 - 1 and 2 - log 2 - 1.
    with_kl = dataclasses.replace(cfg, kl_coefficient=0.1)
    loss_kl, metrics = grpo.token_loss(logprobs, jnp.ones_like(logprobs), batch, with_kl)
    kl = [[0.5 + math.log(2) - 1] * 2 + [2 - math.log(2) - 1] * 2]
    np.testing.assert_allclose(metrics["reference_kl"], kl, rtol=1e-5)
    np.testing.assert_allclose(loss_kl - loss, 0.1 * np.array(kl), rtol=1e-4)


def test_entropy_bonus_by_hand():
    logprobs, entropies, batch = random_case(0)
    cfg, bonus = AlgorithmConfig(), AlgorithmConfig(entropy_coefficient=0.05)
    plain, _ = loss_of(grpo, jnp.asarray(logprobs), entropies, batch, cfg)
    value, _ = loss_of(grpo, jnp.asarray(logprobs), entropies, batch, bonus)
    np.testing.assert_allclose(value, plain - 0.05 * np.sum(batch.loss_weights_BT * entropies), atol=1e-6)
    gradient = jax.grad(lambda x: loss_of(grpo, jnp.asarray(logprobs), x, batch, bonus)[0])(entropies)
    np.testing.assert_allclose(gradient, -0.05 * batch.loss_weights_BT, atol=1e-8)


def test_sft_loss_and_gradient():
    logprobs, entropies, batch = random_case(1)
    cfg = AlgorithmConfig(name="sft")
    value, metrics = loss_of(sft, jnp.asarray(logprobs), entropies, batch, cfg)
    exact = -np.sum(batch.loss_weights_BT.astype(np.float64) * logprobs)
    np.testing.assert_allclose(value, exact, rtol=TOLERANCE)
    gradient = jax.grad(lambda x: loss_of(sft, x, entropies, batch, cfg)[0])(jnp.asarray(logprobs))
    np.testing.assert_allclose(gradient, -batch.loss_weights_BT, atol=1e-7)
    trained = batch.loss_weights_BT != 0
    np.testing.assert_allclose(metrics["nll"], np.where(trained, -logprobs, 0), rtol=1e-6)


@pytest.mark.parametrize("module", [grpo, sft])
def test_untrained_tokens_never_count_however_wild(module):
    logprobs, entropies, batch = random_case(2)
    cfg = AlgorithmConfig(kl_coefficient=0.1)
    untrained = batch.loss_weights_BT == 0
    wild = np.where(untrained, np.where(np.arange(TOKENS) % 2, -3e4, 3e4), logprobs).astype(np.float32)
    objective = jax.value_and_grad(lambda x: loss_of(module, x, entropies, batch, cfg), has_aux=True)
    (value, metrics), gradient = objective(jnp.asarray(logprobs))
    (wild_value, wild_metrics), wild_gradient = objective(jnp.asarray(wild))
    assert float(value) == float(wild_value)
    np.testing.assert_array_equal(gradient, wild_gradient)
    assert not np.asarray(gradient)[untrained].any()
    for name, values in metrics.items():
        np.testing.assert_array_equal(values, wild_metrics[name], err_msg=name)
        assert not np.asarray(values)[untrained].any(), name
