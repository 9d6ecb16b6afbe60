"""The importance correction: its formula token by token, its gradients, and that no layout of a step changes it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packing_cases import MODEL, make_config, make_groups
from test_algorithms import finite_differences, loss_of, make_batch, random_case

import models
from fluxjax import cli
from fluxjax.algorithms import grpo, importance
from fluxjax.algorithms.loss import clipped_surrogate, masked
from fluxjax.batching import compose, unpack, with_importance
from fluxjax.config import AlgorithmConfig, Config, ConfigError, Strategy
from fluxjax.learner import Learner
from fluxjax.policy_config import Importance, ImportanceConfig, ImportanceLevel
from fluxjax.stages import PolicyTrainer
from models.config import Qwen2Config
from sharding.mesh import make_mesh

TOLERANCE = 1e-5  # float32 against float64, values of order one
KINDS = {
    "none": ImportanceConfig(),
    "decay": ImportanceConfig(decay=0.8),
    "truncate": ImportanceConfig(Importance.TRUNCATE, high=1.5, decay=0.9),
    "mask": ImportanceConfig(Importance.MASK, low=0.6, high=1.7, decay=0.9),
    "mask_above": ImportanceConfig(Importance.MASK, low=0.0, high=1.7),
}


def weight_of(ratio: float, lag: int, cfg: ImportanceConfig) -> float:
    """The formula, written down once more."""
    if cfg.kind is Importance.TRUNCATE:
        ratio = min(ratio, cfg.high)
    elif cfg.kind is Importance.MASK and not cfg.low <= ratio <= cfg.high:
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
    on_host, changed = importance.log_weight(ratios, lags, cfg)
    np.testing.assert_allclose(np.exp(on_host), want, rtol=1e-12)
    on_device, changed_too = importance.log_weight(jnp.asarray(ratios, jnp.float32), jnp.asarray(lags), cfg)
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

    np.testing.assert_allclose(
        loss_of(grpo, jnp.asarray(logprobs), entropies, batch, cfg)[0], reference(exact), atol=TOLERANCE
    )
    want = finite_differences(reference, exact)
    np.testing.assert_allclose(gradient_of(logprobs, entropies, batch, cfg), want, atol=TOLERANCE)


@pytest.mark.parametrize("decoupled", [True, False])
def test_masked_tokens_have_no_gradient(decoupled):
    logprobs, entropies, batch = stale_case(0)
    gradient = gradient_of(logprobs, entropies, batch, configured(KINDS["mask"], decoupled=decoupled))
    ratios = np.exp(np.float64(logprobs) - batch.behaviour_logprobs_BT)
    outside = (ratios < 0.6) | (ratios > 1.7)
    assert outside[batch.loss_weights_BT != 0].any() and not gradient[outside].any()
    if decoupled:
        assert gradient[~outside & (batch.loss_weights_BT != 0)].all()


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
        sums, maxima = importance.tally(
            logprobs, jax.tree.map(jnp.asarray, batch), jnp.asarray(trained), cfg.importance
        )
        metrics = importance.metrics({name: float(v) for name, v in (sums | maxima).items()}, float(trained.size))
        assert np.isfinite(list(metrics.values())).all()


# --- metrics ------------------------------------------------------------------------------------


def metrics_of(logprobs, batch, cfg):
    generated = batch.loss_weights_BT != 0
    batch = jax.tree.map(jnp.asarray, batch)
    sums, maxima = importance.tally(jnp.asarray(logprobs), batch, jnp.asarray(generated), cfg)
    return importance.metrics({name: float(v) for name, v in (sums | maxima).items()}, float(generated.sum()))


@pytest.mark.parametrize("name", KINDS)
def test_metrics_against_numpy(name):
    logprobs, _, batch = stale_case(4)
    trained = batch.loss_weights_BT != 0
    log_ratios = (np.float64(logprobs) - batch.behaviour_logprobs_BT)[trained]
    ratios, lags = np.exp(log_ratios), batch.lags_BT[trained]
    weights = np.array([weight_of(ratio, lag, KINDS[name]) for ratio, lag in zip(ratios, lags, strict=True)])
    kind, low, high = KINDS[name].kind, KINDS[name].low, KINDS[name].high
    clipped = {Importance.NONE: ratios < 0, Importance.TRUNCATE: ratios > high}.get(
        kind, (ratios < low) | (ratios > high)
    )
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


def test_on_policy_every_token_counts_and_nothing_is_stale():
    logprobs, _, batch = random_case(0)
    batch = dataclasses.replace(batch, behaviour_logprobs_BT=logprobs)
    for cfg in KINDS.values():
        assert metrics_of(logprobs, batch, cfg) == {
            "importance/ess": 1.0,
            "importance/mean": 1.0,
            "importance/clipped": 0.0,
            "staleness/kl": 0.0,
            "staleness/variance": 0.0,
            "staleness/lag_mean": 0.0,
            "staleness/lag_max": 0.0,
        }


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


# --- whole steps --------------------------------------------------------------------------------

CONTENTS = [[5], [9], [4], [12]]
LENGTHS = [[3, 1, 6], [4, 0, 4], [9, 5], [6, 3]]
VERSION = 11  # of the trainer; tokens are of 0 to 8, several versions a response
TOKEN = ImportanceConfig(Importance.TRUNCATE, high=1.3, decay=0.9, decoupled=True)
NORMALIZED = ImportanceConfig(Importance.MASK, low=0.7, high=1.4, decay=0.9, normalize=True)
SEQUENCE = ImportanceConfig(
    Importance.MASK, ImportanceLevel.SEQUENCE, low=0.8, high=1.1, decay=0.9, decoupled=True, normalize=True
)
TEXT = Qwen2Config(text=dataclasses.replace(MODEL.text, rope=dataclasses.replace(MODEL.text.rope, mrope_section=())))
LAYOUTS = {
    "one row": (1, {"tokens_per_row": 128}),
    "rows": (1, {"tokens_per_row": 24, "rows": 8, "share": False}),
    "fsdp": (3, {}),
    "flex_ulysses": (4, {"strategy": Strategy.FLEX_ULYSSES, "tokens_per_row": 32}),  # groups are cut across devices
    "odc": (2, {"strategy": Strategy.ODC}),
}


def config_for(cfg: ImportanceConfig, strategy=Strategy.FSDP, tokens_per_row=64, rows=1, share=True) -> Config:
    config = make_config(tokens_per_row, rows, share=share)
    config.algorithm.importance = cfg
    config.sharding.strategy = strategy
    config.optim.eps = 1e-2  # Adam divides by tiny second moments, which would turn rounding into whole steps
    return config


def samples_of(groups):
    return [sample for group in groups for sample in group.samples if sample.response.token_ids]


def key_of(sample):
    return sample.response.draw, sample.response.sample


@functools.cache
def near_policy():
    """Groups with advantages, of mixed versions, whose behaviour log-probs lie near the policy's; the policy's own."""
    groups, prepared = make_groups(CONTENTS, LENGTHS, seed=5)
    config = config_for(ImportanceConfig(), tokens_per_row=128)
    composition = compose(groups, prepared, config)
    learner = Learner(config, models.create(TEXT, seed=1), grpo.token_loss, mesh=make_mesh(1))
    own = unpack(composition, [learner.logprobs(batch.inputs)[0] for batch in composition.batches])
    rng = np.random.default_rng(0)

    def near(sample):
        values = own.get(key_of(sample), np.zeros(0))
        logprobs = tuple((values + rng.uniform(-0.7, 0.7, len(values))).astype(np.float32).tolist())
        return dataclasses.replace(sample, response=dataclasses.replace(sample.response, logprobs=logprobs))

    groups = [dataclasses.replace(group, samples=tuple(map(near, group.samples))) for group in groups]
    return grpo.advantages(groups, config.algorithm), prepared, own


def expected(cfg: ImportanceConfig):
    """(ratios, ratios of the level, weights, lags) of each response: the formula in plain numpy."""
    groups, _, own = near_policy()
    found = {}
    for sample in samples_of(groups):
        ratios = np.exp(np.float64(own[key_of(sample)]) - sample.response.logprobs)
        level = np.full_like(ratios, np.prod(ratios) ** (1 / len(ratios)))
        level = level if cfg.level is ImportanceLevel.SEQUENCE else ratios
        lags = VERSION - np.array(sample.response.versions)
        weights = np.array([weight_of(ratio, lag, cfg) for ratio, lag in zip(level, lags, strict=True)])
        found[key_of(sample)] = ratios, level, weights, lags
    return found


def joined(found, index):
    return np.concatenate([values[index] for values in found.values()])


@pytest.mark.parametrize("cfg", [NORMALIZED, SEQUENCE], ids=["normalized", "sequence"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_same_ratios_and_lags(name, cfg):
    groups, prepared, own = near_policy()
    devices, layout = LAYOUTS[name]
    plain = compose(groups, prepared, config_for(cfg, **layout), devices, text=TEXT.text, version=VERSION)
    composition = with_importance(plain, scattered(plain, own), cfg)
    if name == "flex_ulysses":
        assert max(degree for batch in plain.batches for degree, _ in batch.inputs.spread.rounds) > 1
    found = expected(cfg)
    mean = joined(found, 2).mean()
    fields = ("response_log_ratios_BT", "advantages_BT", "lags_BT")
    ratios, advantages, lags = (
        unpack(composition, [getattr(batch, field) for batch in composition.batches]) for field in fields
    )
    for sample in samples_of(groups):
        key = key_of(sample)
        _, level, _, lag = found[key]
        np.testing.assert_array_equal(lags[key], lag)
        np.testing.assert_allclose(advantages[key], sample.advantage / mean, rtol=TOLERANCE)
        want = np.log(level) if cfg.level is ImportanceLevel.SEQUENCE else np.zeros_like(level)
        np.testing.assert_allclose(ratios[key], want, atol=TOLERANCE)
    for before, after in zip(plain.batches, composition.batches, strict=True):
        untrained = after.loss_weights_BT == 0
        assert (after.lags_BT[untrained] == -1).all() and not after.response_log_ratios_BT[untrained].any()
        assert after.advantages_BT.dtype == after.response_log_ratios_BT.dtype == np.float32
        assert jax.tree.map(np.shape, before) == jax.tree.map(np.shape, after)


def scattered(composition, values):
    """The arrays `[B, T]` from which `unpack` would take these values of each response; NaN elsewhere."""
    sizes = [batch.loss_weights_BT.size for batch in composition.batches]
    flat = np.full(sum(sizes), np.nan, np.float32)
    flat[composition.cells] = np.concatenate([values[key] for key in composition.keys])
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(b.loss_weights_BT.shape) for part, b in zip(parts, composition.batches, strict=True)]


@functools.cache
def trained(cfg_name: str, layout_name: str):
    """Metrics and parameters after one step of the trainer."""
    cfg = {"token": TOKEN, "sequence": SEQUENCE}[cfg_name]
    devices, layout = LAYOUTS[layout_name]
    config = config_for(cfg, **layout)
    groups, prepared, _ = near_policy()
    learner = Learner(config, models.create(TEXT, seed=1), grpo.token_loss, mesh=make_mesh(devices))
    learner.version = VERSION
    metrics = PolicyTrainer(config, learner, None, None).train(0, groups, prepared)
    assert learner.version == VERSION + 1
    return metrics, learner.params


@pytest.mark.parametrize("name", ["token", "sequence"])
def test_a_step_has_the_weights_of_the_formula(name):
    cfg = {"token": TOKEN, "sequence": SEQUENCE}[name]
    metrics, _ = trained(name, "one row")
    found, groups = expected(cfg), near_policy()[0]
    ratios, weights, lags = joined(found, 0), joined(found, 2), joined(found, 3)
    scale = len(weights) * (weights.mean() if cfg.normalize else 1.0)
    loss = -sum(sample.advantage * found[key_of(sample)][2].sum() for sample in samples_of(groups)) / scale
    want = {
        "loss": loss,
        "ratio": 1.0,
        "importance/ess": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "importance/mean": weights.mean(),
        "staleness/kl": np.mean(ratios - 1 - np.log(ratios)),
        "staleness/variance": ratios.var(),
        "staleness/lag_mean": lags.mean(),
        "staleness/lag_max": lags.max(),
    }
    assert {key: metrics[key] for key in want} == pytest.approx(want, rel=1e-4, abs=TOLERANCE)
    assert 0.0 < metrics["importance/clipped"] < 1.0


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("token", "fsdp", id="token-fsdp"),
        pytest.param("sequence", "fsdp", id="sequence-fsdp"),
        pytest.param("sequence", "flex_ulysses", id="sequence-flex_ulysses", marks=pytest.mark.slow),
    ],
)
def test_devices_do_not_change_a_step(name, layout):
    (want, want_params), (got, got_params) = trained(name, "one row"), trained(name, layout)
    same = [key for key in want if not key.startswith(("packing/", "sharding/"))]
    assert {key: got[key] for key in same} == pytest.approx({key: want[key] for key in same}, rel=1e-4, abs=1e-5)
    for mine, theirs in zip(jax.tree.leaves(got_params), jax.tree.leaves(want_params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_a_token_from_the_future_is_refused():
    groups, prepared, _ = near_policy()
    with pytest.raises(ValueError, match=r"weights 8, which are newer than those to train, 7"):
        compose(groups, prepared, config_for(TOKEN, tokens_per_row=128), version=7)


# --- configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("low", "1.5", "low is 1.5; it must be in [0, 1)"),
        ("low", "-0.1", "low is -0.1; it must be in [0, 1)"),
        ("high", "1", "high is 1.0; it must be greater than 1"),
        ("decay", "0", "decay is 0.0; it must be in (0, 1]"),
        ("decay", "1.1", "decay is 1.1; it must be in (0, 1]"),
        ("kind", "clip", "'clip' is not one of none, truncate, mask"),
    ],
)
def test_mistakes_name_the_field(field, value, says):
    with pytest.raises(ConfigError) as caught:
        cli.load([f"--config.algorithm.importance.{field}={value}"])
    assert f"algorithm.importance.{field}" in str(caught.value) and says in str(caught.value)
