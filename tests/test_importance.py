"""The importance correction: its formula token by token, its gradients, its metrics, its settings."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_algorithms import finite_differences, loss_of, make_batch, random_case

from fluxjax.algorithms import grpo, loss
from fluxjax.algorithms.loss import clipped_surrogate, masked
from fluxjax.config import AlgorithmConfig, Importance, ImportanceConfig

TOLERANCE = 1e-5  # float32 against float64, values of order one
KINDS = {
    "none": ImportanceConfig(),
    "decay": ImportanceConfig(decay=0.8),
    "truncate": ImportanceConfig(Importance.TRUNCATE, bounds=(0.5, 1.5), decay=0.9),
    "mask": ImportanceConfig(Importance.MASK, bounds=(0.6, 1.7), decay=0.9),
    "mask_above": ImportanceConfig(Importance.MASK, bounds=(0.0, 1.7)),
}


def weight_of(ratio: float, lag: int, cfg: ImportanceConfig) -> float:
    """The formula, written down once more."""
    if cfg.kind is Importance.TRUNCATE:
        ratio = min(ratio, cfg.bounds[1])
    elif cfg.kind is Importance.MASK and not cfg.bounds[0] <= ratio <= cfg.bounds[1]:
        ratio = 0.0
    return ratio * cfg.decay ** max(lag, 0)


def stale_case(seed: int):
    """Ratios from 0.4 to 2.5 and lags from 0 to 5, mixed within a row."""
    logprobs, entropies, batch = random_case(seed)
    lags = np.random.default_rng(seed).integers(0, 6, logprobs.shape).astype(np.int32)
    return logprobs, entropies, dataclasses.replace(batch, lags_BT=lags)


def configured(cfg: ImportanceConfig, **changes) -> AlgorithmConfig:
    return AlgorithmConfig(importance=dataclasses.replace(cfg, **changes))


def gradient_of(logprobs, entropies, batch, cfg):
    return np.asarray(jax.grad(lambda x: loss_of(grpo, x, entropies, batch, cfg)[0])(jnp.asarray(logprobs)))


# --- the formula --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_formula_against_a_loop_on_either_side(name):
    cfg = KINDS[name]
    rng = np.random.default_rng(3)
    ratios, lags = rng.uniform(-1.5, 1.5, 200), rng.integers(-1, 6, 200).astype(np.int32)
    want = [weight_of(math.exp(ratio), int(lag), cfg) for ratio, lag in zip(ratios, lags, strict=True)]
    on_host, changed = loss.log_weight(ratios, lags, cfg)
    np.testing.assert_allclose(np.exp(on_host), want, rtol=1e-12)
    on_device, changed_too = loss.log_weight(jnp.asarray(ratios, jnp.float32), jnp.asarray(lags), cfg)
    np.testing.assert_allclose(np.exp(on_device), want, rtol=TOLERANCE)
    np.testing.assert_array_equal(changed, changed_too)
    assert changed.any() == (cfg.kind is not Importance.NONE)


def plain_grpo(logprobs_BT, batch, cfg):
    """GRPO's loss before there was a correction."""
    trained_BT = batch.loss_weights_BT != 0.0
    ratio_BT = jnp.exp(masked(logprobs_BT - batch.behaviour_logprobs_BT, trained_BT))
    objective_BT, _ = clipped_surrogate(ratio_BT, batch.advantages_BT, cfg.clip_low, cfg.clip_high)
    return jnp.sum(batch.loss_weights_BT * masked(-objective_BT, trained_BT))


@pytest.mark.parametrize("seed", range(3))
def test_defaults_are_plain_grpo_bit_for_bit(seed):
    logprobs, entropies, batch = stale_case(seed)
    batch, cfg = jax.tree.map(jnp.asarray, batch), AlgorithmConfig()
    want = jax.jit(jax.value_and_grad(lambda x: plain_grpo(x, batch, cfg)))(jnp.asarray(logprobs))
    got = jax.jit(jax.value_and_grad(lambda x: loss_of(grpo, x, entropies, batch, cfg)[0]))(jnp.asarray(logprobs))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.medium
@pytest.mark.parametrize("name", KINDS)
def test_decoupled_gradient_is_the_weighted_policy_gradient(name):
    """-w A grad log pi, with w by the loop: no clipping in a batch's only step, however stale its tokens."""
    logprobs, entropies, batch = stale_case(1)
    ratios = np.exp(np.float64(logprobs) - batch.behaviour_logprobs_BT)
    weights = np.vectorize(lambda ratio, lag: weight_of(ratio, lag, KINDS[name]))(ratios, batch.lags_BT)
    want = -weights * batch.advantages_BT * batch.loss_weights_BT
    cfg = configured(KINDS[name], decoupled=True)
    np.testing.assert_allclose(gradient_of(logprobs, entropies, batch, cfg), want, atol=TOLERANCE)
    value, metrics = loss_of(grpo, jnp.asarray(logprobs), entropies, batch, cfg)
    np.testing.assert_allclose(value, want.sum(), atol=TOLERANCE)
    assert not np.asarray(metrics["clip_fraction"]).any()


@pytest.mark.parametrize("name", KINDS)
def test_coupled_gradient_against_float64_finite_differences(name):
    """-w / (proximal / behaviour) min(r A, clip(r) A) with r = policy / behaviour and w held fixed."""
    logprobs, entropies, batch = stale_case(2)
    cfg, exact = configured(KINDS[name]), logprobs.astype(np.float64)
    proximal = np.exp(exact - batch.behaviour_logprobs_BT)
    factors = np.vectorize(lambda ratio, lag: weight_of(ratio, lag, KINDS[name]) / ratio)(proximal, batch.lags_BT)

    def reference(x):
        ratio = np.exp(x - batch.behaviour_logprobs_BT)
        bounded = np.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
        advantages = batch.advantages_BT.astype(np.float64)
        return -np.sum(factors * batch.loss_weights_BT * np.minimum(ratio * advantages, bounded * advantages))

    value, _ = loss_of(grpo, jnp.asarray(logprobs), entropies, batch, cfg)
    np.testing.assert_allclose(value, reference(exact), atol=TOLERANCE)
    want = finite_differences(reference, exact)
    np.testing.assert_allclose(gradient_of(logprobs, entropies, batch, cfg), want, atol=TOLERANCE)


@pytest.mark.medium
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_extreme_log_ratios_stay_finite(name, decoupled):
    shape = (1, 8)
    behaviour = np.array([[-1e4, -200.0, -30.0, -1.0, -1.0, -1.0, -1.0, -1.0]])
    logprobs = jnp.asarray([[-1.0, -1.0, -1.0, -1e4, -200.0, -30.0, -3e38, -1.0]], jnp.float32)
    trained, rng = np.ones(shape, bool), np.random.default_rng(0)
    for sign in (1.0, -1.0):
        batch = make_batch(rng, trained, behaviour, advantages_BT=np.full(shape, sign))
        batch = dataclasses.replace(batch, lags_BT=np.full(shape, 10_000, np.int32))
        cfg = configured(KINDS[name], decoupled=decoupled)
        value, _ = loss_of(grpo, logprobs, jnp.ones_like(logprobs), batch, cfg)
        gradient = gradient_of(logprobs, jnp.ones_like(logprobs), batch, cfg)
        assert np.isfinite(value) and np.isfinite(gradient).all()
        assert np.isfinite(list(metrics_of(logprobs, batch, cfg.importance).values())).all()


# --- metrics ------------------------------------------------------------------------------------


def metrics_of(logprobs, batch, cfg):
    generated = batch.loss_weights_BT != 0
    batch = jax.tree.map(jnp.asarray, batch)
    sums, maxima = loss.importance_tally(jnp.asarray(logprobs), batch, jnp.asarray(generated), cfg)
    return loss.importance_metrics({name: float(v) for name, v in (sums | maxima).items()}, float(generated.sum()))


@pytest.mark.parametrize("name", KINDS)
def test_metrics_against_numpy(name):
    logprobs, _, batch = stale_case(4)
    trained = batch.loss_weights_BT != 0
    log_ratios = (np.float64(logprobs) - batch.behaviour_logprobs_BT)[trained]
    ratios, lags = np.exp(log_ratios), batch.lags_BT[trained]
    weights = np.array([weight_of(ratio, lag, KINDS[name]) for ratio, lag in zip(ratios, lags, strict=True)])
    kind, (low, high) = KINDS[name].kind, KINDS[name].bounds
    clipped = (kind is not Importance.NONE) & (ratios > high) | (kind is Importance.MASK) & (ratios < low)
    want = {
        "importance/ess": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "importance/mean": weights.mean(),
        "importance/clipped": clipped.mean(),
        "staleness/kl": np.mean(ratios - 1 - log_ratios),
        "staleness/variance": ratios.var(),
        "staleness/lag_mean": lags.mean(),
        "staleness/lag_max": lags.max(),
    }
    assert metrics_of(logprobs, batch, KINDS[name]) == pytest.approx(want, rel=1e-4)


def test_small_variance_is_not_lost_to_rounding():
    """Ratios of 1 +- 1e-4 have a variance of 1e-8, below float32's resolution of 1."""
    shape = (100, 100)
    behaviour = np.full(shape, -0.25)
    logprobs = (behaviour + np.where(np.arange(100) % 2, 1e-4, -1e-4)).astype(np.float32)
    batch = make_batch(np.random.default_rng(0), np.ones(shape, bool), behaviour)
    assert metrics_of(logprobs, batch, ImportanceConfig())["staleness/variance"] == pytest.approx(1e-8, rel=1e-2)


def test_all_masked_is_an_effective_sample_of_none():
    _, _, batch = random_case(0)
    metrics = metrics_of(batch.behaviour_logprobs_BT - 5.0, batch, KINDS["mask"])
    assert metrics["importance/ess"] == metrics["importance/mean"] == 0.0
    assert metrics["importance/clipped"] == 1.0
