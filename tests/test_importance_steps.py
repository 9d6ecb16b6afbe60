"""The importance correction of whole steps: the trainer's metrics and update, and that no layout changes them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from packing_cases import MODEL, compose, make_config, make_groups
from test_importance import TOLERANCE, weight_of

import models
from fluxjax.algorithms import grpo
from fluxjax.batch.composer import Composer
from fluxjax.batch.composition import unpack
from fluxjax.batch.loss_inputs import with_importance
from fluxjax.config import Config, Importance, ImportanceConfig, ImportanceLevel, Strategy
from fluxjax.learner.learner import Learner
from fluxjax.learner.policy_trainer import PolicyTrainer
from models.config import Qwen2Config
from sharding.mesh import make_mesh

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
    groups, prepared = make_groups([[*content] for content in CONTENTS], LENGTHS, seed=5)
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
        ratios = np.exp(np.float64(own[key_of(sample)]) - np.array(sample.response.logprobs))
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
    composer = Composer(config, devices, text=learner.text)
    metrics = PolicyTrainer(config, learner, composer, None).train(0, groups, prepared).metrics
    assert learner.version == VERSION + 1
    return metrics, learner.params


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("token", "fsdp", id="token-fsdp"),
        pytest.param("sequence", "fsdp", id="sequence-fsdp"),
        pytest.param("sequence", "flex_ulysses", id="sequence-flex_ulysses", marks=pytest.mark.long),
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
